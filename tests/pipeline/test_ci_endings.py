"""Twelve ways in which a CI job's run ends: exit code, junit.xml, report and job summary of each.

docs/ci.md says what a run leaves. A run that ends with 0, 1 or 4 leaves all of it, made from what
there is: each check has passed, failed, or was not reached.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quantize.host.files import read_json, write_json
from quantize.host.units import size
from quantize.recovery.rows import Row
from quantize.reports.compare import compare_runs
from quantize.reports.headline import facts
from quantize.reports.scores import read_scoring, write_scoring
from quantize.runs.folder import RunDir
from quantize.stages.convert.convert import convert
from tests.support.quick_run import TASK, Done, Quick, made_up_replay, made_up_scores

SUMMARY = "summary.md"


def scored(change: Callable[[Row], Row], run: RunDir, *more: Any, **options: Any) -> Any:
    """Stand in for evaluate: the quantized model's rows are changed."""
    found = made_up_scores(run, *more, **options)
    scoring = read_scoring(run.evaluation / "quantized", TASK)
    changed = replace(scoring, rows=[change(row) for row in scoring.rows])
    write_scoring(run.evaluation / "quantized", changed)
    return found


def far_away(*arguments: Any, **options: Any) -> None:
    """Stand in for fidelity: the distance is above its limit."""
    out: Path = arguments[3]
    made_up_replay(*arguments, **options)
    fault = "KL from BF16 is 0.2 nats (activations none), above max_kl_nats 0.1"
    write_json(out, read_json(out) | {"faults": [fault], "max_kl_nats": {"none": 0.1}})


def asked(quick: Quick, stage: str, stand_in: Any, result: Path) -> Done:
    """Run again with a stand-in for one stage, whose old result is removed."""
    shutil.rmtree(result) if result.is_dir() else result.unlink()
    quick.monkeypatch.setattr(f"quantize.stages.{stage}.{stage}.{stage}", stand_in)
    return quick.run("--resume")


def by_scores(change: Callable[[Row], Row]) -> Callable[[Quick], Done]:
    return lambda quick: asked(quick, "evaluate", partial(scored, change), quick.folder.evaluation)


def by_loss(lost: int, **more: Any) -> Callable[[Quick], Done]:
    stand_in = partial(made_up_scores, lost=lost, **more)
    return lambda quick: asked(quick, "evaluate", stand_in, quick.folder.evaluation)


def flipped(checkpoint: Path) -> None:
    """Change the last byte of a checkpoint's last shard."""
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 255
    shard.write_bytes(content)


def damaged(quick: Quick) -> Done:
    """A disk changes a byte behind convert."""

    def onto_a_bad_disk(source: Any, targets: Any, out: Path, **options: Any) -> None:
        convert(source, targets, out, **options)
        flipped(out)

    return asked(quick, "convert", onto_a_bad_disk, quick.folder.checkpoint)


def judged(quick: Quick, *, damage: bool = False) -> Done:
    theirs = quick.out.parent / "theirs"
    shutil.copytree(quick.folder.checkpoint, theirs)
    if damage:
        flipped(theirs)
    return quick(
        "judge", theirs, "--against", quick.model, "--recipe", quick.recipe, "--out", quick.out
    )


def bad_input(quick: Quick) -> Done:
    quick.recipe.write_text(quick.recipe.read_text() + "unknown: 1\n")
    return quick.run()


def interrupted(quick: Quick) -> Done:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    return asked(quick, "evaluate", stop, quick.folder.evaluation)


@dataclass
class Ending:
    """A way to end, and what must be left: the outcome of named test cases, None if no report."""

    end: Callable[[Quick], Done]
    code: int
    outcome: str | None = None
    cases: tuple[tuple[str, str], ...] = ()  # test case -> tag, "" where it passed
    folder: str = "quick-*"


