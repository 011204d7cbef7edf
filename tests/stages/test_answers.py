"""What an evaluation tells while it runs: rates, looks, and the time that is left or was saved."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.host.processes import ALONE
from quantize.recipe.controls import JUDGED
from quantize.recipe.sections import Gate
from quantize.recovery.gate import Verdict
from quantize.recovery.sequential import Part, Plan
from quantize.runs.folder import RunDir
from quantize.stages.evaluate import answers
from quantize.stages.evaluate.answers import AnswerRates, Answers
from tests.support.faulty import scoring


def look(questions: int, repeats: int) -> SimpleNamespace:
    return SimpleNamespace(questions=questions, repeats=repeats)


# 400 and 100 samples a model
FIRST: Any = SimpleNamespace(
    name="one", samples=400, plan=SimpleNamespace(looks=[look(100, 2), look(100, 3), look(100, 4)])
)
LAST: Any = SimpleNamespace(name="two", samples=100, plan=SimpleNamespace(looks=[look(100, 1)]))


def telling(monkeypatch: pytest.MonkeyPatch) -> tuple[Answers, list[str]]:
    """Return answers at a rate of 100 samples an hour, and what they will have told."""
    found, told = object.__new__(Answers), list[str]()
    found._rates = SimpleNamespace(hours=lambda samples: samples / 100)  # type: ignore[assignment]
    monkeypatch.setattr(answers, "say", told.append)
    return found, told


def test_seconds_are_those_of_answers_and_not_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    now, backend = SimpleNamespace(time=100.0), SimpleNamespace(loading_seconds=3.0)
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: now.time))

    def finished() -> Iterator[Any]:
        now.time, backend.loading_seconds = now.time + 10, backend.loading_seconds + 4
        yield "a", SimpleNamespace(tokens=5)
        yield "b", SimpleNamespace(tokens=6)
        now.time += 5
        yield "c", SimpleNamespace(tokens=7)

    rates = AnswerRates()
    assert rates.hours(10) == 0
    several = AnswerRates(2)
    several.by_model = rates.by_model
    for count, name in enumerate(("bf16", "bf16", "quantized"), 1):
        model: Any = SimpleNamespace(name=name, backend=backend)
        assert len(list(rates.counted(finished(), 3, model, FIRST, ""))) == 3
        assert rates.hours(10) == pytest.approx(10 * 11 / 3 / 3600)
        assert several.hours(10) == rates.hours(10) / 2
        facts = {"samples": 3, "tokens": 18, "seconds": 11.0}
        twice = {key: value * min(count, 2) for key, value in facts.items()}
        assert rates.by_model == {"bf16": twice} | ({"quantized": facts} if count == 3 else {})


@pytest.mark.parametrize(
    ("task", "outcome", "said"),
    [
        (
            FIRST,
            "INCONCLUSIVE",
            "undecided, in brief; at most about 6 h 00 min left",
        ),  # 2 x (200 + 100)
        (FIRST, "PASS", "PASS, in brief; at most about 2 h 00 min left"),
        (LAST, "PASS", "PASS, in brief"),
    ],
)
def test_a_look_tells_what_the_rest_takes_at_most(
    task: Any, outcome: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison: Any = SimpleNamespace(questions=100, repeats=2 if task is FIRST else 1)
    monkeypatch.setattr(answers, "judge_task", lambda *_: Verdict(outcome, "the reason"))
    monkeypatch.setattr(answers, "in_brief", lambda *_: "in brief")
    telling_one, told = telling(monkeypatch)
    telling_one.tell_look([FIRST, LAST], task, 1, comparison)
    seen = f"look 1 of {len(task.plan.looks)}, {100 * comparison.repeats} of {task.samples} a model"
    assert told == [f"{task.name}, {seen}: {said}"]


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        ((2, 1), "PASS after 800 of 1000 samples: about 2.0 hours saved at the rate of this run"),
        ((3, 1), "PASS after 1000 of 1000 samples"),
        ((1, 0), "PASS after 400 of 1000 samples: about 6.0 hours saved at the rate of this run"),
    ],
)
def test_the_end_tells_what_was_saved(
    taken: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, told = telling(monkeypatch)
    found.tell([FIRST, LAST], dict(zip(("one", "two"), taken, strict=True)), "PASS")
    assert told == [said]


def test_the_mark_of_a_whole_evaluation_is_moved_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill among the moves leaves no new mark beside older scores."""
    found = object.__new__(Answers)
    found._run, found._whole, found._over = RunDir(tmp_path), [], {}
    found.folder = tmp_path / "evaluation.partial"
    for name in ("bf16", "quantized"):
        (found.folder / name).mkdir(parents=True)
        (found.folder / name / "task.jsonl").write_text(name)
    moved, replace = list[str](), Path.replace

    def noting(self: Path, target: Path) -> Path:
        moved.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noting)
    found.finish([], {})
    assert moved[-3:] == ["task.jsonl", "task.jsonl", "done.json"]
    assert (tmp_path / "evaluation" / "quantized" / "task.jsonl").read_text() == "quantized"
    assert not found.folder.exists()


def test_of_all_conditions_that_changed_the_first_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line a task and model: two changed conditions make no second; nothing changed, no line."""
    telling_one, told = telling(monkeypatch)
    telling_one._run = RunDir(tmp_path)
    models: list[Any] = [SimpleNamespace(name=name) for name in ("changed", "same", "new")]
    now = {"device": "cuda", "threads": 8, "versions": {"torch": "2"}}
    stored = {"changed": now | {"device": "cpu", "threads": 4}, "same": now}
    monkeypatch.setattr(answers, "made_with", lambda *_: now)
    monkeypatch.setattr(
        Answers,
        "_stored_scoring",
        lambda _, model, task: (
            SimpleNamespace(made_with=stored[model.name]) if model.name in stored else None
        ),
    )
    telling_one.tell_what_differs(models, [FIRST])
    assert [line.split(", so it is")[0] for line in told] == [
        "one, changed: scored with device cpu, now cuda"
    ]


@pytest.mark.parametrize("begun", [False, True])
def test_parts_are_asked_together_where_none_has_answers(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked:
        plan = Plan("such_questions", 100, 1, 0)

    asked: list[Part] = []
    monkeypatch.setattr(Answers, "scored", lambda *_: object() if begun else None)
    monkeypatch.setattr(Answers, "_extend", lambda _, model, task, part, title: asked.append(part))
    found, task = object.__new__(Answers), Asked()
    found._processes, found._loaded = ALONE, None
    model: Any = SimpleNamespace(backend=None)
    found.ask([model], {task: 2})  # type: ignore[dict-item]
    plan = task.plan
    assert asked == (plan.parts[:2] if begun else [plan.first(plan.looks[1])])


@pytest.mark.parametrize("free", [(), JUDGED])
def test_a_candidate_of_other_settings_is_compared_only_where_they_are_judged(
    free: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers may have different settings: no look of theirs decides, and a point's does."""
    base = scoring()
    fewer = replace(base, conditions={"sampler": {"max_denoising_steps": 10}})
    models: list[Any] = [
        SimpleNamespace(free=settings, scoring=each)
        for settings, each in (((), base), (free, fewer))
    ]
    monkeypatch.setattr(Answers, "scored", lambda _, model, task: model.scoring)
    found = object.__new__(Answers)
    found._processes = ALONE
    gate = Gate(estimand="such_questions", margin_pp={"one": 5})
    assert (found.compared(models, FIRST, gate)[1] is not None) == bool(free)
