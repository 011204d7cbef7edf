"""Replay: a model against itself is at distance 0, damage grows it, and KL is KL."""

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.host.processes import ALONE, Processes
from quantize.reports.sections import fidelity_section
from quantize.runtime import Sampler, StepRecord
from quantize.runtime.record.trajectory import (
    Prompt,
    Trajectory,
    load_trajectories,
    record,
    save_trajectories,
)
from quantize.stages.fidelity.fidelity import (
    bootstrap_interval,
    by_trajectory,
    find_faults,
    summarize,
)
from quantize.stages.fidelity.replay import Compared, StepDistance, remember, replay
from quantize.stages.fidelity.routing import RoutingDistance
from tests.support.modules_oracle.engine import ModelEngine
from tests.support.tiny import CANVAS, tiny_model

# Stop at mean entropies that random weights reach now and then: canvases of unequal length.
SAMPLER = Sampler(
    max_denoising_steps=5, eos_token_ids=(1, 50), pad_token_id=0,
    stability_threshold=0, confidence_threshold=4.9, entropy_bound=4.0,
)  # fmt: skip

ROUTED = RoutingDistance(torch.tensor([[0, 1, 1]]), torch.tensor([0.1]), torch.ones(2, 1, 3) > 0)


@pytest.fixture(scope="module")
def model() -> DiffusionGemmaForBlockDiffusion:
    return tiny_model().float()


@pytest.fixture(scope="module")
def trajectories(model: DiffusionGemmaForBlockDiffusion) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(tuple(torch.randint(110, 480, (n,), generator=generator).tolist()), n % 2 == 0)
        for n in (5, 40, 23, 34)
    ]
    return record(
        ModelEngine(model), prompts, [3, 1, 4, 1], sampler=SAMPLER, canvases=3, held_out=True
    )


def replay_one(
    reference: DiffusionGemmaForBlockDiffusion,
    model: DiffusionGemmaForBlockDiffusion,
    trajectories: list[Trajectory],
    batch_size: int = 16,
) -> list[StepDistance]:
    compared = [Compared(ModelEngine(each)) for each in (reference, model)]
    engine = ModelEngine(reference)
    return replay(engine, compared, trajectories, SAMPLER, batch_size=batch_size)[1]


def test_recorded_steps_are_uneven(trajectories: list[Trajectory]) -> None:
    assert len({len(steps) for t in trajectories for steps in t.steps}) > 1


def test_a_model_replays_itself_exactly(
    model: DiffusionGemmaForBlockDiffusion, trajectories: list[Trajectory]
) -> None:
    distances = replay_one(model, model, trajectories, batch_size=3)
    assert len(distances) == sum(len(steps) for t in trajectories for steps in t.steps)
    for d in distances:
        assert d.agrees.all()
        assert d.kl.abs().max() < 1e-5
        assert d.jaccard == 1


def test_replay_meets_what_the_recording_run_computed(
    model: DiffusionGemmaForBlockDiffusion, trajectories: list[Trajectory]
) -> None:
    """Same canvas, prefix, self-conditioning and temperature: the same entropy at every position.

    In FP64: another batch sums in another order, and self-conditioning feeds that back; in FP32 late
    steps are up to 0.25 nats apart on some CPUs.
    """
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    seen: dict[tuple[int, int, int], torch.Tensor] = {}

    def on_step(step: StepRecord) -> None:
        for row, entropy in zip(step.rows, step.entropy, strict=True):
            seen[row, step.canvas, step.step] = entropy

    prompts, seeds = [t.prompt for t in trajectories], [t.seed for t in trajectories]
    trajectories = record(
        ModelEngine(model),
        prompts,
        seeds,
        sampler=SAMPLER,
        canvases=3,
        held_out=True,
        on_step=on_step,
    )
    distances = replay_one(model, model, trajectories, batch_size=3)
    assert len(distances) == len(seen)
    apart = torch.stack(
        [(d.entropy - seen[d.trajectory, d.canvas, d.step]).abs().mean() for d in distances]
    )
    assert apart.max() < 1e-4


