"""Steps as one batch are the product's replay, and learning begins at the codes it starts from."""

from pathlib import Path

import pytest
import torch
from experiments.damage import Model, distances, rows_of
from experiments.learned import ARMS, nearest, plan_of
from experiments.learning import Learning, dequantized
from experiments.routing import heldout
from modules_oracle.opening import open_modules

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.recipe.sections import load_recipe
from quantize.runtime.record.trajectory import record
from quantize.runtime.sampler.sampler import Sampler
from quantize.stages.convert.convert import convert
from quantize.stages.fidelity.fidelity import by_trajectory
from quantize.stages.fidelity.replay import Compared, StepDistance, replay
from quantize.stages.round_weights.round_weights import Unit, units_of


def test_steps_as_one_batch_are_the_replay(tmp_path: Path) -> None:
    recipe, source = load_recipe("nvfp4a16"), Checkpoint.open(CHECKPOINT)
    plan = plan_targets(source.tensors, recipe.quantization)
    convert(source, plan, tmp_path / "checkpoint", recipe=recipe)
    sampler, reference = Sampler.from_checkpoint(CHECKPOINT), open_modules(CHECKPOINT, capacity=2)
    made = record(reference, heldout(2), [0, 1], sampler=sampler, canvases=2, held_out=True)
    rows = rows_of(Model(CHECKPOINT, "cpu"), made, sampler)
    found = distances(Model(tmp_path / "checkpoint", "cpu"), rows, sampler)
    compared = Compared(open_modules(tmp_path / "checkpoint", capacity=2))
    (replayed,) = replay(reference, [compared], made, sampler, batch_size=2)

    def mean(value: str) -> list[float]:
        def of(step: StepDistance) -> float:
            return torch.as_tensor(getattr(step, value)).float().mean().item()

        return list(by_trajectory(replayed, of).values())

    # Float32 sums in another order move logits of up to 30 / 0.4 by 1e-5 or so.
    assert found["kl"] == pytest.approx(mean("kl"), abs=1e-4, rel=1e-3)
    assert found["jaccard"] == pytest.approx(mean("jaccard"), abs=0.02)
    assert [1 - each for each in found["flips"]] == pytest.approx(mean("agrees"), abs=0.01)
    assert max(found["kl"]) > 1e-3  # or nothing was compared


def unit_of(attention: str) -> Unit:
    _, targets = plan_of(ARMS["nvfp4" if attention == "NVFP4A16" else "fp8"])
    return next(
        unit for unit in units_of(targets) if unit.reads.endswith("layers.0.self_attn.q_proj")
    )


@pytest.mark.parametrize(
    ("attention", "kind"),
    [("NVFP4A16", "scales"), ("NVFP4A16", "kept"), ("NVFP4A16", "both"), ("FP8_DYNAMIC", "both")],
)
def test_learning_begins_at_its_start(attention: str, kind: str) -> None:
    start = nearest(unit_of(attention))
    learning = Learning(start, dequantized(start), kind, "cpu")
    assert torch.equal(dequantized(learning.done()), dequantized(start))
    weight = learning.weight()
    torch.testing.assert_close(weight, dequantized(start), rtol=2**-8, atol=0)  # BF16's rounding
    weight.square().sum().backward()
    for group in learning.groups(1.0):
        (moved,) = group["params"]
        assert moved.grad is not None
        with torch.no_grad():
            moved -= 2 * moved.grad.sign()
    assert dequantized(learning.done()).norm() < dequantized(start).norm()
