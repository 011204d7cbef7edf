"""Other experts than BF16's: counted by hand, injected without a changed bit, split, named."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize.checkpoints.reader import Checkpoint
from quantize.reports.sections import routing_cost_lines
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.model.choices import Choices, RoutingLog
from quantize.runtime.record.trajectory import Prompt, Trajectory, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import load_packed
from quantize.stages.fidelity.fidelity import attributed, find_faults, summarize
from quantize.stages.fidelity.linear_checks import router_fault
from quantize.stages.fidelity.replay import Compared, StepDistance, remember, replay
from quantize.stages.fidelity.routing import (
    routing_at_step,
    routing_distances,
    routing_figures,
)
from tests.support.tiny import CANVAS

LAYER = "model.decoder.layers.2."
SAMPLER = Sampler(max_new_tokens=2 * CANVAS, max_denoising_steps=3)


def engine(folder: Path) -> FusedEngine:
    return FusedEngine(load_packed(folder, "cpu"), capacity=2)


@pytest.fixture(scope="module")
def bf16(tiny_checkpoint: Path) -> FusedEngine:
    return engine(tiny_checkpoint)


@pytest.fixture(scope="module")
def candidate(nvfp4_artifact: Path) -> FusedEngine:
    return engine(nvfp4_artifact)


@pytest.fixture(scope="module")
def trajectories(bf16: FusedEngine) -> list[Trajectory]:
    """Three prompts, so two batches of unequal size; two canvases each."""
    prompts = [Prompt(ids, False) for ids in ((5, 6, 7, 8), (9, 8, 7), (110, 120))]
    batches = (prompts[:2], prompts[2:])
    how: dict[str, Any] = {"sampler": SAMPLER, "canvases": 2, "held_out": True}
    return [t for batch in batches for t in record(bf16, batch, range(len(batch)), **how)]


def replayed(
    reference: Any, model: FusedEngine, trajectories: Sequence[Trajectory], noted: RoutingLog | None
) -> list[StepDistance]:
    compared = [Compared(model, decoded=noted and noted.decoded)]
    return replay(reference, compared, trajectories, SAMPLER, batch_size=2)[0]


@pytest.fixture(scope="module")
def replays(bf16, candidate, trajectories) -> dict[str, Any]:
    """The candidate as it is, and what both models chose."""
    ours, theirs = RoutingLog(), RoutingLog()
    with bf16.routing(noted=ours):
        reference = remember(bf16, trajectories, SAMPLER, batch_size=2)
    ours.decoded = reference.decoded
    with candidate.routing(noted=theirs):
        plain = replayed(reference, candidate, trajectories, theirs)
    return {"reference": reference, "ours": ours, "theirs": theirs, "plain": plain}


def bits(distances: Sequence[StepDistance]) -> list[list[Any]]:
    return [
        [value.tolist() for value in (d.kl, d.agrees, d.entropy, d.routing.equal, d.routing.moved)]
        for d in distances
    ]


def test_a_model_given_its_own_choices_computes_the_same_bits(
    bf16, candidate, trajectories, replays
) -> None:
    """Both models, in encoder and decoder; then the log can be given again."""
    reference = replays["reference"]
    for _ in range(2):
        with candidate.routing(given=replays["theirs"]):
            injected = replayed(reference, candidate, trajectories, None)
        assert bits(injected) == bits(replays["plain"])
    plain = replayed(reference, bf16, trajectories, None)
    with bf16.routing(given=replays["ours"]):
        injected = replayed(reference, bf16, trajectories, None)
    assert bits(injected) == bits(plain)
    assert max(d.kl.abs().max() for d in injected) < 1e-6
    assert all(d.routing.moved.eq(0).all() for d in injected)
    assert len(replays["theirs"].decoded) == 12
    # two batches' prompts and first canvases
    assert [c.experts.shape[0] for c in replays["theirs"].encoded] == [2, 2, 1, 1]


def test_other_choices_are_taken_and_cost_what_the_entry_says(
    bf16, candidate, trajectories, replays
) -> None:
    reference, plain = replays["reference"], replays["plain"]
    with candidate.routing(given=replays["ours"]):
        held = replayed(reference, candidate, trajectories, None)
    with bf16.routing(given=replays["theirs"]):
        swapped = replayed(reference, bf16, trajectories, None)
    without = remember(bf16, trajectories, SAMPLER, batch_size=2)
    without.forget_heads()
    with pytest.raises(RuntimeError, match="vocabulary is freed"):
        replayed(without, bf16, trajectories, None)
    without = remember(bf16, trajectories, SAMPLER, batch_size=2)
    without.forget_heads()
    lent = [Compared(bf16, lends_head=True)]
    with bf16.routing(given=replays["theirs"]):
        (again,) = replay(without, lent, trajectories, SAMPLER, batch_size=2)
    assert bits(again) == bits(swapped)
    assert min(d.routing.overlap.min() for d in plain) < 1
    assert all(d.routing.overlap.eq(1).all() and d.routing.moved.eq(0).all() for d in held)
    assert bits(held) != bits(plain)
    for a, b in zip(plain, swapped, strict=True):  # it chose what the candidate chose
        assert torch.equal(a.routing.equal, b.routing.equal)
    given = {"with_bf16_choices": held, "bf16_with_its_choices": swapped}
    entry = attributed(plain, given)
    added = entry["as_it_is"]["mean"] - entry["with_bf16_choices"]["mean"]
    assert entry["choices_add"]["mean"] == pytest.approx(added, rel=1e-3)
    low, high = entry["choices_add"]["interval"]
    assert low <= entry["choices_add"]["mean"] <= high
    assert entry["bf16_with_its_choices"]["mean"] > 0


def test_choices_of_other_passes_are_an_error(candidate, trajectories, replays) -> None:
    reference = replays["reference"]
    for few in (
        trajectories[:2],
        trajectories[2:],
    ):  # some are not taken; others have another shape
        with (
            pytest.raises(RuntimeError, match="choices"),
            candidate.routing(given=replays["theirs"]),
        ):
            replayed(reference, candidate, few, None)
    assert candidate.model.given is None


def choices(experts: list[Any], weights: list[Any]) -> Choices:
    """Choices of one sequence and one layer, of tokens' experts and weights."""
    return Choices(torch.tensor([[experts]]).int(), torch.tensor([[weights]]))


