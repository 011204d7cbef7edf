"""Reuse between steps: no rule gives the exact bits, a rule reuses what it says, shares are counted."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from experiments import denoising_steps
from experiments.reuse import ReuseRule, Reusing, Step, main, moves, rules_of, voted
from fused_dequant import choose_experts
from torch import Tensor

from quantize.bundled import CHECKPOINT
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.record.trajectory import Prompt, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import TextWeights, load_packed
from quantize.stages.fidelity.replay import Compared, StepDistance, replay
from tests.support.tiny import CANVAS, LAYERS

pytestmark = pytest.mark.usefixtures("one_core")
SAMPLER = Sampler(max_new_tokens=2 * CANVAS, max_denoising_steps=3)
PROMPTS = [Prompt((5, 6, 7, 8), False), Prompt((9, 8, 7), False)]
ALL_ROWS = ReuseRule(stable=0, frozen=1)  # every row is frozen at step 2, and at no other of 3


@pytest.fixture(scope="module")
def weights(tiny_checkpoint: Path) -> TextWeights:
    return load_packed(tiny_checkpoint, "cpu")


def replayed(weights: TextWeights, engines: list[Reusing]) -> list[list[StepDistance]]:
    reference = FusedEngine(weights, capacity=2)
    made = record(reference, PROMPTS, [1, 2], sampler=SAMPLER, canvases=1, held_out=True)
    return replay(reference, list(map(Compared, engines)), made, SAMPLER, batch_size=2)


def decoded(
    engine: FusedEngine, steps: tuple[list[int], ...] = ([0, 1], [0, 1], [1])
) -> list[Tensor]:
    """Take steps of the given rows; return the normed rows after the last layer."""
    passes = engine.passes([prompt.ids for prompt in PROMPTS])
    made: list[Tensor] = []
    for step, rows in enumerate(steps):
        canvas = torch.randint(3, 500, (2, CANVAS), generator=torch.Generator().manual_seed(step))
        signal = torch.zeros(len(rows), CANVAS, 64, dtype=torch.bfloat16) if step else None
        made.append(passes.decode(rows, canvas[rows], signal).rows)
    return made


def test_without_a_rule_the_bits_are_the_exact_ones(weights: TextWeights) -> None:
    exact, engine = FusedEngine(weights, capacity=2), Reusing(weights, SAMPLER, ReuseRule())
    pairs = zip(decoded(exact), decoded(engine), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_planted_rules_change_logits_and_count_their_work(weights: TextWeights) -> None:
    """Of three steps, the second reuses; a bound of experts holds at every step."""
    layer = 1 - 1 / 3 / LAYERS
    shares = {
        ReuseRule(): 1, ALL_ROWS: 2 / 3, ReuseRule(experts=3): 1, ReuseRule(layers=(2,)): layer,
        ReuseRule(layers=(LAYERS - 1,)): layer,
    }  # fmt: skip
    engines = [Reusing(weights, SAMPLER, rule) for rule in shares]
    exact, *others = replayed(weights, engines)
    assert [engine.share for engine in engines] == pytest.approx(list(shares.values()))
    assert all((d.kl == 0).all() and d.agrees.all() for d in exact)
    for rule, distances in zip(list(shares)[1:], others, strict=True):
        changed = {d.step for d in distances if d.kl.max() > 1e-4}
        assert changed == ({1, 2, 3} if rule.experts else {2}), rule


def test_frozen_rows_stay_as_they_were_and_others_are_computed(weights: TextWeights) -> None:
    before, after, thawed = decoded(Reusing(weights, SAMPLER, ALL_ROWS))
    assert torch.equal(before, after)
    assert torch.equal(thawed, decoded(FusedEngine(weights, capacity=2))[2])


def test_some_rows_are_frozen_in_every_layer_of_the_canvas_that_goes_on(
    weights: TextWeights,
) -> None:
    def freeze(_: Tensor, argmax: Tensor, __: Tensor) -> Step:
        frozen = torch.zeros_like(argmax)
        frozen[-1, ::2] = 1
        return {"stable": frozen, "frozen": frozen}

    engine = Reusing(weights, SAMPLER, ReuseRule())
    engine.settled = freeze  # every second row of the last canvas that takes part
    first, second = decoded(engine, ([0, 1], [1]))
    assert torch.equal(second[0, ::2], first[1, ::2])
    kept = engine._last["h"][1].clone()
    decoded(engine, ([0, 1],))
    at_first = engine._last["h"][1]
    assert torch.equal(kept[:, ::2], at_first[:, ::2])
    assert (kept[:, 1::2] != at_first[:, 1::2]).any(-1).all()


def test_a_repeated_layer_adds_what_it_added_before(weights: TextWeights) -> None:
    added: list[Tensor] = []
    engine = Reusing(weights, SAMPLER, ReuseRule(layers=(2,)))
    for steps in (([0, 1],), ([0, 1], [1])):
        decoded(engine, steps)
        h = engine._last["h"][1].float()
        added.append(h[1:] - h[:-1])
    first, second = added
    assert torch.allclose(first[2], second[2], atol=0.05)
    assert not any(torch.allclose(first[i], second[i], atol=0.3) for i in (0, 1, 3))


def test_a_row_is_settled_by_argmax_entropy_and_what_it_read(weights: TextWeights) -> None:
    """Six steps of four rows: one moves, one reads another token than its argmax, one is uncertain."""
    rule = ReuseRule(stable=2, frozen=2, entropy=0.1, read=True)
    engine = Reusing(weights, SAMPLER, rule)
    frozen: list[list[int]] = []
    for step in range(6):
        engine._step = 1
        argmax, read = torch.tensor([[7, 7, 7, step]]), torch.tensor([[7, 8, 7, step]])
        state = engine.settled(read, argmax, torch.tensor([[0.01, 0.01, 0.5, 0.01]]))
        engine._before = state | {"argmax": argmax}
        frozen.append(state["frozen"][0].tolist())
    assert [of[0] for of in frozen] == [0, 0, 2, 1, 0, 2]
    assert all(of[1:] == [0, 0, 0] for of in frozen)


def test_shares_of_a_made_up_trajectory() -> None:
    """One canvas of 4 positions, 2 layers, 2 of 4 experts."""
    h = torch.tensor([[1.0, 0.0]]).repeat(1, 3, 4, 1)
    before: Step = {
        "canvas": torch.tensor([[1, 2, 3, 4]]),
        "argmax": torch.tensor([[1, 2, 3, 4]]),
        "h": h,
        "experts": torch.tensor([0, 1]).repeat(1, 2, 4, 1),
    }
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["canvas"][0, :3] = 9
    after["argmax"][0, 0] = 9
    after["h"][0, 1, 0, 1] = 0.1  # cosine .9950
    after["h"][0, 2, :2, 1] = 0.2  # cosine .9806
    after["h"][0, 2, 2] = torch.tensor([5.0, 0.0])  # only the direction counts
    after["experts"][0, 1, 0] = torch.tensor([1, 3])
    assert moves(before, after) == pytest.approx(
        {
            "canvas": 0.25, "argmax": 0.75, "cosine > .99": 6 / 8, "> .999": 5 / 8,
            "> .99 after layer 1": 1.0, "> .99 after layer 2": 0.5,
            "experts": 15 / 16, "distinct experts": 2.5,
        }
    )  # fmt: skip


def test_votes_bound_the_experts_of_a_canvas() -> None:
    draw = torch.Generator().manual_seed(0)
    x, router = (torch.randn(n, 32, generator=draw).bfloat16() for n in (2 * CANVAS, 8))
    scale = torch.rand(8, generator=draw).bfloat16()
    exact = choose_experts(x, router, scale, 2)
    experts, weights = voted(x, router, scale, 2, length=CANVAS, most=8)
    assert torch.equal(experts, exact[0])
    assert torch.allclose(weights, exact[1], rtol=0.02)
    experts, _ = voted(x, router, scale, 2, length=CANVAS, most=3)
    for canvas, free in zip(experts.split(CANVAS), exact[0].split(CANVAS), strict=True):
        assert len(canvas.unique()) == 3 < len(free.unique())
        within = torch.isin(free, canvas).all(-1)  # who could choose its own experts did
        assert torch.equal(canvas[within], free[within])


def test_names_of_rules_are_unlike_and_an_unknown_one_is_refused() -> None:
    rules = rules_of(SimpleNamespace(num_hidden_layers=30, num_experts=128))
    assert len({str(rule) for rule in rules}) == len(rules) > 40
    assert str(rules[0]) == "exact"
    result = CliRunner().invoke(main, ["--rule", "rows:9"])
    assert result.exit_code == 2
    assert "rows:9: no such rule; write one of exact, rows:1:1:0.01" in result.output


def test_problems_are_answered_freely_under_a_rule() -> None:
    """Of one problem on the bundled model, by the exact rule: the same answer as without it."""
    result = CliRunner().invoke(
        denoising_steps.main, ["--problems", "1", "--row", "adaptive", "--row", "exact"]
    )
    assert result.exit_code == 0, result.output
    _, _, adaptive, exact, difference = result.output.splitlines()
    assert exact.startswith("| exact (1.000 computed) | ")
    assert exact.split("|")[2:4] == adaptive.split("|")[2:4]
    assert difference == "exact minus adaptive: +0.00 [+0.00, +0.00] points; 0 differ"


def test_tables_have_a_row_for_each_step_rule_and_checkpoint() -> None:
    words = ["--trajectories", "1", "--rule", "experts:12", "--quantized", str(CHECKPOINT)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    first, _, steps, _, *rows = result.stdout.splitlines()
    assert first.startswith("2 canvases of ")
    assert steps.startswith("| step | canvases | canvas | argmax | cosine > .99 |")
    assert [row.split(" | ")[0] for row in rows[:2]] == ["| 2", "| 3"]
    assert rows[-2].startswith("| experts:12 | 1.000 | ")
    assert rows[-1] == "| bundled | 1.000 | 0.00 | 0 | 0.0 | 0 | 0.00 |"


def test_too_few_problems_for_a_seed_are_an_error() -> None:
    result = CliRunner().invoke(main, ["--trajectories", "64", "--seed", "15"])
    assert result.exit_code == 1
    assert "seed 15: 40 of 64 held-out problems are there" in result.output
