"""Pairs of inputs, factors of channels and what learns, each against its plain definition."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from experiments import combined
from experiments.bundled.forward import experts
from experiments.combined import (
    Gains,
    Learn,
    all_run,
    best,
    compared,
    learned_by,
    nearest,
    read,
)
from experiments.damage import Chosen, Model, Rows, distances, rows_of
from experiments.folding import factors, folded
from experiments.learned import ARMS as LEARNED
from experiments.learned import plan_of
from experiments.learning import Student, observed
from experiments.pairs import (
    Pairs,
    Weighing,
    forget,
    inputs_of,
    install,
    paired,
    relative_weights,
    weights_in,
)
from experiments.routing import heldout
from modules_oracle.opening import open_modules

from quantize.bundled import CHECKPOINT
from quantize.runtime.record.trajectory import record
from quantize.runtime.sampler.sampler import Sampler
from quantize.stages.round_weights.round_weights import units_of


@cache
def seen() -> tuple[Model, Rows, Student]:
    """Two trajectories, and a student whose inputs are rounded and whose weights are not."""
    sampler, reference = Sampler.from_checkpoint(CHECKPOINT), open_modules(CHECKPOINT, capacity=2)
    made = record(reference, heldout(2), [0, 1], sampler=sampler, canvases=1, held_out=True)
    bf16 = Model(CHECKPOINT, "cpu")
    units = units_of(plan_of(LEARNED["nvfp4"])[1])
    scales = {(layer, name): 2688 / 20.0 for layer in range(6) for name in (
        "mlp.gate_proj", "mlp.down_proj", "experts.gate_up_proj", "experts.down_proj")}  # fmt: skip
    return bf16, rows_of(bf16, made, sampler), Student(units, scales, "cpu")


def test_aimed_weights_are_those_of_least_squares() -> None:
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(400, 16, generator=noise)
    read = x + 0.05 * x @ torch.randn(16, 16, generator=noise)
    weight, rows = torch.randn(5, 16, generator=noise), torch.rand(400, 1, generator=noise)
    key, pairs = (0, "mlp.down_proj"), Pairs()
    for part in (slice(0, 150), slice(150, 400)):
        own = rows[part, 0]
        pairs.cross(key, x[part], read[part], own, [len(own)])
    torch.testing.assert_close(pairs.own.sums[key][0], (read * rows).T @ read)
    torch.testing.assert_close(pairs.crossed[key][0], (x * rows).T @ read)
    for share in (1.0, 0.5):
        met = (share * x + (1 - share) * read) @ weight.T
        wanted = torch.linalg.lstsq(rows.sqrt() * read, rows.sqrt() * met).solution.T
        found = pairs.aimed("model.decoder.layers.0.mlp.down_proj", weight, share).float()
        # 0.01 of the mean diagonal is added to both sides, and BF16 keeps 8 bits
        assert (found - wanted).norm() < 0.05 * (weight - wanted).norm()


def test_experts_have_sums_of_their_own() -> None:
    noise = torch.Generator().manual_seed(0)
    x, read = torch.randn(2, 50, 16, generator=noise)
    rows, key, pairs = torch.rand(50, generator=noise), (0, "experts.down_proj"), Pairs()
    pairs.cross(key, x, read, rows, [20, 0, 30])
    for e, at in enumerate((slice(0, 20), slice(0), slice(20, 50))):
        found = (x[at] * rows[at, None]).T @ read[at]
        torch.testing.assert_close(pairs.crossed[key][e], found)
    assert pairs.own.counts[key].tolist() == [20, 0, 30]


def test_experts_that_tokens_chose_are_all_experts_by_their_weights() -> None:
    noise = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(16, *own, generator=noise) / 16 for own in ((128, 256), (256, 64)))
    x, routing = torch.randn(20, 256, generator=noise), torch.rand(20, 16, generator=noise)
    routing = routing * (routing > 0.7)
    routing[:, 3] = 0
    w = {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
    model, chosen = copy(Model(CHECKPOINT, "cpu")), Chosen.by(routing)
    model.layers = [w]
    found = chosen.down(model.inner(0, x, chosen), down)
    # Float32 sums of 64 x 16 terms in another order
    torch.testing.assert_close(found, experts(x, w, routing), rtol=1e-5, atol=1e-5)


def test_inputs_stay_in_bf16_in_all_layers_or_in_one() -> None:
    student = copy(seen()[2])
    student.model, before = copy(student.model), {*student.model.roundings}
    forget(student, ["mlp.down_proj", "3.experts.down_proj"])
    gone = before - student.model.roundings.keys()
    assert gone == {*((at, "mlp.down_proj") for at in range(6)), (3, "experts.down_proj")}


def test_some_steps_of_each_trajectory_are_drawn() -> None:
    _, rows, _ = seen()
    found = rows.select(torch.tensor([1, 0]), 2, torch.Generator().manual_seed(0))
    assert found.of.bincount().tolist() == [2, 2]
    for at, of in enumerate(found.of.tolist()):
        same = (rows.canvas == found.canvas[at]).all(1) & (rows.of == 1 - of)
        assert (rows.target[same] == found.target[at]).flatten(1).all(1).any()
    assert len(rows.select(torch.tensor([1]), 10_000).of) == (rows.of == 1).sum()


def test_rows_weigh_what_is_asked() -> None:
    bf16, rows, _ = seen()
    plain = paired(Weighing(), bf16, bf16, rows).own
    old = observed(bf16, rows, "plain")
    assert plain.amax == old.amax
    for key, own in old.sums.items():
        torch.testing.assert_close(plain.sums[key], own, rtol=1e-4, atol=1e-3)
        assert torch.equal(plain.counts[key], old.counts[key])
    gates = paired(Weighing(gates=True), bf16, bf16, rows).own
    for name in ("experts.down_proj", "experts.gate_up_proj"):
        assert (gates.weights[0, name] < plain.weights[0, name]).all()
    assert torch.equal(gates.sums[0, "mlp.down_proj"], plain.sums[0, "mlp.down_proj"])
    found = inputs_of(bf16, rows, 1)
    x, chosen = found[1, 1, "experts.down_proj"]
    assert chosen is not None
    y = chosen.down(x, bf16.layers[1]["experts.down_proj"])
    inverse = relative_weights(bf16, found)[1, 1, "experts.gate_up_proj"]
    torch.testing.assert_close(inverse, 1 / y.square().mean(-1), rtol=1e-3, atol=0)


def test_inputs_behind_a_layer_are_the_students() -> None:
    bf16, rows, student = seen()
    behind = paired(Weighing(aim=1.0, follow=True), bf16, student.model, rows, 0).own.sums
    beside = paired(Weighing(aim=1.0), bf16, student.model, rows, 0).own.sums
    key = (0, "mlp.gate_proj")  # the first rounding: both read the same
    torch.testing.assert_close(behind[key], beside[key], rtol=1e-3, atol=1e-2)
    key = (0, "experts.down_proj")  # behind the rounded input of gate_up
    assert not torch.allclose(behind[key], beside[key], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("norms", [False, True])
def test_folded_channels_change_no_bit_and_lose_less(norms: bool) -> None:
    bf16, rows, student = seen()
    sums = observed(bf16, rows, "plain")
    found = folded(bf16, sums.sums, sums.counts, norms=norms)
    with torch.no_grad():
        torch.testing.assert_close(found(rows), bf16(rows), rtol=1e-5, atol=1e-4)
    key, name = (3, "mlp.down_proj"), "mlp.down_proj.weight"
    assert not torch.equal(found.layers[3][name], bf16.layers[3][name])
    hessian = sums.sums[key][0] / sums.counts[key]
    f = factors(hessian.diagonal(), bf16.layers[3][name])
    torch.testing.assert_close(found.layers[3][name], bf16.layers[3][name] * f, rtol=0, atol=0)
    unit = next(own for own in student.units if own.reads.endswith("layers.3.mlp.down_proj"))
    losses = []
    for model, h in ((bf16, hessian), (found, hessian / f[:, None] / f)):
        weight = weights_in(model, unit)[0].float()
        error = weight - unit.scheme.dequantize(nearest(unit, weights_in(model, unit)).tensors)[0]
        losses.append(((error @ h) * error).sum())
    assert losses[1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("codes", ["both", "kept", None])
def test_what_learns_lowers_the_divergence(codes: Literal["both", "kept"] | None) -> None:
    bf16, rows, student = seen()
    student.model.layers = [dict(own) for own in bf16.layers]
    done = [nearest(unit, weights_in(bf16, unit)) for unit in student.units]
    install(student, done)
    how = Learn(codes, gains=True, steps=12, rates=(2e-2, 3e-2, 1e-3), looks=2)
    found, course, looks = learned_by(how, student, done, rows, float("inf"), rows)
    assert min(looks) < 0.9 * looks[0]
    assert len(course) == 10
    assert len(looks) == how.looks + 1
    stays = distances(student.model, rows, Sampler.from_checkpoint(CHECKPOINT))["kl"]
    assert sum(stays) / len(stays) == pytest.approx(min(looks), rel=1e-6)
    moved = [
        not torch.equal(*(own.tensors[key].view(torch.uint8) for own in (one, other)))
        for one, other in zip(done, found, strict=True)
        for key in one.tensors
    ]
    assert any(moved) == (codes is not None)
    assert not any("down_proj" in name for _, name in Gains(student).moved)


@pytest.mark.slow
def test_what_diverges_ends_where_it_was_best() -> None:
    bf16, rows, student = seen()
    student.model.layers = [dict(own) for own in bf16.layers]
    how = Learn(None, gains=True, steps=4, rates=(1e-3, 1e-3, 1e38), looks=2)
    _, _, looks = learned_by(how, student, [], rows, float("inf"), rows)
    assert looks[0] < 1
    assert math.isnan(looks[-1])
    assert all(weight.isfinite().all() for own in student.model.layers for weight in own.values())


def measured(arm: str, seed: int, kl: float) -> dict[str, Any]:
    values = {key: [kl] for key in ("kl", "flips", "jaccard", "commits")}
    return {"arm": arm, "seed": seed, **values}


def test_a_run_that_was_cut_goes_on_and_an_arm_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[str]()

    def run(_work: object, name: str, _arm: object, seed: int) -> dict[str, Any]:
        begun.append(name)
        if name == "gates":
            raise TimeoutError
        return measured(name, seed, 2.0)

    monkeypatch.setattr(combined, "run", run)
    file, work = tmp_path / "choose.jsonl", combined.Work(tmp_path, "cpu", combined.Split("", 0), 0)
    file.write_text('{"arm": "mlp", "seed": 0, "kl": [4.0], "flips"')  # cut by a kill
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            found = all_run(work, [(pool, own, 0) for own in ("base", "gates", "mlp")], file)
            assert found == {"base": 2.0, "mlp": 2.0}
    assert begun == ["base", "gates", "mlp", "gates"]
    assert [own["arm"] for own in read(file)] == ["base", "mlp"]


@pytest.mark.parametrize(
    ("kl", "wanted"),
    [
        ([("w4a4", 1.0), ("weights", 1.0), ("base", 3.0), ("four", 2.0)], ["four"]),
        ([("base", 3.0), ("learn-mlp-fast", float("nan")), ("mlp", 4.0)], ["base", "mlp"]),
        ([("base", 3.0), ("base", 1.0), ("four", 2.5), ("fp8-mlp", 4.0)], ["base", "fp8-mlp"]),
    ],
)
def test_the_best_are_those_of_least_divergence_over_seeds(
    kl: Sequence[tuple[str, float]], wanted: list[str]
) -> None:
    assert best([measured(name, seed, own) for seed, (name, own) in enumerate(kl)]) == wanted


def test_intervals_draw_seeds_and_trajectories() -> None:
    mine, base = torch.tensor([[1.0] * 3, [3.0] * 3]), torch.ones(2, 3)
    assert compared(mine, base) == ("2.000 [1.000, 3.000]", "+1000.00 [+0.00, +2000.00]")
    assert compared(mine.T[:1], base.T[:1]) == (
        "2.000 [1.000, 3.000]",
        "+1000.00 [+0.00, +2000.00]",
    )
