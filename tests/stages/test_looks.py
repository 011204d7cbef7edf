"""Evaluation ends when the verdict is certain: what is asked of whom, resumed, shared, and gone on."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Evaluation, Gate, OperatingPoint
from quantize.recovery import sequential
from quantize.recovery.extraction import VERSION
from quantize.recovery.gate import Verdict
from quantize.recovery.samples import Completion, Finished, Request, Waiting
from quantize.recovery.sequential import Plan
from quantize.reports.scores import read_scoring, write_scoring
from quantize.runs.folder import RunDir
from quantize.runs.manifest import fingerprint
from quantize.stages.evaluate import answers, compared_models, evaluate, local_model
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.evaluate.tasks import Task, conditions
from quantize.stages.report.report import judge_run
from quantize.stages.report.rows import other_looks

GSM, WORDS = "gsm8k", "word_problems"
COUNT, REPEATS = 100, 4
Rule = Callable[[int, int], bool]  # number of a question and seed -> whether it is lost


def never(question: int, seed: int) -> bool:
    return False


def always(question: int, seed: int) -> bool:
    return True


@dataclass
class Bench:
    """Two tasks of 100 made-up problems, models that know every answer, and one that loses some."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    asked: list[tuple[str, Request]] = field(default_factory=list[tuple[str, Request]])
    loaded: list[str] = field(default_factory=list[str])
    released: list[str] = field(default_factory=list[str])
    lost: Rule = never
    dies_after: int = 1 << 30

    def __post_init__(self) -> None:
        self.run = RunDir(self.folder / "run")
        self.run.path.mkdir(parents=True)
        self.run.checkpoint.symlink_to(CHECKPOINT)
        self.data = self.folder / "tasks"
        self.data.mkdir()
        rows = [
            {"question": f"What is {i} + 0?", "answer_number": i, "answer": f"#### {i}"}
            for i in range(COUNT)
        ]
        text = "\n".join(map(json.dumps, rows))
        for task in (GSM, WORDS):
            (self.data / f"{task}.jsonl").write_text(text)
        bench = self

        class Scripted(Answerer):
            """Answers in this process without a model."""

            def __init__(self, folder: Path, digest: str, *more: Any, **settings: Any) -> None:
                super().__init__(folder, digest, *more, **settings)
                self.name = "bf16" if digest == "source" else "quantized"

            def __call__(self, requests: Waiting) -> Iterator[Finished]:
                bench.loaded.append(self.name)
                for request in requests:
                    completion = bench.answer(self.name, request)
                    for limit in self.also_at:
                        shorter = replace(completion, text="####", truncated=True)
                        yield replace(request, max_new_tokens=limit), shorter
                    yield request, completion

            def release(self) -> None:
                bench.released.append(self.name)

            def record(self, requests: Sequence[Request]) -> dict[str, Any]:
                steps: list[Any] = []
                found = [{"prompt": r.prompt, "steps": steps, "text": ""} for r in requests]
                return {"vocabulary": {}, "samples": found}

        for module in (answers, compared_models, evaluate):
            self.monkeypatch.setattr(module, "Answerer", Scripted)

    def answer(self, name: str, request: Request) -> Completion:
        if len(self.asked) == self.dies_after:
            raise KeyboardInterrupt
        self.asked.append((name, request))
        number = int(request.prompt.split()[2])
        lost = name == "quantized" and self.lost(number, request.seed)
        return Completion(f"#### {number + lost}", 5, [3], False)

    def score(
        self,
        tasks: Sequence[str] = (WORDS,),
        *,
        estimand: Any = "these_questions",
        repeats: int = REPEATS,
        margin_pp: float = 10,
        batch_size: int = 8,
        own: Any = None,
        budget: int | None = None,
        **more: Any,
    ) -> Verdict:
        """Evaluate and judge."""
        settings = Evaluation(
            tasks=list(tasks),
            repeats=dict.fromkeys(tasks, repeats),
            batch_size=batch_size,
            own_tasks=own or {},
            token_budget=budget,
        )
        gate = Gate(estimand=estimand, margin_pp=dict.fromkeys(tasks, margin_pp))
        evaluate.evaluate(
            self.run, CHECKPOINT, "source", settings, gate=gate, data_dir=self.data, **more
        )
        verified = {"passed": True, "checks": [], "relative_error": {}}
        artifact = {"artifact": fingerprint(Checkpoint.open(self.run.checkpoint))}
        write_json(self.run.verification_json, verified | artifact)
        facts: Any = {key: {} for key in ("source", "versions", "hardware", "stages")}
        facts["source"] = {"fingerprint": "source"}
        write_json(self.run.manifest_json, facts)
        recipe = load_recipe("fp8_dynamic")
        recipe = recipe.model_copy(update={"evaluation": settings, "gate": gate})
        return judge_run(self.run, recipe)[1]

    @property
    def done(self) -> Any:
        return read_json(self.run.evaluation / "done.json")

    def files(self) -> dict[str, bytes]:
        """Scores by path."""
        found = (p for p in self.run.evaluation.rglob("*") if ".partial" not in p.name)
        return {str(p.relative_to(self.run.path)): p.read_bytes() for p in found if p.is_file()}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path / "first", monkeypatch)