def test_damage_grows_with_the_size_of_the_change(
    model: DiffusionGemmaForBlockDiffusion, trajectories: list[Trajectory]
) -> None:
    kls, few = list[float](), trajectories[:2]
    for size in (0.01, 0.05, 0.3):
        damaged = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in damaged.model.decoder.layers:
                weight = layer.get_submodule("mlp.down_proj").weight
                weight += size * weight.std() * torch.randn(weight.shape, generator=generator)
        summary = summarize(replay_one(model, damaged, few))
        kls.append(summary["kl_nats"]["mean"])
        low, high = summary["kl_nats"]["interval"]
        assert low <= kls[-1] <= high
    assert 0 < kls[0] < kls[1] < kls[2]
    assert summary["top1_agreement"]["mean"] < 1
    longest = max(len(steps) for t in few for steps in t.steps)
    assert [entry["step"] for entry in summary["by_step"]] == list(range(1, longest + 1))
    positions = sum(entry["positions"] for entry in summary["by_entropy"])
    assert positions == CANVAS * sum(entry["canvases"] for entry in summary["by_step"])


def test_kl_is_that_of_torch(
    model: DiffusionGemmaForBlockDiffusion, trajectories: list[Trajectory]
) -> None:
    """First step of the first canvas, computed by transformers' forward on the whole."""
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.model.decoder.norm.weight *= 1.5
    item = trajectories[1]
    first = replay_one(model, damaged, [item])[0]
    ids, canvas = torch.tensor([item.prompt.ids]), item.steps[0][:1]
    with torch.no_grad():
        p, q = (
            torch.distributions.Categorical(
                logits=m(input_ids=ids, decoder_input_ids=canvas).logits[0] / SAMPLER.t_max
            )
            for m in (model, damaged)
        )
    expected = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(first.kl, expected, rtol=1e-3, atol=1e-5)
    assert first.kl.mean() > 0.001


def values(distance: StepDistance) -> list[Any]:
    """All values of a distance, those of routing too."""
    held = vars(distance) | vars(distance.routing)
    del held["routing"]
    return list(held.values())


def equal(found: list[list[StepDistance]], wanted: list[list[StepDistance]]) -> bool:
    """Whether all values are the same to the bit."""
    pairs = [
        pair
        for own, other in zip(found, wanted, strict=True)
        for a, b in zip(own, other, strict=True)
        for pair in zip(values(a), values(b), strict=True)
    ]
    assert len(pairs) > 100
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def test_a_remembered_reference_is_the_reference(
    model: DiffusionGemmaForBlockDiffusion, trajectories: list[Trajectory]
) -> None:
    """Two batches, canvases of unequal length; a model on its own conditioning, too."""
    other = ModelEngine(copy.deepcopy(model))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1 + 0.02 * torch.randn(parameter.shape))
    compared = [Compared(other), Compared(other, own_conditioning=True)]
    wanted = replay(ModelEngine(model), compared, trajectories, SAMPLER, batch_size=3)
    kept = remember(ModelEngine(model), trajectories, SAMPLER, batch_size=3)
    assert equal(replay(kept, compared, trajectories, SAMPLER, batch_size=3), wanted)
    assert wanted[0][-1].kl.mean() > 0


def test_processes_share_the_batches_and_find_what_one_finds(
    model: DiffusionGemmaForBlockDiffusion, trajectories: list[Trajectory]
) -> None:
    class Shared(Processes):
        """Processes that run one after the other: each is told what those before have found."""

        told: ClassVar[list[Any]] = []

        def others(self, found: Any) -> list[Any]:
            before = list(self.told)
            self.told.append(list(found))
            return before

    engine, damaged = ModelEngine(model), copy.deepcopy(model)
    with torch.no_grad():
        damaged.model.decoder.norm.weight *= 1.5
    compared = [Compared(engine), Compared(ModelEngine(damaged), own_conditioning=True)]
    alone, first, both = (
        replay(engine, compared, trajectories[:3], SAMPLER, batch_size=1, processes=processes)
        for processes in (ALONE, Shared(0, 2), Shared(1, 2))
    )
    assert 0 < len(first[0]) < len(alone[0])
    for ours, theirs in zip(alone, both, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.trajectory, a.canvas, a.step) == (b.trajectory, b.canvas, b.step)
            assert torch.equal(a.kl, b.kl)
            assert torch.equal(a.routing.equal, b.routing.equal)
            assert torch.equal(a.routing.moved, b.routing.moved)


def test_trajectories_survive_the_disk(trajectories: list[Trajectory], tmp_path: Path) -> None:
    save_trajectories(tmp_path, trajectories, SAMPLER)
    loaded, sampler = load_trajectories(tmp_path)
    assert sampler == SAMPLER
    for before, after in zip(trajectories, loaded, strict=True):
        assert (before.prompt, before.seed, before.held_out) == (
            after.prompt, after.seed, after.held_out,
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(before.steps, after.steps, strict=True))
        assert torch.equal(before.committed, after.committed)