REACHED = (("fidelity", "skipped"), (f"task {TASK}", "skipped"), ("gate", "failure"))
ENDINGS = {
    "PASS": Ending(by_loss(0), 0, "PASS", (("gate", ""), (f"task {TASK}", ""))),
    "FAIL by accuracy": Ending(
        by_loss(55), 1, "FAIL", ((f"task {TASK}", "failure"), ("gate", "failure"))
    ),
    "FAIL by KL": Ending(
        lambda quick: asked(quick, "fidelity", far_away, quick.folder.fidelity_json), 1, "FAIL",
        (("fidelity", "failure"), (f"task {TASK}", "skipped"), ("gate", "failure")),
    ),
    "FAIL by verification": Ending(damaged, 1, "FAIL", REACHED),
    "FAIL by health": Ending(
        by_scores(lambda row: replace(row, signs=["empty"])), 1, "FAIL", (("gate", "failure"),)
    ),
    "FAIL by steps": Ending(
        by_scores(lambda row: replace(row, denoising_steps=[9])), 1, "FAIL", (("gate", "failure"),)
    ),
    "INCONCLUSIVE": Ending(by_loss(16), 4, "INCONCLUSIVE", (("gate", "skipped"),)),
    "NOT COMPARABLE": Ending(
        by_loss(0, dtype="torch.bfloat16"), 4, "NOT COMPARABLE",
        ((f"task {TASK}", "error"), ("gate", "error")),
    ),
    "bad input": Ending(bad_input, 2),
    "interrupted": Ending(interrupted, 130),
    "judge of a sound checkpoint": Ending(judged, 0, "PASS", (("gate", ""),), "judge-*"),
    "judge of a damaged checkpoint": Ending(
        partial(judged, damage=True), 1, "FAIL", REACHED, "judge-*"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending_leaves_what_the_page_promises(
    name: str, quick: Quick, tmp_path: Path
) -> None:
    ending, summary = ENDINGS[name], tmp_path / SUMMARY
    for path in (quick.folder.report_json, quick.folder.report_md, quick.folder.junit_xml):
        path.unlink()  # of the run before
    quick.monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = ending.end(quick)
    assert done.code == ending.code, done.err
    if ending.outcome == "PASS":
        assert "the verdict rests on a one-sided bound" in done.err
    if ending.outcome is None:
        assert not summary.exists()
        assert not quick.folder.junit_xml.exists()
        return
    (path,) = quick.out.glob(ending.folder)
    run = RunDir(path)
    report = read_json(run.report_json)
    assert report["verdict"]["outcome"] == ending.outcome
    assert report["verdict"]["exit_code"] == ending.code
    assert summary.read_text() == run.report_md.read_text()
    assert run.report_md.read_text().startswith(f"# {ending.outcome}: ")
    assert ending.outcome in run.report_html.read_text()
    is_asked = not report["not_reached"]
    assert ("Judged: the loss" in run.report_md.read_text()) == is_asked
    suite = ElementTree.parse(run.junit_xml).getroot()
    for case, tag in ending.cases:
        found = suite.find(f"testcase[@name='{case}']")
        assert found is not None, case
        assert [child.tag for child in found] == ([tag] if tag else []), case
    failed = suite.findall("testcase/failure")
    assert bool(failed) == (ending.outcome == "FAIL")
    assert all(case.get("message") for case in failed)


def test_a_report_of_a_run_that_a_check_ended_says_so_again(quick: Quick) -> None:
    asked(quick, "fidelity", far_away, quick.folder.fidelity_json)
    quick.folder.report_json.unlink()
    done = quick("report", quick.folder.path)
    assert done.code == 1
    assert "above max_kl_nats" in done.last
    report = read_json(quick.folder.report_json)
    assert (report["not_reached"], report["tasks"]) == (["evaluate"], [])
    for words in (("card",), ("push", "--repo", "acme/mine", "--dry-run", "--no-gate")):
        refused = quick(words[0], quick.folder.path, *words[1:])
        assert refused.code == 1
        assert "the verdict is FAIL: " in refused.last
        assert "with --no-gate either" in refused.last
    compared = quick("compare", quick.folder.path, quick.folder.path)
    assert compared.code == 2
    assert "it ended at a failed check, so it has no scores: " in compared.last
    shown = quick("status", quick.folder.path).out
    assert "last reported: FAIL, " in shown
    assert "go on" not in shown
    assert report["not_asked"] == [TASK]
    quick.monkeypatch.setattr("quantize.stages.fidelity.fidelity.fidelity", made_up_replay)
    quick.folder.fidelity_json.unlink()
    assert quick.run("--resume").code == 0
    assert read_json(quick.folder.report_json)["not_reached"] == []


def test_a_check_without_a_limit_is_not_green(quick: Quick) -> None:
    assert asked(quick, "fidelity", made_up_replay, quick.folder.fidelity_json).code == 0
    case = ElementTree.parse(quick.folder.junit_xml).getroot().find("testcase[@name='fidelity']")
    assert case is not None
    assert [child.tag for child in case] == ["skipped"]
    assert (
        "a limit on the distance from BF16 on replayed canvases (no gate.max_kl_nats)"
        in quick.folder.report_md.read_text()
    )


def test_status_names_the_commands_that_go_on(quick: Quick) -> None:
    """After an interruption, and nothing of a run that is complete."""
    where = quick.folder.path
    assert "go on" not in quick("status", where).out
    assert quick("evaluate", where, "--noise-floor").code == 0
    shown = quick("status", where).out
    assert "last reported (stale, evaluate changed since): PASS, " in shown
    assert f"go on with `quantize report {where}`\n" in shown
    stopped = interrupted(quick)
    (line,) = (text for text in quick("status", where).out.splitlines() if "go on" in text)
    assert line.startswith("go on with `quantize run --recipe ")
    assert line.endswith(" --resume`")
    assert f"{line.removeprefix('go on with ')} goes on" in stopped.last
    for words in (("report",), ("card",), ("push", "--repo", "acme/x", "--dry-run")):
        refused = quick(words[0], where, *words[1:])
        assert refused.code == 2
        assert f"not finished, without evaluate; {line.removeprefix('go on with ')} goes on" in (
            refused.last
        )
    quick.folder.command.unlink()  # as a run has none that an earlier version or Python began
    commands = f"go on with `quantize evaluate {where}` && `quantize report {where}`"
    assert commands in quick("status", where).out
    quick.monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", made_up_scores)
    assert [quick(stage, where).code for stage in ("evaluate", "report")] == [0, 0]


@pytest.mark.parametrize("until", [("--until", "verify"), ("--until=verify",)])
def test_a_run_that_was_to_end_early_goes_on_to_its_end(
    until: tuple[str, ...], quick: Quick
) -> None:
    shutil.rmtree(quick.folder.evaluation)
    assert quick.run("--resume", *until).code == 0
    (line,) = (
        text for text in quick("status", quick.folder.path).out.splitlines() if "go on" in text
    )
    assert "--until" not in line
    assert "verify" not in line
    assert line.endswith(f" --out {quick.out} --resume`")


def test_status_of_a_judgement_names_its_own_command(quick: Quick) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    quick.monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", stop)
    stopped = judged(quick)
    (path,) = quick.out.glob("judge-*")
    (line,) = (text for text in quick("status", path).out.splitlines() if "go on" in text)
    assert line.startswith(f"go on with `quantize judge {quick.out.parent / 'theirs'} --against ")
    assert f"{line.removeprefix('go on with ')} goes on" in stopped.last


def test_compare_says_what_an_unfinished_judgement_lacks_and_how_it_goes_on(quick: Quick) -> None:
    """It named one missing file, and a command that refuses judgements."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    quick.monkeypatch.setattr("quantize.stages.fidelity.fidelity.fidelity", stop)
    assert judged(quick).code == 130
    (path,) = quick.out.glob("judge-*")
    going_on = f"`{RunDir(path).command.read_text()}` goes on"
    done = quick("compare", quick.folder.path, path)
    assert done.code == 2
    assert f"{path}: not finished, without fidelity, evaluate; {going_on}" in done.last
    assert going_on.startswith("`quantize judge ")
    assert going_on in quick("card", path).last


def test_run_writes_to_stderr_only(quick: Quick) -> None:
    done = quick.run("--resume")
    assert (done.code, done.out) == (0, "")
    assert "report: " in done.err


def test_a_finished_judgement_says_that_nothing_is_left(quick: Quick) -> None:
    assert judged(quick).code == 0
    (path,) = quick.out.glob("judge-*")
    done = quick("card", path)
    assert done.code == 2
    assert "--resume" not in done.last
    assert (
        f"nothing is left to do or to publish, and {path / 'report.html'} has the verdict"
        in done.last
    )


def test_points_that_a_recipe_lacks_are_missed_on_resume_too(quick: Quick) -> None:
    theirs = quick.folder.checkpoint
    words = (
        "judge",
        theirs,
        "--against",
        quick.model,
        "--recipe",
        quick.recipe,
        "--out",
        quick.out,
    )
    assert quick(*words).code == 0
    done = quick(*words, "--resume", "--operating-points")
    assert (done.code, "no evaluation.operating_points" in done.last) == (2, True)
    done = quick.run("--resume", "--operating-points")
    assert (done.code, "no evaluation.operating_points" in done.last) == (2, True)
    done = quick.run("--operating-points", "--out", quick.out / "other")
    assert (done.code, "no evaluation.operating_points" in done.last) == (2, True)
    assert not (quick.out / "other").exists()  # it was quantized and replayed first


def test_both_models_answers_without_a_value_are_counted_and_shown(quick: Quick) -> None:
    """The same faults of both sides give the same counts, whichever side they are on."""
    shares: list[tuple[str, str]] = []
    for side in ("bf16", "quantized"):

        def evaluated(run: RunDir, *more: Any, side: str = side, **options: Any) -> Any:
            found = made_up_scores(run, *more, **options)
            scoring = read_scoring(run.evaluation / side, TASK)
            empty = [
                replace(row, answer="[invalid]", text=f"It is number {row.doc_id}, or so")
                if row.doc_id < 4 else row
                for row in scoring.rows
            ]  # fmt: skip
            write_scoring(run.evaluation / side, replace(scoring, rows=empty))
            return found

        asked(quick, "evaluate", evaluated, quick.folder.evaluation)
        text = quick.folder.report_md.read_text()
        assert "## Answers without a final value" in text
        assert "question 2 (d2): It is number 2, or so" in text
        assert "number 3, or so" not in text  # three examples
        lines = [line for line in text.splitlines() if line.startswith(f"| {TASK} | ")]
        counted = {
            cells[1]: cells[2]
            for line in lines
            if (cells := line.strip("| ").split(" | "))[1] != "x"
        }
        shares.append((counted["BF16"], counted["quantized"]))
    assert shares == [("4 of 60", "0 of 60"), ("0 of 60", "4 of 60")]


def test_a_report_says_which_bound_it_judged_and_what_is_saturated(quick: Quick) -> None:
    assert by_loss(0)(quick).code == 0
    text = quick.folder.report_md.read_text()
    assert "one-sided 95% bound of the loss" in text
    assert f"{TASK}: BF16 answers everything correctly, so the task is saturated" in text
    assert "by layer: 1.000." in text  # routing
    assert "33333" not in text


def test_compare_names_the_reports_size_with_and_without_a_report(quick: Quick) -> None:
    """Bytes of all tensors: not those of the files, which have headers too."""
    report = read_json(quick.folder.report_json)
    nbytes = report["sizes"]["quantized_bytes"]
    shards = quick.folder.checkpoint.glob("*.safetensors")
    assert sum(shard.stat().st_size for shard in shards) > 1.1 * nbytes
    told = dict(facts(report))["size"]
    assert told.startswith(f"{size(nbytes)}, ")
    for gone in (None, quick.folder.report_json):
        if gone is not None:
            gone.unlink()
        found = compare_runs(quick.folder, quick.folder).facts["checkpoint, MB"]
        assert found == (nbytes / 1e6, nbytes / 1e6)
        (line,) = (
            row for row in quick("compare", quick.folder.path, quick.folder.path).out.splitlines()
            if "checkpoint, MB" in row
        )  # fmt: skip
        assert f"{nbytes / 1e6:.4g}" in line
