"""From scored samples to report.json and what is rendered from it: complete, valid, self-contained.

The samples come from scripted servers, on GSM8K and on a mock GPQA file whose every text holds a
marker; a recorded canvas with hostile tokens stands in for the viewer's data.
"""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema_rs  # schemathesis brings it
import pytest

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, plan_targets
from quantize.host.files import read_json, write_json, write_text
from quantize.recovery.gate import Verdict, judge
from quantize.recovery.health import SIGNS
from quantize.recovery.rows import Row, Scoring
from quantize.recovery.terms import Terms
from quantize.reports.compare import compare_runs, question_tables
from quantize.reports.headline import published_rows
from quantize.reports.junit import junit
from quantize.reports.questions import question_counts, questions_and_canvases
from quantize.reports.render import html, markdown
from quantize.reports.scores import counts, pair, read_scoring, write_scoring
from quantize.reports.table import ends_rows
from quantize.runs.folder import RunDir
from quantize.stages.evaluate.recording import RECORDED, leave_questions, record_differing
from quantize.stages.report.report import report
from tests.support.faulty import scoring as faulty
from tests.support.scripted_run import (
    GSM8K,
    HOSTILE,
    MARKER,
    TASKS,
    Recorder,
    add_optional_parts,
    make_run,
    mock_data,
    recipe,
)

VOID = {"meta", "link", "input", "br"}


@pytest.fixture(scope="module")
def targets() -> list[Target]:
    return plan_targets(Checkpoint.open(CHECKPOINT).tensors, recipe().quantization)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mock_data(tmp_path_factory.mktemp("data") / "sets")