def test_an_undamaged_run_ends_early_and_passes(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = bench.score()
    said = " ".join(capsys.readouterr().err.split())  # a narrow terminal wraps lines
    begin = f"{WORDS}, look 1 of 3, 200 of 400 a model: PASS, +0.0 points, this look's bounds ["
    (look,) = re.findall(rf"{re.escape(begin)}.*?margin 10", said)
    assert len(look) < 160
    assert "samples to do" not in said
    assert verdict.outcome == "PASS"
    assert bench.done["looks"] == {WORDS: {"taken": 1, "of": 3}}
    assert len(bench.asked) == 2 * COUNT * 2  # two of four repeats, two sides
    report = judge_run(bench.run, recipe_of(bench))[0]
    (entry,) = report["tasks"]
    assert [look["repeats"] for look in entry["looks"]] == [2]
    assert entry["made_with"]["planned"] == {
        "estimand": "these_questions", "questions": COUNT, "repeats": REPEATS, "seed": 0
    }  # fmt: skip


def test_two_limits_of_tokens_are_judged_from_one_set_of_answers(tmp_path: Path) -> None:
    """The shorter answers are the beginnings of the longer, also if the run died between them."""
    own = {"short": {"of": WORDS, "max_tokens": 64}}
    files: list[dict[str, bytes]] = []
    for dies_after in (1 << 30, 150):
        with pytest.MonkeyPatch.context() as patch:
            bench = Bench(tmp_path / str(dies_after), patch, dies_after=dies_after)
            if dies_after == 150:
                with pytest.raises(KeyboardInterrupt):
                    bench.score(("short", WORDS), own=own)
                bench.dies_after = 1 << 30
            verdict = bench.score(("short", WORDS), own=own)
            assert {request.max_new_tokens for _, request in bench.asked} == {128}
            assert len(bench.asked) == 2 * COUNT * 2
            files.append(bench.files())
    assert files[0] == files[1]
    assert list(bench.done["looks"]) == [WORDS, "short"]
    assert verdict.reason.startswith("short at 64 tokens: BF16 answers 0.0 % correctly")
    short, whole = (read_scoring(bench.run.evaluation / "bf16", task) for task in ("short", WORDS))
    assert [(row.seed, row.prompt_hash) for row in short.rows] == [
        (row.seed, row.prompt_hash) for row in whole.rows
    ]
    assert {row.score for row in short.rows} == {0.0}
    assert {row.truncated for row in short.rows} == {True}
    assert {row.score for row in whole.rows} == {1.0}


def test_answers_that_were_there_before_a_shorter_limit_are_not_made_again(bench: Bench) -> None:
    """What the store lacks of the shorter task is asked; what stands of the longer is not."""
    bench.score()
    asked = len(bench.asked)
    bench.score((WORDS, "short"), own={"short": {"of": WORDS, "max_tokens": 64}})
    assert {request.max_new_tokens for _, request in bench.asked[asked:]} == {64}


def recipe_of(bench: Bench) -> Any:
    settings = Evaluation(tasks=[WORDS], repeats={WORDS: REPEATS})
    gate = Gate(estimand="these_questions", margin_pp={WORDS: 10})
    return load_recipe("fp8_dynamic").model_copy(update={"evaluation": settings, "gate": gate})


def test_the_model_that_is_loaded_goes_first(bench: Bench) -> None:
    bench.lost = lambda question, seed: question < 10  # the margin: decided at the last look or not
    bench.score(estimand="such_questions", repeats=1)
    assert bench.done["looks"][WORDS]["taken"] > 2
    left = [a for a, b in zip(bench.loaded, bench.loaded[1:], strict=False) if a != b]
    assert len(left) == bench.done["looks"][WORDS]["taken"]
    assert bench.released[: len(left)] == left  # two would not fit beside each other


def test_a_task_that_fails_ends_the_run_before_dearer_ones(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.lost = always
    verdict = bench.score((GSM, WORDS))
    assert verdict.outcome == "FAIL"
    assert bench.done["tasks"] == [WORDS]  # the cheaper one
    assert bench.done["not_asked"] == [GSM]
    assert not (bench.run.evaluation / "bf16" / f"{GSM}.jsonl").exists()
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"FAIL after {2 * COUNT * 2} of {2 * 2 * COUNT * REPEATS} samples: about" in said
    assert "hours saved" in said


def test_a_run_that_cannot_pass_asks_for_no_more_than_a_fail(bench: Bench) -> None:
    """The cheaper task loses about the margin; the dearer one is then given up at its first look."""
    bench.lost = lambda question, seed: seed % 11 == 5
    verdict = bench.score((GSM, WORDS), repeats=10)
    assert verdict.outcome == "INCONCLUSIVE"
    assert bench.done["looks"] == {WORDS: {"taken": 5, "of": 8}, GSM: {"taken": 1, "of": 8}}
    asked = len(bench.asked)
    assert bench.score((GSM, WORDS), repeats=10).outcome == "INCONCLUSIVE"
    assert len(bench.asked) == asked == 2 * COUNT * (6 + 2)  # what was given up stays so


def test_no_look_begins_once_the_budget_is_spent(bench: Bench) -> None:
    """Tasks share it: the cheaper passes with 400 answers of 5 tokens, then 1 token is left or none."""
    assert bench.score((GSM, WORDS), budget=2000).outcome == "INCONCLUSIVE"
    assert (bench.done["tasks"], bench.done["not_asked"]) == ([WORDS], [GSM])
    bench.lost = lambda question, seed: seed % 11 == 5
    for _ in range(2):  # what it ended stays so
        assert bench.score((GSM, WORDS), budget=2001).outcome == "INCONCLUSIVE"
        assert bench.done["looks"][GSM] == {"taken": 1, "of": 3, "budget": 2001}
        assert bench.done["looks"][WORDS] == {"taken": 1, "of": 3}
    assert len(bench.asked) == 2 * COUNT * (2 + 2)
    bench.score((GSM, WORDS), budget=10**6)
    assert bench.done["looks"][GSM] == {"taken": 3, "of": 3}


def test_questions_are_asked_in_a_random_order(bench: Bench) -> None:
    bench.score(estimand="such_questions", repeats=1, margin_pp=70)
    numbers = [int(r.prompt.split()[2]) for name, r in bench.asked if name == "bf16"]
    assert bench.done["looks"][WORDS]["taken"] == 1
    assert len(set(numbers)) == 20
    assert max(numbers) > 50
    noted = read_json(bench.run.evaluation / "questions" / f"{WORDS}.json")["prompts"]
    assert {int(index): int(text.split()[2]) for index, text in noted.items()} == {
        number: number for number in numbers
    }


def test_going_on_asks_everything_and_keeps_the_verdict(bench: Bench) -> None:
    early = bench.score(estimand="such_questions", repeats=1, margin_pp=20)
    asked = len(bench.asked)
    late = bench.score(estimand="such_questions", repeats=1, margin_pp=20, go_on=True)
    assert asked < len(bench.asked) == 2 * COUNT  # nothing was asked twice
    assert early.outcome == late.outcome == "PASS"
    assert bench.done["looks"][WORDS]["taken"] == bench.done["looks"][WORDS]["of"]
    assert not list(bench.run.evaluation.rglob("*.partial.jsonl"))


@pytest.mark.parametrize("tasks", [(WORDS,), (GSM, WORDS)])
def test_evaluating_again_forgets_no_look(bench: Bench, tasks: Sequence[str]) -> None:
    """After --all the plain command, and one that asks for further sides, said "after look 1"."""
    bench.lost = always  # the first of two tasks decides: the second one's answers stay known
    bench.score(tasks, estimand="such_questions", repeats=1, go_on=True)
    asked, done = len(bench.asked), bench.done
    assert done["looks"] == {task: {"taken": 8, "of": 8} for task in sorted(tasks, reverse=True)}
    bench.score(
        tasks,
        estimand="such_questions",
        repeats=1,
        options=compared_models.ModelOptions(modes=["none"]),
    )
    assert bench.done == done
    assert len(bench.asked) == asked + COUNT * len(tasks)  # of the further side, as much


def test_a_run_of_an_earlier_versions_looks_is_asked_no_more_than_it_needs(bench: Bench) -> None:
    """Its report says so; evaluated again it is counted by today's looks, of which its own are some."""
    with bench.monkeypatch.context() as patch:
        patch.setattr(sequential, "FRACTIONS", (0.3, 0.4, 0.5, 0.7, 1.0))
        assert bench.score(repeats=10).outcome == "PASS"
    asked = len(bench.asked)
    assert bench.done["looks"] == {WORDS: {"taken": 1, "of": 5}}
    (said,) = judge_run(bench.run, recipe_of(bench))[0]["not_read"]
    assert said.startswith(
        f"{WORDS} was asked by 5 looks and is judged by 8 since; `quantize evalu"
    )
    assert bench.score(repeats=10).outcome == "PASS"
    assert (bench.done["looks"], len(bench.asked)) == ({WORDS: {"taken": 2, "of": 8}}, asked)
    assert other_looks(bench.run) is None


def test_going_on_loads_each_model_once(bench: Bench) -> None:
    """Samples depend on no batch, so that all looks of a task are asked at once."""
    bench.score((GSM, WORDS), go_on=True)
    assert bench.loaded == ["bf16"] * 2 + ["quantized"] * 2
    assert len(bench.asked) == 2 * 2 * COUNT * REPEATS
    assert bench.done["looks"] == {key: {"taken": 3, "of": 3} for key in (WORDS, GSM)}


def test_other_sides_are_asked_as_much(bench: Bench) -> None:
    bench.score(options=compared_models.ModelOptions(modes=["none"], noise_floor=True))
    sizes = {
        path.parent.name: len(path.read_text().splitlines())
        for path in bench.run.evaluation.rglob(f"{WORDS}.jsonl")
    }
    assert sizes == dict.fromkeys(("bf16", "quantized", "quantized-none", "bf16-again"), COUNT * 2)


@pytest.mark.parametrize("estimand", ["these_questions", "such_questions"])
def test_a_run_that_dies_anywhere_ends_with_the_same_scores(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimand: str
) -> None:
    def lost(question: int, seed: int) -> bool:
        return seed % 25 == 0

    bench.lost = lost
    repeats = REPEATS if estimand == "these_questions" else 1
    whole = bench.score(estimand=estimand, repeats=repeats)
    broken = Bench(tmp_path / "second", monkeypatch)
    broken.lost = lost
    for dies_after in (37, len(bench.asked) // 3, 2 * len(bench.asked) // 3):
        broken.dies_after = dies_after
        with pytest.raises(KeyboardInterrupt):
            broken.score(estimand=estimand, repeats=repeats)
    broken.dies_after = 1 << 30
    assert broken.score(estimand=estimand, repeats=repeats) == whole
    assert broken.files() == bench.files()


def test_scores_stand_until_those_of_other_conditions_are_whole(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C changes nothing of a finished run; what is replaced is kept; the reason comes first."""
    assert bench.score().outcome == "PASS"
    before, asked = bench.files(), len(bench.asked)
    bench.dies_after = asked + 250  # when the first of both models is scored
    bench.monkeypatch.setattr(local_model, "package_versions", lambda: {"torch": "1.0"})
    with pytest.raises(KeyboardInterrupt):
        bench.score()
    said = " ".join(capsys.readouterr().err.split())
    assert f"{WORDS}, bf16: scored with versions." in said
    assert "so it is asked again" in said
    assert bench.files() == before
    bench.dies_after = 1 << 30
    assert bench.score().outcome == "PASS"
    assert 2 * asked <= len(bench.asked) < 2 * asked + 8  # with the batch that was interrupted
    rows = f"evaluation/bf16/{WORDS}"
    after = bench.files()
    assert after[f"{rows}.conditions.json"] != before[f"{rows}.conditions.json"]
    for side in ("bf16", "quantized"):
        (kept,) = (bench.run.path / "evaluation-earlier").glob(f"*/{side}/*.conditions.json")
        assert kept.read_bytes() == before[f"evaluation/{side}/{kept.name}"]
    assert not list(bench.run.path.glob("*.partial"))


def test_points_are_judged_as_the_candidate_is_and_the_fastest_that_passes_comes_first(
    bench: Bench,
) -> None:
    steps = {
        "t10": OperatingPoint(max_denoising_steps=10),
        "t20": OperatingPoint(max_denoising_steps=20),
    }
    options = compared_models.ModelOptions(points=steps)
    assert bench.score(margin_pp=20, options=options).outcome == "PASS"
    report = judge_run(bench.run, recipe_of(bench))[0]
    found = report["operating_points"]
    assert sorted(point["name"] for point in found) == ["t10", "t20"]
    assert all(point["passes"] for point in found)
    assert found[0]["settings"]["max_denoising_steps"] in (10, 20)
    assert [task["activations"] for task in report["tasks"]] == ["per_layer", "at t10", "at t20"]
    assert [task["gated"] for task in report["tasks"]] == [True, False, False]
    assert [task["quantized_counts"]["samples"] for task in report["tasks"]] == [200] * 3
    slower = compared_models.ModelOptions(points={"t99": OperatingPoint(max_denoising_steps=99)})
    with pytest.raises(InputError, match="99 steps of a canvas are more than the baseline's 48"):
        bench.score(options=slower)


def test_points_are_asked_at_the_level_that_they_share(bench: Bench) -> None:
    """200 answers show a sign in less than 2.4 % at a level of 5 % (p 0.008 of 0.0125), not at half."""
    steps = {f"t{n}": OperatingPoint(max_denoising_steps=n) for n in (10, 20)}
    options = compared_models.ModelOptions(points=steps)
    assert bench.score(margin_pp=4.8, options=options).outcome == "PASS"
    tasks = judge_run(bench.run, recipe_of(bench))[0]["tasks"]
    assert [task["quantized_counts"]["samples"] for task in tasks] == [200, 300, 300]


def read_by_the_old_rule(bench: Bench, models: str = "*") -> None:
    """Make scores those of the version before `extraction` counted its changes."""
    for path in bench.run.evaluation.glob(f"{models}/{WORDS}.conditions.json"):
        scoring = read_scoring(path.parent, WORDS)
        del scoring.conditions["extraction"]
        rows = [replace(row, answer="[invalid]", scores={"old": 0.0}) for row in scoring.rows]
        write_scoring(path.parent, replace(scoring, rows=rows))


def test_answers_that_another_rule_read_are_read_again_and_not_asked_for(bench: Bench) -> None:
    bench.lost = lambda question, seed: question < 3
    verdict, asked = bench.score(), len(bench.asked)
    files = bench.files()
    read_by_the_old_rule(bench)
    shutil.rmtree(bench.run.path.parent / ".bf16")  # not from the store either: from the rows
    again = bench.score()
    assert len(bench.asked) == asked
    assert (again.outcome, again.reason) == (verdict.outcome, verdict.reason)
    assert bench.files() == files


def test_two_rules_are_never_compared(bench: Bench) -> None:
    bench.score()
    read_by_the_old_rule(bench, "quantized")
    verdict = judge_run(bench.run, recipe_of(bench))[1]
    assert verdict.outcome == "NOT COMPARABLE"
    assert "extraction differ" in verdict.reason


def test_a_private_tasks_samples_depend_on_the_rule_that_shortened_them() -> None:
    plan = Plan("these_questions", 2, 1, 0)
    open_, private = (conditions({}, 0, Task(n, None, plan, 9)) for n in (GSM, "gpqa_diamond"))
    assert "extraction" not in open_
    assert private["extraction"] == VERSION
