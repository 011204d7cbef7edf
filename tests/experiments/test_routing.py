"""Held routers: BF16's experts in another model, and an error where the passes differ."""

from pathlib import Path

import pytest
import torch
from experiments.routing import held_choice, routers_held

from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.record.trajectory import Prompt, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import load_packed
from quantize.stages.fidelity.replay import Compared, StepDistance, replay
from tests.support.tiny import CANVAS

pytestmark = pytest.mark.usefixtures("one_core")
SAMPLER = Sampler(max_new_tokens=2 * CANVAS, max_denoising_steps=3)


def distances(bf16: Path, quantized: Path, held: str) -> list[StepDistance]:
    """Replay two canvases of BF16 through the quantized model."""
    reference, engine = (
        FusedEngine(load_packed(folder, "cpu"), capacity=2) for folder in (bf16, quantized)
    )
    prompts = [Prompt((5, 6, 7, 8), False), Prompt((9, 8, 7), False)]
    made = record(reference, prompts, [1, 2], sampler=SAMPLER, canvases=2, held_out=True)
    with routers_held(reference, held):
        (steps,) = replay(reference, [Compared(engine)], made, SAMPLER, batch_size=2)
    return steps


def test_held_routers_choose_as_bf16_did(tiny_checkpoint: Path, nvfp4_artifact: Path) -> None:
    free = distances(tiny_checkpoint, nvfp4_artifact, "own")
    assert min(d.routing.overlap.mean().item() for d in free) < 1
    for held in ("chosen", "weighted"):
        steps = distances(tiny_checkpoint, nvfp4_artifact, held)
        assert all((d.routing.overlap == 1).all() for d in steps)
        assert [d.kl.mean() for d in steps] != [d.kl.mean() for d in free]


def test_weights_of_held_experts_are_normalised_and_scaled() -> None:
    router = torch.tensor([[0.5], [0.3], [0.2]]).log().bfloat16()
    choice = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[0.9, 0.7]])
    x, scale = torch.ones(1, 1).bfloat16(), torch.tensor([1.0, 2.0, 4.0]).bfloat16()
    experts, weights = held_choice(x, router, scale, choice, "chosen")
    assert experts.tolist() == [[1, 2]]
    assert torch.allclose(weights, torch.tensor([[0.6 * 2, 0.4 * 4]]), atol=0.02)
    assert held_choice(x, router, scale, choice, "weighted")[1] is choice[1]


def test_models_that_ran_other_passes_are_an_error(tiny_checkpoint: Path) -> None:
    first, second = (FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=1) for _ in range(2))
    with pytest.raises(RuntimeError, match="other passes"), routers_held(first, "chosen"):
        first.passes([[5, 6, 7]])
    with pytest.raises(RuntimeError, match="other passes"), routers_held(first, "chosen"):
        second.passes([[5, 6, 7]])