def test_overlap_moved_weight_and_experts_hit_by_hand() -> None:
    """Weights count as shares: a model's scale of all experts moves nothing."""
    ours = choices([[0, 3], [1, 2], [0, 1]], [[0.5, 0.5], [1.5, 0.5], [0.25, 0.75]])
    theirs = choices([[3, 0], [2, 4], [2, 3]], [[3.0, 1.0], [0.5, 0.5], [1.0, 1.0]])
    (distance,) = routing_distances(ours, theirs)
    assert distance.equal.tolist() == [[1, 1, 1]]
    assert distance.overlap.tolist() == [0.5]
    # 0.25 from expert 0 to 3; 0.75 from 1 to 2 and 4; all of it
    assert distance.moved.item() == pytest.approx((0.25 + 0.75 + 1) / 3)
    assert distance.hit[:, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]]
    (same,) = routing_distances(ours, choices(ours.experts[0, 0].tolist(), [[2.0, 2.0]] * 3))
    (alone,) = routing_distances(choices([[0, 1]], [[0.5, 0.5]]), choices([[0, 1]], [[0.9, 0.1]]))
    assert same.overlap.tolist() == [1.0]
    steps = [((0, 0), distance), ((0, 0), same), ((0, 1), alone)]
    figures = routing_figures(steps)
    assert figures["experts_hit"]["bf16"] == {
        "step": pytest.approx(10 / 3, rel=1e-4),
        "canvas": 3.0,
    }
    assert figures["experts_hit"]["quantized"]["canvas"] == 3.5  # 5 and 2
    assert figures["p10"] == [0.0]
    assert routing_at_step([same, alone])["routing_p10"] == 1
    assert routing_at_step([alone])["routing_moved"] == pytest.approx(0.4)


