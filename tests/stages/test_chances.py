"""What `plan` says of a run's chances, held against the runs that docs/evaluation.md simulates."""

import re
from pathlib import Path

import pytest

from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Recipe
from quantize.stages.plan import chances, show
from quantize.stages.plan.chances import SOLVED, outlook
from quantize.stages.plan.estimate import SEQUENTIAL, TYPICAL, known_plans, tokens_by_task
from tests.support.worlds import SHIPPED

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
NVFP4 = load_recipe("nvfp4")


@pytest.mark.parametrize("task", NVFP4.evaluation.tasks)
def test_a_task_decides_as_often_as_its_simulated_answers_do(task: str) -> None:
    """PASS and FAIL for no loss, half the margin, the margin and twice the margin, in percent."""
    row = re.search(rf"^\| \d+ x \d+, \d \| `{task}` \| (.*)$", PAGE, re.MULTILINE)
    assert row is not None
    simulated = re.findall(r"([\d.]+) / ([\d.]+), \d+ %", row[1])
    assert len(simulated) == 4
    for lost, (passing, failing) in zip((0, 0.5, 1, 2), simulated, strict=True):
        outcome = outlook(NVFP4.asking([task], None), lost)
        assert 100 * outcome[0] == pytest.approx(float(passing), abs=4.5), lost
        assert 100 * outcome[1] == pytest.approx(float(failing), abs=4 if lost == 2 else 3), lost


def test_a_run_of_the_shipped_tasks_asks_as_many_tokens_as_simulated_runs_do() -> None:
    """With giving up; the simulated runs drew their questions anew, so PASS moves more."""
    for name, lost in (
        ("none", 0),
        ("half the margin, all tasks", 0.5),
        ("the margin, all tasks", 1),
        ("twice the margin, all tasks", 2),
    ):
        row = re.search(
            rf"^\| {name} \|.*\| ([\d.]+) / ([\d.]+) \| ([\d.]+) % \|$", PAGE, re.MULTILINE
        )
        assert row is not None
        passing, failing, tokens = map(float, row.groups())
        outcome = [100 * share for share in outlook(NVFP4, lost)]
        assert outcome[2] == pytest.approx(tokens, abs=2)
        assert lost or pytest.approx(tokens, abs=0.5) == 100 * SEQUENTIAL == round(outcome[2])
        assert outcome[0] == pytest.approx(passing, abs=5)
        assert outcome[1] == pytest.approx(failing, abs=4)
        if lost == 2:
            assert outcome[0] == 0
            assert outcome[1] > 98
            assert outcome[2] < 10.5


def test_giving_up_saves_tokens_and_takes_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = outlook(NVFP4, 0.5)
    monkeypatch.setattr(chances, "LEAST_CHANCE", 0.0)
    without = outlook(NVFP4, 0.5)
    assert without[2] > 1.5 * with_it[2]
    assert without[0] == pytest.approx(with_it[0], abs=0.01)


def test_a_budget_ends_runs_undecided_and_is_told() -> None:
    """One that no run spends changes nothing; half of what a run asks takes PASS and FAIL away."""
    for lost in (0.0, 2.0):
        every = outlook(NVFP4, lost)
        spent = 2 * TYPICAL * every[2] * sum(tokens_by_task(NVFP4).values())
        ample, scarce = (outlook(within(int(part * spent)), lost) for part in (50, 0.5))
        assert ample == every
        assert all(few <= whole for few, whole in zip(scarce, every, strict=True))
        assert scarce[2] < every[2] - 0.01
    assert "no look begins after 40,000,000 tokens" in str(
        show.outlook_table(within(40_000_000), None).caption
    )


def within(budget: int) -> Recipe:
    evaluation = NVFP4.evaluation.model_copy(update={"token_budget": budget})
    return NVFP4.model_copy(update={"evaluation": evaluation})


def test_too_few_questions_never_pass_whatever_their_answers_are() -> None:
    recipe = NVFP4.asking(["aime25"], None)
    gate = recipe.gate.model_copy(update={"estimand": "such_questions"})
    assert outlook(recipe, 0.0)[0] > 0.8
    assert outlook(recipe.model_copy(update={"gate": gate}), 0.0)[0] == 0


def test_more_answers_decide_more_often() -> None:
    few, many = (NVFP4.asking(["gsm8k"], limit) for limit in (300, None))
    assert outlook(few, 0.0)[0] < outlook(many, 0.0)[0] - 0.2


def test_nothing_is_said_where_the_size_of_a_task_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other tasks alone would pass too often."""
    assert show.outlook_table(NVFP4, 3600).row_count == 3
    monkeypatch.setattr(show, "known_plans", lambda _: known_plans(NVFP4.asking(["gsm8k"], None)))
    table = show.outlook_table(NVFP4, 3600)
    assert table.row_count == 0
    assert "not known" in str(table.caption)


def test_the_shares_that_bf16_solves_are_those_of_the_simulated_worlds() -> None:
    assert list(SOLVED.values()) == [bench.accuracy for bench in SHIPPED]
    assert list(SOLVED) == NVFP4.evaluation.tasks
