"""Scores in NeMo Evaluator's files: a verdict of ours is the same behind them, theirs can be judged."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from quick_run import TASK, rows

from quantize.cli import cli
from quantize.errors import InputError
from quantize.host.files import write_json
from quantize.recovery.gate import judge
from quantize.recovery.pairing import paired
from quantize.recovery.rows import Scoring
from quantize.recovery.sequential import Plan
from quantize.recovery.statistics import Comparison
from quantize.recovery.terms import Terms
from quantize.reports.nemo import export, judge_bundles
from quantize.reports.scores import write_scoring
from quantize.runs.folder import RunDir

PLAN = Plan("such_questions", 100, 1, 0)


def scored(lost: int, looks: int) -> Scoring:
    """Answers up to a look, of which the first so many questions' are wrong."""
    made = Scoring(
        TASK, rows([float(i >= lost) for i in range(100)]), {}, {"planned": asdict(PLAN)}
    )
    return made.only(PLAN.first(PLAN.looks[looks - 1]).answers)


@pytest.mark.parametrize(("lost", "outcome"), [(0, "PASS"), (60, "FAIL"), (12, "INCONCLUSIVE")])
def test_a_run_that_ended_at_a_look_has_its_verdict_behind_their_files(
    lost: int, outcome: str, tmp_path: Path
) -> None:
    """Its last look alone would say too much: 40 of 100 questions decide at 0.2 %, not at 5 %."""
    base, other = scored(0, 3), scored(lost, 2)
    run = RunDir(tmp_path / "run")
    for name, scoring in (("bf16", base), ("quantized", other)):
        write_scoring(run.evaluation / name, scoring)
    write_json(run.evaluation / "done.json", {"tasks": [TASK]})
    export(run, tmp_path / "theirs")
    terms: dict[str, Any] = {"estimand": "such_questions", "margin_pp": 20, "confidence": 0.95}
    ours = paired(base, other, Terms(**terms))
    assert isinstance(ours, Comparison)
    folders = tmp_path / "theirs" / "bf16", tmp_path / "theirs" / "quantized"
    found = judge_bundles(*folders, {TASK: 20}, "such_questions")
    assert found == judge({TASK: ours})
    assert found.outcome == outcome
    bundle = json.loads((folders[1] / TASK / f"eval-{TASK}.json").read_text())
    right = [row.score for row in other.rows]
    assert bundle["benchmark"]["scores"]["mean_reward"]["value"] == sum(right) / len(right)
    text = (folders[1] / TASK / "results.jsonl").read_text()
    assert "text" not in text
    with pytest.raises(InputError, match="there already"):
        export(run, tmp_path / "theirs")


def test_a_run_that_lacks_a_tasks_scores_leaves_no_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for name in ("bf16", "quantized"):
        write_scoring(run.evaluation / name, scored(0, 2))
    write_json(run.evaluation / "done.json", {"tasks": [TASK, "gone"]})
    with pytest.raises(InputError, match="gone"):
        export(run, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def bundle(folder: Path, rewards: Sequence[float], **more: Any) -> Path:
    """Write a flat bundle as their documentation shows it, two repeats of each problem."""
    folder.mkdir()
    scores = {"mean_reward": {"value": 0.5, "ci_lower": 0.4, "ci_upper": 0.6}}
    about = {
        "run_id": "eval-1",
        "config": {"model": "m"},
        "benchmark": {"name": "gsm8k", "scores": scores},
    }
    (folder / "eval-1.json").write_text(json.dumps(about))
    lines = [
        {"problem_idx": i, "reward": reward, "repeat": repeat, "expected_answer": "42",
         "model_response": "It is 42.", "metadata": {"category": "sums"}} | more
        for i, reward in enumerate(rewards)
        for repeat in range(2)
    ]  # fmt: skip
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("lost", "code", "says"),
    [(0, 0, "PASS: gsm8k: answers as many"), (60, 1, "FAIL: "), (12, 4, "INCONCLUSIVE: ")],
)
def test_theirs_are_judged(lost: int, code: int, says: str, tmp_path: Path) -> None:
    base = bundle(tmp_path / "a", [1.0] * 100)
    other = bundle(tmp_path / "b", [float(i >= lost) for i in range(100)])
    words = ["nemo", "judge", str(base), str(other), "--margin", "gsm8k", "10"]
    found = CliRunner().invoke(cli, [*words, "--estimand", "such_questions"], standalone_mode=False)
    assert found.return_value == code
    assert found.output.startswith(says)
    assert "(100 questions x 2, on questions like these)" in found.output


def test_answers_that_differ_in_what_was_asked_are_not_comparable(tmp_path: Path) -> None:
    base = bundle(tmp_path / "a", [1.0] * 30)
    for name, other, says in (
        ("b", bundle(tmp_path / "b", [1.0] * 29), "gsm8k: answers differ: 60 against 58"),
        ("c", bundle(tmp_path / "c", [1.0] * 30, expected_answer="7"), "is '42' against '7'"),
    ):
        found = judge_bundles(base, other, {"gsm8k": 10}, "such_questions")
        assert (name, found.outcome) == (name, "NOT COMPARABLE")
        assert says in found.reason
    (tmp_path / "b" / "eval-1.json").write_text('{"benchmark": {"name": "mgsm"}}')
    found = judge_bundles(base, tmp_path / "b", {"gsm8k": 10}, "such_questions")
    assert found.reason == "benchmarks differ: gsm8k against mgsm"


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("eval-1.json", "{", "eval-1.json: the record: Invalid JSON"),
        ("eval-1.json", "{}", "eval-1.json: benchmark.name: Field required"),
        ("eval-1.json", '{"benchmark": {"name": "g"}, "config": {"planned": {"seed": 1}}}', "planned"),
        ("eval-2.json", '{"benchmark": {"name": "gsm8k"}}', "benchmark 'gsm8k', is there twice"),
        ("results.jsonl", '{"problem_idx": 0}', "results.jsonl: line 1: reward: Field required"),
        ("results.jsonl", '\n{"problem_idx": 0, "reward": NaN}', "line 2: reward: Input should be"),
        ("results.jsonl", '{"problem_idx": 0, "reward": 1.5}', "less than or equal to 1"),
        ("results.jsonl", '{"problem_idx": "0", "reward": 1}', "Input should be a valid integer"),
        ("results.jsonl", '{"problem_idx": 0, "reward": 1}\n' * 2, "an answer, or benchmark 'gsm8k'"),
        ("results.jsonl", "", "gsm8k: 0 questions cannot be compared; two are the least"),
        ("results.jsonl", None, "results.jsonl: cannot be read"),
        ("eval-1.json", None, "no eval-*.json there, nor in a folder of it"),
    ],
)  # fmt: skip
def test_bad_files_are_one_line(file: str, text: str | None, says: str, tmp_path: Path) -> None:
    folder = bundle(tmp_path / "a", [1.0] * 30)
    (folder / file).unlink(missing_ok=True)
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(InputError) as error:
        judge_bundles(folder, folder, {"gsm8k": 10}, "such_questions")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("margins", "says"),
    [
        ({"gms8k": 2.0}, "margins of gms8k, bundles of gsm8k; name a margin for each"),
        ({"gsm8k": 0.0}, "a margin of 0 points"),
        ({"gsm8k": float("nan")}, "a margin of nan points"),
    ],
)
def test_margins_that_mean_nothing_are_one_line(
    margins: dict[str, float], says: str, tmp_path: Path
) -> None:
    folder = bundle(tmp_path / "a", [1.0] * 30)
    with pytest.raises(InputError, match=says):
        judge_bundles(folder, folder, margins, "such_questions")