def test_a_tenth_of_the_tokens_keep_at_most_p10() -> None:
    ours = choices([[0, 1]] * 20, [[0.5, 0.5]] * 20)
    for others, wanted in ((1, 1.0), (2, 0.5), (3, 0.5)):
        theirs = choices([[0, 2]] * others + [[1, 0]] * (20 - others), [[0.5, 0.5]] * 20)
        (distance,) = routing_distances(ours, theirs)
        assert routing_figures([((0, 0), distance)])["p10"] == [wanted]


def test_a_rolled_router_is_named_by_its_layer(bf16, tiny_checkpoint, trajectories) -> None:
    """Other experts from its layer on; before it, BF16's own. Only a declared limit makes a fault."""
    rolled = engine(tiny_checkpoint)
    layers = list(rolled.model.weights.layers)
    layers[2] = replace(layers[2], router=layers[2].router.roll(1, 0))
    rolled.model.weights = replace(rolled.model.weights, layers=tuple(layers))
    shares = summarize(replayed(bf16, rolled, trajectories, None))
    overlap = shares["routing_overlap"]
    assert overlap[:2] == [1.0, 1.0]
    assert overlap[2] < 0.5
    assert shares["routing"]["moved"][2] > 0.5
    (fault,) = find_faults({"none": shares}, {}, {"none": 0.5})
    worst = overlap.index(min(overlap))
    assert fault.startswith(f"routers of layer {worst} choose {min(overlap):.4g} of BF16's experts")
    assert find_faults({"none": shares}, {}, {}) == []
    assert find_faults({"none": shares}, {}, {"none": min(overlap)}) == []


def test_experts_that_moved_with_their_rows_are_the_same_model_and_named(
    bf16, tiny_checkpoint, trajectories, tmp_path
) -> None:
    """KL stays 0 and overlap falls in that layer only, since it compares experts by index."""
    permuted = tmp_path / "permuted"
    shutil.copytree(tiny_checkpoint, permuted)
    (file,) = permuted.glob("*.safetensors")
    tensors, order = load_file(file), [1, 0, *range(2, 8)]
    names = ("experts.gate_up_proj", "experts.down_proj", "router.proj.weight")
    for name in (*names, "router.per_expert_scale"):
        tensors[f"{LAYER}{name}"] = tensors[f"{LAYER}{name}"][order].contiguous()
    save_file(tensors, file, {"format": "pt"})
    distances = replayed(bf16, engine(permuted), trajectories, None)
    overlap = summarize(distances)["routing_overlap"]
    assert max(d.kl.abs().max() for d in distances) < 1e-3
    assert overlap[2] < 0.9
    assert min(overlap[:2] + overlap[3:]) > 0.98
    ours, theirs = (
        Checkpoint.open(folder).read(f"{LAYER}router.proj.weight")
        for folder in (tiny_checkpoint, permuted)
    )
    assert "2 of its 8 rows are BF16's in another order" in str(router_fault(ours, theirs))
    assert router_fault(ours, ours) is None
    theirs[0] = ours[2]  # twice, and no longer there
    assert "chosen or weighed otherwise" in str(router_fault(ours, theirs))
    assert "chosen or weighed otherwise" in str(router_fault(ours, theirs[:7]))


def test_a_share_of_no_kl_is_not_stated() -> None:
    zero = {"mean": 0.0, "interval": [0.0, 0.0]}
    names = ("as_it_is", "with_bf16_choices", "bf16_with_its_choices", "choices_add")
    cost = dict.fromkeys(names, zero) | {"activations": "none"}
    (line,) = routing_cost_lines({"routing_cost": cost})
    assert "adds 0.0000 [0.0000, 0.0000]: with BF16's choices it is 0.0000." in line
    assert routing_cost_lines({}) == []
