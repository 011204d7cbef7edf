"""From scored samples to report.json and what is rendered from it: complete, valid, self-contained.

The samples come from scripted servers, on GSM8K and on a mock GPQA file whose every text holds a
marker; a recorded canvas with hostile tokens stands in for the viewer's data.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from recovery.gate import Verdict
from recovery.samples import Batch, Completion, Finished
from recovery.scoring import Row, Scoring

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, plan_targets
from quantize.manifest import fingerprint, new_manifest
from quantize.recipe import Evaluation, Recipe, parse_recipe, shipped_recipes
from quantize.reports.compare import compare_runs
from quantize.reports.scores import pair, read_scoring
from quantize.run_dir import RunDir, read_json, write_json
from quantize.stages import evaluate
from quantize.stages.report import _with_steps, report

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
MARKER = "MARKERSTRING"
TASKS = ("gsm8k", "gpqa_diamond")
HOSTILE = "</script><b>&\n"
VOID = {"meta", "link", "input", "br"}


class Scripted:
    """A served model that knows every answer; the quantized one forgets some."""

    one_by_one = True

    def __init__(self, url: str, in_flight: int, digest: str, revision: str | None) -> None:
        self.server = SimpleNamespace(url=url, commit_pass="scripted")
        self.sampler_settings = {"sampler": "scripted"}
        self.forgets = url == "quantized"
        self.made_with = {"model": {"served": url, "weights": None, "revision": "v1"}}
        rows = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
        self.truth = {row["question"]: row["answer"].split("#### ")[1] for row in rows}

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Finished]:
        for batch in batches:
            for request in batch:
                forgotten = request.seed % (4 if self.forgets else 9) == 0
                text = "?" if forgotten else self.answer(request.prompt)
                yield [request], [Completion(text, 5, [], False)]

    def release(self) -> None:
        """Hold nothing."""

    def answer(self, prompt: str) -> str:
        if MARKER not in prompt:
            return f"#### {self.truth[prompt.partition(chr(10) * 2 + 'Think step')[0]]}"
        right = next(line for line in prompt.splitlines() if line.endswith(".0"))
        return f"{MARKER} it is. The answer is {right[:3]}"


def mock_data(folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(GSM8K, folder / "gsm8k.jsonl")
    with (folder / "gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["Question", "Correct Answer"] + [f"Incorrect Answer {i}" for i in (1, 2, 3)]
        )
        for i in range(12):
            writer.writerow([f"{MARKER}q{i}", *(f"{MARKER}o{i}.{j}" for j in range(4))])
    return folder


def recipe() -> Recipe:
    fields = yaml.safe_load(shipped_recipes()["nvfp4"])
    fields["evaluation"] = {"tasks": list(TASKS), "repeats": {"gpqa_diamond": 2}}
    fields["gate"] = {
        "estimand": "these_questions",
        "margin_pp": dict.fromkeys(TASKS, 20),
        "max_kl_nats": {"none": 0.02},
    }
    return parse_recipe(yaml.safe_dump(fields), "test")


def make_run(folder: Path, data: Path, *, seed: int = 0) -> RunDir:
    """A run folder as the stages before the report leave it."""
    run, source = RunDir(folder), Checkpoint.open(CHECKPOINT)
    folder.mkdir()
    run.checkpoint.symlink_to(CHECKPOINT)
    write_json(run.manifest_json, new_manifest(source, fingerprint(source), "nvfp4", None))
    experts = {f"model.decoder.layers.{i}.experts.down_proj": 0.095 for i in range(6)}
    checks = [{"name": "layout", "looked_at": 7, "passed": True, "faults": []}]
    write_json(run.verification_json, {"passed": True, "checks": checks, "relative_error": experts})
    settings = Evaluation(**recipe().evaluation.model_dump() | {"seed": seed})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "ServedModel", Scripted)
        evaluate.evaluate(
            run,
            CHECKPOINT,
            "digest",
            settings,
            noise_floor=True,
            data_dir=data,
            server="quantized",
            base_server="bf16",
        )
    return run


def add_optional_parts(run: RunDir) -> None:
    """What only some runs have: coverage, fidelity, recorded canvases."""
    run.calibration.mkdir()
    coverage = {"tokens_per_expert": {"0": [3, 0], "1": [500, 9]}, "min_tokens_per_expert": 4}
    write_json(run.calibration / "coverage.json", coverage | {"fallbacks": ["layers.0.experts.1"]})
    value = {"mean": 0.01, "interval": [0.0, 0.02]}
    names = ("kl_nats", "top1_agreement", "acceptance_jaccard", "commit_agreement")
    step = {"step": 1, "canvases": 2, "kl_nats": 0.1, "top1_agreement": 1.0}
    bin_ = {"nats_from": 0.0, "positions": 9, "kl_nats": 0.1, "top1_agreement": 1.0}
    replay = dict.fromkeys(names, value) | {"routing_overlap": [1.0, 0.9]}
    replay |= {"by_step": [step], "by_entropy": [bin_]}
    own = replay | {"activations": "none"}
    write_json(
        run.fidelity_json,
        {
            "trajectories": 1,
            "max_kl_nats": {"none": 0.02},
            "faults": [],
            "activations": {"none": replay},
            "own_conditioning": own,
        },
    )
    for side, second in (("bf16", "1 1"), ("quantized", "0 1")):
        steps = [
            {"canvas": 0, "ids": "0 0", "accepted": "01"},
            {"canvas": 0, "ids": second, "accepted": "11"},
        ]
        recorded = {
            "vocabulary": {"0": HOSTILE, "1": "b"},
            "samples": [{"prompt": HOSTILE, "steps": steps}],
        }
        write_json(run.evaluation / side / "gsm8k.canvases.json", recorded)


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
    entry, comparison = pair(base, base, other_seed=True, **judged)
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
    assert problem["question"] == HOSTILE
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


def test_markdown_has_a_row_for_every_task_and_no_step_counts_of_servers(full: RunDir) -> None:
    text = full.report_md.read_text("utf-8")
    for task in TASKS:
        rows = [line for line in text.splitlines() if line.startswith(f"| {task} |")]
        assert len(rows) == 2  # against BF16, and the noise floor
        assert all(row.endswith("| - / - |") for row in rows)


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
    assert [case.get("name") for case in cases] == ["verification: layout", "fidelity", "gate"]
    assert suite.get("tests") == "3"
    outcome = read_json(full.report_json)["verdict"]["outcome"]
    assert outcome == "INCONCLUSIVE"
    assert suite.get("skipped") == "1"
    assert cases[2].find("skipped") is not None


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


def change_rows(run: RunDir, side: str, task: str, **fields: Any) -> None:
    path = run.evaluation / side / f"{task}.jsonl"
    rows = [json.loads(line) | fields for line in path.read_text("utf-8").splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_base_that_scores_nothing_has_no_recovery(run: RunDir, targets: list[Target]) -> None:
    change_rows(run, "bf16", "gsm8k", scores={"strict-match": 0.0})
    change_rows(run, "quantized", "gsm8k", scores={"strict-match": 0.0})
    verdict_of(run, targets)
    entry = next(t for t in read_json(run.report_json)["tasks"] if t["task"] == "gsm8k")
    assert entry["recovery"] is None
    Page(run.report_html.read_text("utf-8"))


def test_scores_under_other_conditions_are_not_compared(run: RunDir, targets: list[Target]) -> None:
    path = run.evaluation / "quantized" / "gsm8k.conditions.json"
    conditions = read_json(path)
    conditions["compared"]["lm_eval"] = "0.0.0"
    write_json(path, conditions)
    verdict = verdict_of(run, targets)
    assert verdict.exit_code == 4
    assert verdict.reason.startswith("gsm8k: lm_eval differ")
    assert verdict.reason in Page(run.report_html.read_text("utf-8")).text
    assert ElementTree.parse(run.junit_xml).getroot().get("errors") == "1"


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
    entry, _ = pair(
        scoring(20), scoring(steps), estimand="these_questions", margin_pp=3, confidence=0.95
    )
    found = entry["step_inflation"]
    assert found["ratio"] == pytest.approx((steps + 0.975) / 20.975, rel=1e-3)
    assert found["never_stopped"] == (0.0, 0.0)
    tasks = [{"task": "gsm8k", "gated": True, **entry}]
    verdict = _with_steps(Verdict("PASS", "as good"), tasks, limit)
    assert verdict.outcome == outcome
    assert ("denoising steps a token" in verdict.reason) == (outcome != "PASS")
    failed = Verdict("INCONCLUSIVE", "open")
    assert _with_steps(failed, tasks, limit).outcome == (
        "FAIL" if outcome == "FAIL" else "INCONCLUSIVE"
    )