@pytest.fixture(scope="module")
def scored(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The least that a report can be made of."""
    return make_run(tmp_path_factory.mktemp("outputs") / "run", data).path


@pytest.fixture
def run(scored: Path, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(scored, tmp_path / "run", symlinks=True))


@pytest.fixture
def full(run: RunDir, targets: list[Target]) -> RunDir:
    add_optional_parts(run)
    report(run, recipe(), targets)
    return run


class Page(HTMLParser):
    """Checks that tags nest, and collects what a page refers to and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.references += [v or "" for k, v in attrs if k in {"src", "href", "xlink:href"}]
        self.ids += [v or "" for k, v in attrs if k == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"rect", "path", "circle"}  # of SVG; HTML has no such tags

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_rendering_says_what_was_judged(full: RunDir) -> None:
    content = read_json(full.report_json)
    assert content["verdict"]["estimand"] == "these_questions"
    assert {task["estimand"] for task in content["tasks"]} == {"these_questions"}
    for text in (full.report_md.read_text("utf-8"), Page(full.report_html.read_text("utf-8")).text):
        assert "Judged: the loss on these questions" in text
        assert "on such questions, pp" in text


def test_a_noise_floor_has_seeds_of_its_own(full: RunDir) -> None:
    """BF16 under one seed twice gives the same answers: a floor of exactly 0 that shows nothing."""
    base, again = (read_scoring(full.evaluation / side, "gsm8k") for side in ("bf16", "bf16-again"))
    assert not {row.seed for row in base.rows} & {row.seed for row in again.rows}
    floor = read_json(full.report_json)["noise_floor"]
    assert [task["not_comparable"] for task in floor] == [None] * len(TASKS)
    judged: dict[str, Any] = {"estimand": "these_questions", "margin_pp": 3, "confidence": 0.95}
    entry, comparison = pair(base, base, Terms(**judged), other_seed=True)
    assert comparison is None
    assert "same seed" in str(entry["not_comparable"])


def test_the_page_is_whole_and_refers_to_nothing_outside(full: RunDir) -> None:
    text = full.report_html.read_text("utf-8")
    page = Page(text)
    assert page.references == ["data:,"]
    assert re.findall(r"https?://|@import|url\(", text) == []
    assert len(page.ids) == len(set(page.ids))
    assert {"step", "play", "canvases"} <= set(page.ids)
    for task in TASKS:
        assert f"{task} (gated)" in page.text
    assert page.text.count("BF16, other seed") == len(TASKS)
    assert f"recovery, {TASKS[0]}" in page.text
    assert (
        "Scores: a server's model quantized (revision v1: a name that was not checked), seed 0"
        in page.text
    )
    assert "nan" not in page.text.lower().split()


def test_hostile_tokens_stay_text(full: RunDir) -> None:
    text = full.report_html.read_text("utf-8")
    assert "<b>&" not in text
    embedded = text.partition('id="canvases">')[2].partition("</script>")[0]
    (problem,) = json.loads(embedded)["problems"]
    assert problem["text"] == HOSTILE
    assert json.loads(embedded)["vocabulary"]["0"] == HOSTILE
    assert [len(side["steps"]) for side in problem["sides"].values()] == [2, 2]


def test_hostile_faults_stay_text(run: RunDir, targets: list[Target]) -> None:
    fault = {"name": "layout", "looked_at": 7, "passed": False, "faults": [HOSTILE]}
    verification = read_json(run.verification_json) | {"passed": False, "checks": [fault]}
    write_json(run.verification_json, verification)
    assert verdict_of(run, targets).reason == f"static verification: {HOSTILE}"
    page = Page(run.report_html.read_text("utf-8"))
    assert page.text.count(HOSTILE) == 2  # the verdict, and the table of checks
    failure = ElementTree.parse(run.junit_xml).getroot().find("testcase/failure")
    assert failure is not None
    assert str(failure.get("message")).split() == HOSTILE.split()


def test_published_figures_stand_in_reports_on_their_model_alone(full: RunDir) -> None:
    """They stood beside the bundled model's, too."""
    content = read_json(full.report_json)
    assert "RedHatAI" not in full.report_html.read_text("utf-8") + markdown(content)
    content["model"] |= {"bundled": False, "model": "google/diffusiongemma-26B-A4B-it"}
    here = next(task for task in content["tasks"] if task["task"] == "gsm8k")
    here |= {"base": 0.94, "base_interval": {"low": 0.93, "high": 0.95}}
    for text in (Page(html(content)).text, markdown(content).replace(" | ", "")):
        assert "94.0 [93.0, 95.0]" in text
        assert text.count("not asked") >= 8
        assert "covered" in text
        assert "1,288 on an H200" in text


def test_published_figures_stand_beside_ours_by_task_and_thinking(full: RunDir) -> None:
    content = read_json(full.report_json)
    content["model"] |= {"bundled": False, "model": "google/diffusiongemma-26B-A4B-it"}
    plain = next(task for task in content["tasks"] if task["task"] == "gsm8k")
    low, high = {"low": 0.89, "high": 0.91}, {"low": 0.93, "high": 0.95}
    plain |= {
        "gated": True,
        "base": 0.9,
        "base_interval": low,
        "quantized": 0.9,
        "quantized_interval": low,
    }
    thinking = plain | {"task": "gsm8k_thinking", "base": 0.94, "base_interval": high}
    content["tasks"] = [plain, thinking]
    rows = published_rows(content)
    nvidia = {
        row[0].removesuffix(", thinking"): row[2:] for row in rows if row[1].startswith("NVIDIA")
    }
    assert {name: tuple(row[:3]) for name, row in nvidia.items()} == {
        "GPQA Diamond": ("69.4", "-", "68.6"), "AIME25": ("68.33", "-", "67.33"),
        "GSM8K": ("94.54", "-", "94.01"), "IFEval": ("94.01", "-", "94.56"),
        "HumanEval": ("94.09", "-", "95.0"), "MMMLU": ("88.5", "-", "88.13"),
        "MMLU-Pro": ("81.0", "-", "80.7"),
    }  # fmt: skip
    ours = ["94.0 [93.0, 95.0]", "90.0 [89.0, 91.0]", "covered"]
    assert nvidia.pop("GSM8K")[3:] == ours
    assert all(row[3] == "not asked" for row in nvidia.values())
    red_hat = {row[0]: row[2:] for row in rows if row[1].startswith("RedHatAI")}
    assert red_hat["GSM8K"] == [
        "94.3", "94.2 (99.9 %)", "94.3 (100.0 %)", *["90.0 [89.0, 91.0]"] * 2, "not covered",
    ]  # fmt: skip
    assert red_hat["GSM8K, thinking"][3:] == [*ours[:2], "not covered"]


def test_what_a_release_manager_reads_first(full: RunDir) -> None:
    content = read_json(full.report_json)
    page = Page(full.report_html.read_text("utf-8")).text
    for text in (page, full.report_md.read_text("utf-8")):
        for said in (
            content["made"]["judged"],
            content["artifact"] or "unknown",
            "Not tested: thinking, ",
        ):
            assert said in text
        assert f"{content['sizes']['ratio']:.1%} of" in text


def test_markdown_has_a_row_for_every_task_and_no_step_counts_of_servers(full: RunDir) -> None:
    text = full.report_md.read_text("utf-8")
    for task in TASKS:
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| {task} ")]
        rows = [row for row in rows if " x " in row[2]]
        assert len(rows) == 2  # against BF16, and the noise floor
        assert [row[9] + row[11][:5] for row in rows] == ["-- / -"] * 2


def test_no_gpqa_text_in_any_artifact(full: RunDir, data: Path) -> None:
    assert MARKER in (data / "gpqa_diamond.csv").read_text()
    files = [p for p in full.path.rglob("*") if p.is_file()]
    files = [p for p in files if full.checkpoint not in p.parents]
    assert {"report.html", "report.json", "junit.xml", "gpqa_diamond.jsonl"} <= {
        p.name for p in files
    }
    assert [p.name for p in files if MARKER.encode() in p.read_bytes()] == []


def test_junit_counts_what_it_holds(full: RunDir) -> None:
    suite = ElementTree.parse(full.junit_xml).getroot()
    cases = suite.findall("testcase")
    names = ["verification: layout", "fidelity", *(f"task {task}" for task in TASKS), "gate"]
    assert [case.get("name") for case in cases] == names
    assert suite.get("tests") == "5"
    content = read_json(full.report_json)
    assert content["verdict"]["outcome"] == "INCONCLUSIVE"
    undecided = [task["outcome"] for task in content["tasks"]].count("INCONCLUSIVE")
    assert suite.get("skipped") == str(undecided + 1)
    assert [len(case.findall("skipped")) for case in cases].count(1) == undecided + 1
    assert cases[-1].find("skipped") is not None
    stages = {"plan": {"seconds": 1.5}, "fidelity": {"seconds": 2.0}}
    timed = ElementTree.fromstring(junit(content | {"stages": stages}))
    assert timed.get("time") == "3.500"
    times = [case.get("time") for case in timed.findall("testcase")]
    assert times == [None, "2.000", *[None] * (len(names) - 2)]


def verdict_of(run: RunDir, targets: list[Target]) -> Verdict:
    verdict = report(run, recipe(), targets)
    assert read_json(run.report_json)["verdict"]["outcome"] == verdict.outcome
    return verdict


def test_the_least_that_a_report_can_be_made_of(run: RunDir, targets: list[Target]) -> None:
    verdict_of(run, targets)
    content = read_json(run.report_json)
    assert (content["fidelity"], content["coverage"], content["canvases"]) == (None, None, None)
    page = Page(run.report_html.read_text("utf-8"))
    assert "play" not in page.ids


def test_a_fidelity_fault_fails_whatever_the_scores(full: RunDir, targets: list[Target]) -> None:
    fidelity = read_json(full.fidelity_json)
    write_json(full.fidelity_json, fidelity | {"faults": ["KL is above its limit"]})
    verdict = verdict_of(full, targets)
    assert (verdict.outcome, verdict.reason) == ("FAIL", "fidelity: KL is above its limit")
    assert ElementTree.parse(full.junit_xml).getroot().get("failures") == "2"


def test_report_and_comparison_say_what_other_experts_cost(full: RunDir) -> None:
    cost = (
        "Of the KL of 0.0100 nats (none), choosing other experts, or other weights for them, adds "
        "0.0030 [0.0010, 0.0050], 30% of it: with BF16's choices it is 0.0070. BF16 itself, made to "
        "take the quantized model's choices, is 0.0020 away."
    )
    hit = "at most 75% of their experts, and 2.6% of the routing weight moved"
    for text in (full.report_md.read_text(), Page(full.report_html.read_text()).text):
        assert cost in text
        assert hit in text
        assert "7.5 and 7.2 at a step, 8.5 and 8.2 in all steps." in text
    facts = compare_runs(full, full).facts
    assert facts["BF16's experts, worst layer, activations none"] == (0.9, 0.9)
    assert facts["KL that choosing otherwise adds, nats, activations none"] == (0.003, 0.003)


def change_rows(run: RunDir, side: str, task: str, **fields: Any) -> None:
    scoring = read_scoring(run.evaluation / side, task)
    rows = [replace(row, **fields) for row in scoring.rows]
    write_scoring(run.evaluation / side, replace(scoring, rows=rows))


def test_a_base_that_scores_nothing_has_no_recovery(run: RunDir, targets: list[Target]) -> None:
    change_rows(run, "bf16", "gsm8k", scores={"strict-match": 0.0})
    change_rows(run, "quantized", "gsm8k", scores={"strict-match": 0.0})
    verdict_of(run, targets)
    entry = next(t for t in read_json(run.report_json)["tasks"] if t["task"] == "gsm8k")
    assert entry["recovery"] is None
    Page(run.report_html.read_text("utf-8"))


def under_other_conditions(run: RunDir) -> None:
    scoring = read_scoring(run.evaluation / "quantized", "gsm8k")
    other = replace(scoring, conditions=scoring.conditions | {"lm_eval": "0.0.0"})
    write_scoring(run.evaluation / "quantized", other)


def test_scores_under_other_conditions_are_not_compared(run: RunDir, targets: list[Target]) -> None:
    under_other_conditions(run)
    verdict = verdict_of(run, targets)
    assert verdict.exit_code == 4
    assert verdict.reason.startswith("gsm8k: lm_eval differ")
    assert verdict.reason in Page(run.report_html.read_text("utf-8")).text
    assert ElementTree.parse(run.junit_xml).getroot().get("errors") == "2"  # its task and the gate


def test_the_job_summary_grows(
    full: RunDir, targets: list[Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    report(full, recipe(), targets)
    assert summary.read_text("utf-8") == "before\n" + full.report_md.read_text("utf-8")


def test_two_runs_are_compared_question_by_question(
    scored: Path, data: Path, tmp_path: Path
) -> None:
    same = compare_runs(RunDir(scored), RunDir(scored))
    assert same.not_comparable is None
    assert sorted(same.tasks) == sorted(TASKS)
    assert all(entry["difference_pp"] == 0 for entry in same.tasks.values())
    assert list(question_tables(same, 20)) == []
    forgetful = RunDir(shutil.copytree(scored, tmp_path / "forgetful", symlinks=True))
    shutil.copytree(
        scored / "evaluation" / "bf16", forgetful.evaluation / "quantized", dirs_exist_ok=True
    )
    found = compare_runs(forgetful, RunDir(scored))
    for task, table in zip(TASKS[::-1], question_tables(found, 3), strict=True):
        entry = found.tasks[task]
        assert str(table.title).endswith(f"; the first 3 of {len(found.questions[task])}")
        outcomes = [each["outcome"] for each in found.questions[task]]
        if task == "gsm8k":
            assert outcomes.count("lost") == entry["lost"] > 0
        names = list(table.columns[0].cells)
        assert all(str(name).startswith("hash ") == (task != "gsm8k") for name in names)
        assert len(names) == 3
    reseeded = make_run(tmp_path / "reseeded", data, seed=7)
    other = compare_runs(RunDir(scored), reseeded)
    assert other.not_comparable is not None
    assert "seed differ: 0 against 7" in other.not_comparable
    write_json(reseeded.evaluation / "done.json", {"tasks": ["gsm8k"]})
    fewer = compare_runs(RunDir(scored), reseeded)
    assert str(fewer.not_comparable).startswith("tasks differ")


def scoring(steps: int) -> Scoring:
    """A scoring of 40 questions, all answered right, whose canvases take `steps` steps."""
    rows = [
        Row(
            doc_id=i, repeat=0, doc_hash=str(i), prompt_hash="p", target="1", answer="1",
            scores={"exact": 1.0}, seed=0, text="1", tokens=60 + i, denoising_steps=[steps + i % 3],
            truncated=False,
        )
        for i in range(40)
    ]  # fmt: skip
    return Scoring("gsm8k", rows, {"sampler": {"max_denoising_steps": 30}}, {"model": "m"})


@pytest.mark.parametrize(
    ("steps", "limit", "outcome"),
    [(21, 0.10, "PASS"), (24, 0.10, "FAIL"), (24, None, "PASS"), (22, 0.0953, "PASS")],
)
def test_a_model_that_takes_too_many_steps_fails_the_gate(
    steps: int, limit: float | None, outcome: str
) -> None:
    entry, comparison = pair(
        scoring(20),
        scoring(steps),
        Terms(estimand="these_questions", margin_pp=10, max_step_inflation=limit),
    )
    assert entry["step_inflation"]["ratio"] == pytest.approx((steps + 0.975) / 20.975, rel=1e-3)
    assert entry["step_inflation"]["never_stopped"] == [0.0, 0.0]
    assert entry["max_step_inflation"] == limit
    assert judge({"gsm8k": comparison}).outcome == outcome


def test_steps_ends_and_loops_stand_there_by_kind_of_prompt() -> None:
    """Each fifth answer of the candidate loops, ends at its limit, and takes more steps."""
    looping = faulty(text="so it is again, " * 9, truncated=True, denoising_steps=[30, 48])
    sides = [
        replace(
            side,
            rows=[replace(row, kind=("prose", "all")[row.doc_id % 2]) for row in side.rows],
            conditions=side.conditions | {"generation": {"max_gen_toks": 8192}},
        )
        for side in (faulty(), looping)
    ]
    entry, comparison = pair(*sides, Terms(estimand="these_questions", margin_pp=10, health_pp={}))
    assert judge({"t": comparison}).reason.startswith("t at 8,192 tokens: 20.0 % of answers are ")
    task = {"task": "t", "gated": True} | entry
    named_all, prose = ends_rows([task])[1:]  # a kind of the user's, beside the row of all answers
    assert (named_all[:3], prose[1]) == (["t at 8,192 tokens", "all", "200 / 200"], "prose")
    assert ends_rows([task])[0] == [
        "t at 8,192 tokens", "all", "400 / 400", "9.00 / 19.00", "9 / 48", "6.67 / 2.63",
        "100.0 / 80.0", "0.0 / 20.0", "0.0 / 0.0",
    ]  # fmt: skip
    one_knows = task | {
        "bf16_counts": counts(sides[0].rows)
    }  # BF16's samples are of an earlier version
    assert [row[1] for row in ends_rows([one_knows])] == ["all"]


def test_canvases_that_took_every_step_are_those_of_the_samplers_limit() -> None:
    entry, _ = pair(scoring(20), scoring(28), Terms(estimand="these_questions", margin_pp=3))
    assert entry["step_inflation"]["never_stopped"] == [0.0, 13 / 40]  # 30 of 28, 29 and 30 steps


@pytest.mark.parametrize("side", [0, 1])
def test_one_answer_without_its_steps_leaves_their_limit_unjudged(side: int) -> None:
    """On either side it let a model pass that took 95 % more."""
    sides = [scoring(20), scoring(39)]
    rows = [replace(sides[side].rows[0], denoising_steps=[]), *sides[side].rows[1:]]
    sides[side] = replace(sides[side], rows=rows)
    entry, comparison = pair(
        *sides,
        Terms(estimand="these_questions", margin_pp=10, max_step_inflation=0.1),
    )
    assert entry["step_inflation"] is None
    assert judge({"gsm8k": comparison}).outcome == "INCONCLUSIVE"


@pytest.mark.parametrize(("limit", "outcome"), [(None, "PASS"), (0.1, "INCONCLUSIVE")])
def test_servers_report_no_steps_to_judge(
    limit: float | None, outcome: str, run: RunDir, targets: list[Target]
) -> None:
    """Without a limit that is said; with one nothing passes, and evaluation would not have begun."""
    change_rows(run, "quantized", "gsm8k", scores={"strict-match": 1.0})
    change_rows(run, "quantized", "gpqa_diamond", scores={"strict-match": 1.0})
    limited = recipe()
    gate = limited.gate.model_copy(
        update={"max_step_inflation": limit, "health_pp": dict.fromkeys(SIGNS)}
    )
    verdict = report(run, limited.model_copy(update={"gate": gate}), targets)
    assert verdict.outcome == outcome
    line = "Denoising steps were not judged: the recipe sets no max_step_inflation."
    limits = "The verdict includes that steps a token rise by at most 10%."
    page = Page(run.report_html.read_text("utf-8"))
    for text in (run.report_md.read_text("utf-8"), page.text):
        assert (line in text, limits in text) == (not limit, bool(limit))


def test_only_the_judged_models_steps_decide(run: RunDir, targets: list[Target]) -> None:
    """Another activation mode may take as many as it likes."""
    limited = recipe()
    gate = limited.gate.model_copy(
        update={"max_step_inflation": 0.1, "health_pp": dict.fromkeys(SIGNS)}
    )
    for task in TASKS:
        for side, steps in {"bf16": 20, "quantized": 20, "quantized-none": 40}.items():
            found = read_scoring(run.evaluation / ("bf16" if side == "bf16" else "quantized"), task)
            rows = [replace(row, scores={"x": 1.0}, denoising_steps=[steps]) for row in found.rows]
            write_scoring(run.evaluation / side, replace(found, rows=rows))
    assert report(run, limited.model_copy(update={"gate": gate}), targets).outcome == "PASS"
    ratios = [task["step_inflation"]["ratio"] for task in read_json(run.report_json)["tasks"]]
    assert ratios == pytest.approx([1, 2, 1, 2])


def test_questions_that_differ_are_those_that_were_counted(full: RunDir) -> None:
    content = read_json(full.report_json)
    found = {entry["task"]: entry for entry in content["tasks"]}
    listed = content["questions"]["gsm8k"]["differ"]
    outcomes = [entry["outcome"] for entry in listed]
    assert found["gsm8k"]["lost"] == outcomes.count("lost") > 0
    assert found["gsm8k"]["won"] == outcomes.count("won") > 0
    rows = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
    page = Page(full.report_html.read_text("utf-8"))
    for entry in listed:
        assert entry["text"].startswith(rows[entry["question"]]["question"])
        right, wrong = ("quantized", "bf16") if entry["outcome"] == "won" else ("bf16", "quantized")
        assert entry[right]["answer"] == entry["target"].split("#### ")[-1]
        assert entry[wrong]["answer"] == "[invalid]"
        assert entry["text"][:40] in page.text
    text = full.report_md.read_text("utf-8")
    assert "## Questions of gsm8k that differ" in text
    assert question_counts(listed) in text


def test_a_private_task_shows_hashes_of_its_questions_and_nothing_else(full: RunDir) -> None:
    """Repeats are counted together: the answers that are right, of each side."""
    found = read_json(full.report_json)["questions"]["gpqa_diamond"]
    assert found["private"]
    assert found["differ"]
    scores = {
        side: read_scoring(full.evaluation / side, "gpqa_diamond").by_question()
        for side in ("bf16", "quantized")
    }
    page = Page(full.report_html.read_text("utf-8")).text
    for entry in found["differ"]:
        name = f"{entry['question']}-{entry['hash']}"
        for side in scores:
            assert entry[side]["right"] == sum(scores[side][name])
            assert entry[side]["answer"] is None
        assert (entry["text"], entry["target"], entry["repeats"]) == (None, None, 2)
        assert f"hash {entry['hash'][:12]}" in page
        assert f"hash {entry['hash'][:12]}" in full.report_md.read_text("utf-8")


def test_an_own_task_that_became_private_shows_nothing_of_an_earlier_run(
    run: RunDir, data: Path
) -> None:
    """Its texts and canvases may still lie in the run folder."""
    requests = leave_questions(run.evaluation, "gsm8k", data / "gsm8k.jsonl")
    models: dict[str, Any] = {"bf16": Recorder(), "quantized": Recorder()}
    record_differing(run.evaluation, "gsm8k", requests, models)
    sides = [read_scoring(run.evaluation / side, "gsm8k") for side in ("bf16", "quantized")]
    open_, canvases = questions_and_canvases(run, {"gsm8k": (sides[0], sides[1])})
    assert canvases
    assert all(entry["text"] and entry["target"] for entry in open_["gsm8k"]["differ"])
    path = run.evaluation / "quantized" / "gsm8k.jsonl"
    scored = path.read_bytes()
    path.write_bytes(scored + b"\n")  # the canvases are of the answers before
    assert questions_and_canvases(run, {"gsm8k": (sides[0], sides[1])})[1] is None
    path.write_bytes(scored)
    closed = [replace(side, conditions=side.conditions | {"private": True}) for side in sides]
    found, canvases = questions_and_canvases(run, {"gsm8k": (closed[0], closed[1])})
    assert canvases is None
    assert found["gsm8k"]["private"]
    for entry in found["gsm8k"]["differ"]:
        assert (entry["text"], entry["target"]) == (None, None)
        assert entry["bf16"]["answer"] is None


def test_canvases_are_recorded_of_questions_that_differ(
    run: RunDir, data: Path, targets: list[Target]
) -> None:
    requests = leave_questions(run.evaluation, "gsm8k", data / "gsm8k.jsonl")
    models: dict[str, Any] = {"bf16": Recorder(), "quantized": Recorder()}
    for _ in range(2):  # what is recorded is not recorded again
        record_differing(run.evaluation, "gsm8k", requests, models)
    verdict_of(run, targets)
    content = read_json(run.report_json)
    differ = content["questions"]["gsm8k"]["differ"]
    wanted = [entry["question"] for entry in differ if entry["outcome"] != "other answer"][
        :RECORDED
    ]
    assert [problem["question"] for problem in content["canvases"]["problems"]] == wanted
    seeds = {row.doc_id: row.seed for row in read_scoring(run.evaluation / "bf16", "gsm8k").rows}
    for model in models.values():
        assert [request.seed for request in model.asked] == [seeds[q] for q in wanted]
        assert [request.prompt for request in model.asked] == [requests[q].prompt for q in wanted]
    lost = content["canvases"]["problems"][0]["sides"]
    assert {lost[side]["answer"]: lost[side]["as_scored"] for side in lost}["[invalid]"]
    assert not all(side["as_scored"] for side in lost.values())
    change_rows(run, "quantized", "gsm8k", scores={"strict-match": 1.0})
    record_differing(run.evaluation, "gsm8k", requests, models)
    assert len(models["quantized"].asked) > len(wanted)  # other scores, recorded again


def test_where_nothing_differs_one_question_is_recorded(run: RunDir, data: Path) -> None:
    shutil.copytree(run.evaluation / "bf16", run.evaluation / "quantized", dirs_exist_ok=True)
    requests = leave_questions(run.evaluation, "gsm8k", data / "gsm8k.jsonl")
    model: Any = Recorder()
    record_differing(run.evaluation, "gsm8k", requests, {"bf16": model})
    assert [request.prompt for request in model.asked] == [requests[0].prompt]


def test_no_question_of_a_private_task_is_left(run: RunDir, data: Path) -> None:
    assert leave_questions(run.evaluation, "gpqa_diamond", data / "gpqa_diamond.csv") == {}
    assert [file.name for file in (run.evaluation / "questions").iterdir()] == ["gsm8k.json"]


@pytest.fixture(scope="module")
def schema() -> Any:
    text = files("quantize.reports").joinpath("report.schema.json").read_text("utf-8")
    return jsonschema_rs.validator_for(json.loads(text))


def faults(schema: Any, content: Any) -> list[str]:
    return [f"{list(e.instance_path)}: {e.message}" for e in schema.iter_errors(content)]


def test_every_report_is_as_its_schema_says(
    run: RunDir, targets: list[Target], schema: Any
) -> None:
    """The least that a report can hold, the most, and one whose scores are not comparable."""
    verdict_of(run, targets)
    assert faults(schema, read_json(run.report_json)) == []
    add_optional_parts(run)
    verdict_of(run, targets)
    content = read_json(run.report_json)
    assert faults(schema, content) == []
    under_other_conditions(run)
    verdict_of(run, targets)
    assert faults(schema, read_json(run.report_json)) == []
    assert faults(schema, content | {"more": 1}) != []
    for key in content:
        assert faults(schema, {k: v for k, v in content.items() if k != key}) != [], key


def test_hours_and_price_of_the_evaluation(run: RunDir, targets: list[Target]) -> None:
    stage = {"seconds": 1800.0, "seconds_in_all": 5400.0, "peak_rss_bytes": 2_000_000_000}
    stage |= {
        "peak_gpu_bytes": 81_900_000_000,
        "gpu": "NVIDIA H200",
        "ended": "2026-01-31T12:00:00",
    }
    manifest = read_json(run.manifest_json) | {"hourly_price": 4.0}
    write_json(run.manifest_json, manifest | {"stages": {"evaluate": stage}})
    verdict_of(run, targets)
    found = read_json(run.report_json)["made"]
    assert found["evaluation"] == {"hours": 1.5, "hourly_price": 4.0, "price": 6.0}
    assert found["tool"] == manifest["tool"]
    write_text(run.recipe_yaml, "name: x\n")
    verdict_of(run, targets)
    digest = hashlib.sha256(b"name: x\n").hexdigest()
    page = Page(run.report_html.read_text("utf-8")).text
    for text in (run.report_md.read_text("utf-8"), page):
        assert "1.50 hours of this machine: 6.00 at 4 an hour" in text
        assert f"sha256 of the resolved recipe: {digest}" in text
        for word in ("1800.0", "5400.0", "2.00 GB", "81.9 GB", "NVIDIA H200"):
            assert word in text


def test_what_was_not_asked_is_said(full: RunDir) -> None:
    """In Markdown, on the page and as a skipped test case."""
    content = read_json(full.report_json)
    looks = {"gsm8k": {"taken": 2, "of": 5}, "gpqa_diamond": {"taken": 5, "of": 5}}
    content |= {"looks": looks, "not_asked": ["aime25"]}
    content["verdict"] |= {"outcome": "PASS"}
    for text in (markdown(content), Page(html(content)).text):
        assert "gsm8k: the verdict was certain after look 2 of 5; the rest was not asked." in text
        assert "Its intervals are of what was asked, not widened for the looks." in text
        assert "aime25: not asked; the run's verdict was certain before." in text
        assert "gpqa_diamond: the verdict was certain" not in text
        assert "given up" not in text
    content["verdict"] |= {"outcome": "INCONCLUSIVE"}
    content["tasks"] = [task | {"outcome": "INCONCLUSIVE"} for task in content["tasks"]]
    told = "the chance that the rest, which `--all` asks, would decide the verdict was below 2%."
    assert f"gsm8k: given up after look 2 of 5: {told} Its intervals" in markdown(content)
    assert "aime25: not asked; the run's budget was spent before." in markdown(content)
    content["looks"]["gsm8k"]["budget"] = 40_000_000
    told = "gsm8k: ended after look 2 of 5: the budget of 40,000,000 tokens was spent. Its"
    assert told in markdown(content)
    case = ElementTree.fromstring(junit(content)).find("testcase[@name='task aime25']/skipped")
    assert case is not None