def test_bootstrap_interval_covers_the_mean_of_its_trajectories() -> None:
    generator = torch.Generator().manual_seed(5)
    hits = 0
    for _ in range(200):
        values = torch.randn(40, generator=generator, dtype=torch.float64).tolist()
        low, high = bootstrap_interval(values)
        hits += low <= 0 <= high
    assert 180 <= hits <= 198
    one = torch.ones(2)
    distances = [
        StepDistance(0, 0, 1, False, one, one > 0, one, 1.0, ROUTED),
        StepDistance(0, 0, 2, True, 3 * one, one > 0, one, 1.0, ROUTED),
        StepDistance(7, 0, 1, True, 5 * one, one > 0, one, 1.0, ROUTED),
    ]
    assert by_trajectory(distances, lambda d: d.kl.mean().item()) == {0: 2.0, 7: 5.0}


def test_a_report_says_how_much_of_a_mean_two_trajectories_make() -> None:
    """Of own self-conditioning it is most: one trajectory of sixteen takes another course."""
    one = torch.ones(2)
    replays = {
        mode: summarize([
            StepDistance(at, 0, 1, True, kl * one, one > 0, one, 1.0, ROUTED)
            for at, kl in enumerate([far, *[1.0] * 15])
        ])
        for mode, far in (("none", 1.0), ("per_layer", 115.0))
    }  # fmt: skip
    assert replays["none"]["kl_nats"]["two_largest"] == 0.125
    assert replays["per_layer"]["kl_nats"]["two_largest"] == pytest.approx(116 / 130, rel=1e-5)
    content = {"trajectories": 16, "max_kl_nats": {}, "activations": {"none": replays["none"]}}
    own = replays["per_layer"] | {"activations": "per_layer"}
    section = fidelity_section(content | {"own_conditioning": own})
    assert section.rows[-1][0] == "per_layer, own self-conditioning"
    assert any("its errors add up over a canvas" in note for note in section.notes)
    (line,) = (
        note for note in section.notes
        if "two largest" in note
    )  # fmt: skip
    assert line == (
        "Of the mean KL the two largest trajectories of 16 make 12 % (none), 89 % (per_layer, own "
        "self-conditioning)."
    )
    for summary in replays.values():  # of a run from before
        del summary["kl_nats"]["two_largest"]
    notes = fidelity_section(content | {"own_conditioning": own | replays["none"]}).notes
    assert not any("two largest" in note for note in notes)


def test_own_conditioning_reads_the_models_own_logits(
    model: DiffusionGemmaForBlockDiffusion, trajectories: list[Trajectory]
) -> None:
    """Step 1 has none; step 2 is what transformers computes from the model's own step 1."""
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.model.decoder.norm.weight *= 1.5
    item = next(t for t in trajectories if len(t.steps[0]) > 1)
    engine = ModelEngine(damaged)
    both = [Compared(engine), Compared(engine, own_conditioning=True)]
    forced, own = replay(ModelEngine(model), both, [item], SAMPLER)
    assert torch.equal(forced[0].kl, own[0].kl)
    assert not torch.allclose(forced[1].kl, own[1].kl)

    def step(net: DiffusionGemmaForBlockDiffusion, at: int, logits: torch.Tensor | None):
        ids, canvas = torch.tensor([item.prompt.ids]), item.steps[0][at : at + 1]
        with torch.no_grad():
            out = net(input_ids=ids, decoder_input_ids=canvas, self_conditioning_logits=logits)
        return out.logits / SAMPLER.temperature(at + 1)

    p = step(model, 1, step(model, 0, None)).log_softmax(-1)[0]
    for found, first in ((own, damaged), (forced, model)):
        q = step(damaged, 1, step(first, 0, None)).log_softmax(-1)[0]
        expected = (p.exp() * (p - q)).sum(-1)
        torch.testing.assert_close(found[1].kl, expected, rtol=1e-3, atol=1e-5)


def test_a_mean_just_above_its_limit_is_a_fault() -> None:
    results = {"none": {"kl_nats": {"mean": 0.0201}}, "per_layer": {"kl_nats": {"mean": 0.05}}}
    assert find_faults(results, {"none": 0.0202, "per_layer": 0.05, "per_expert": 1e-9}, {}) == []
    (fault,) = find_faults(results, {"none": 0.02, "per_layer": 0.05}, {})
    assert "0.0201" in fault
    assert "activations none" in fault
    assert "0.02" in fault.split("above")[1]
    assert len(find_faults({"none": {"kl_nats": {"mean": float("nan")}}}, {"none": 1e9}, {})) == 1
