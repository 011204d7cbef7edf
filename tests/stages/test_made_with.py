"""Scores are reused and compared only where everything that can change an answer is the same."""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.host.files import read_json, write_json
from quantize.host.locks import locked
from quantize.host.processes import ALONE
from quantize.recipe import controls
from quantize.recipe.sections import Evaluation, Gate, OperatingPoint
from quantize.recovery.rows import Scoring
from quantize.recovery.samples import Completion, Finished, Waiting
from quantize.recovery.terms import Terms
from quantize.reports.scores import pair, read_scoring, write_scoring
from quantize.runs.folder import RunDir
from quantize.runs.manifest import fingerprint, tokenizer_digest
from quantize.runtime import Sampler
from quantize.runtime.gpu.placement import Placement
from quantize.stages.evaluate import answers, compared_models, evaluate
from quantize.stages.evaluate import local_model as answerer
from quantize.stages.evaluate.answers import Answers
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.evaluate.tasks import open_tasks
from tests.support.quick_run import TASK, rows

SAMPLER = Sampler.from_checkpoint(CHECKPOINT)
GATE: dict[str, Any] = {"estimand": "these_questions", "margin_pp": 30, "confidence": 0.95}
JUDGED = Gate(estimand="these_questions", margin_pp={TASK: 30})
SETTINGS = Evaluation(tasks=[TASK], limit={TASK: 3}, batch_size=2)


def made(folder: Path = CHECKPOINT, **changes: Any) -> dict[str, Any]:
    place = Placement(activations=changes.pop("activations", "none"))
    arguments = {"digest": "a", "sampler": SAMPLER, "place": place}
    return Answerer(folder, **arguments | changes).made_with


def test_everything_that_can_change_an_answer_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = made()
    other = tmp_path / "other"
    shutil.copytree(CHECKPOINT, other)
    template = (CHECKPOINT / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template + " ")
    keys = {
        "model": made(digest="b"),
        "sampler": made(sampler=dataclasses.replace(SAMPLER, max_denoising_steps=3)),
        "tokenizer": made(other),
    }
    with monkeypatch.context() as patch:  # a table of the user's own
        patch.setattr(answerer, "launches_digest", lambda _: "another")
        keys["launches"] = made()
    assert made(activations="per_layer")["model"] != usual["model"]
    for package in ("diffusiongemma-quantize", "torch", "transformers", "compressed-tensors"):
        versions = dict(usual["versions"])
        assert versions.pop(package)
        monkeypatch.setattr(answerer, "package_versions", lambda found=versions: found)
        assert made()["versions"] != usual["versions"]
        monkeypatch.undo()
    for key, changed in keys.items():
        assert changed[key] != usual[key], key
    assert tokenizer_digest(other) != tokenizer_digest(CHECKPOINT)


class Counting(Answerer):
    """Answers nothing, and counts what it was asked."""

    asked = 0

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        for request in requests:
            Counting.asked += 1
            yield request, Completion("#### 1", 1, [1], False)

    def record(self, requests: object) -> dict[str, Any]:
        return {"vocabulary": {}, "samples": []}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Score the bundled model against itself; return how many samples that took."""
    for module in (answers, compared_models, evaluate):
        monkeypatch.setattr(module, "Answerer", Counting)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.checkpoint.symlink_to(CHECKPOINT)

    def score(**changes: Any) -> int:
        Counting.asked = 0
        settings = SETTINGS.model_copy(update=changes)
        evaluate.evaluate(run, CHECKPOINT, "source", settings, gate=JUDGED)
        return Counting.asked

    score.run = run  # type: ignore[attr-defined]
    return score


def test_what_was_scored_with_other_settings_is_scored_again(asked: Any) -> None:
    assert asked() == 6
    assert asked() == 0
    assert asked(seed=1) == 6
    assert asked(seed=1) == 0
    done = asked.run.evaluation / "quantized" / f"{TASK}.conditions.json"
    conditions = read_json(done)
    conditions["made_with"]["model"]["weights"] = "another"
    write_json(done, conditions)
    assert asked(seed=1) == 3


def test_a_new_setting_of_the_sampler_asks_again_only_where_it_is_used(
    asked: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores from before there was such a field, and BF16's store of samples, stay valid."""

    @dataclasses.dataclass(frozen=True)
    class Later(Sampler):
        top_k: int = 0

    assert asked() == 6
    monkeypatch.setattr(compared_models, "Sampler", Later)
    assert asked() == 0
    shutil.rmtree(asked.run.evaluation)
    assert asked() == 3  # the candidate's alone
    assert "asked again" not in capsys.readouterr().err
    used = dataclasses.replace(Later.from_checkpoint(CHECKPOINT), top_k=5)
    monkeypatch.setattr(Later, "from_checkpoint", lambda _: used)
    assert asked() == 6
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("scored with sampler.top_k None, now 5, so it is asked again") == 2


def with_settings(folder: Path, **settings: Any) -> Path:
    """Return a copy of the bundled model with other generation settings."""
    shutil.copytree(CHECKPOINT, folder)
    path = folder / "generation_config.json"
    write_json(path, read_json(path) | settings)
    return folder


@pytest.mark.parametrize("as_served", [False, True])
def test_a_checkpoint_built_elsewhere_answers_as_a_server_of_it_would(
    as_served: bool, tmp_path: Path
) -> None:
    theirs = with_settings(tmp_path / "theirs", max_denoising_steps=1, t_max=5.0)
    points = {"t2": OperatingPoint(max_denoising_steps=2)}
    options = compared_models.ModelOptions(
        points=points, as_served=as_served, modes=["none"], noise_floor=True
    )
    settings = SETTINGS.model_copy(update={"activations": "none"})
    models = {
        model.name: model
        for model in compared_models.open_models(CHECKPOINT, "bf16", theirs, settings, options, 64)
    }
    samplers = {name: model.backend.made_with["sampler"] for name, model in models.items()}
    own = {name: (s["max_denoising_steps"], s["t_max"]) for name, s in samplers.items()}
    assert own == {
        "bf16": (48, 0.8),
        "bf16-again": (48, 0.8),
        "quantized": (1, 5.0) if as_served else (48, 0.8),
        "quantized-at-t2": (2, 5.0) if as_served else (2, 0.8),
    }
    free = {name: set(model.free) for name, model in models.items()}
    everything = set(controls.SETTINGS)
    assert free == {
        "bf16": set(),
        "bf16-again": set(),
        "quantized": everything if as_served else set(),
        "quantized-at-t2": everything if as_served else controls.JUDGED,
    }
    artifact = Checkpoint.open(theirs)
    weights = fingerprint(artifact) if as_served else fingerprint(artifact, settings_of=CHECKPOINT)
    assert models["quantized"].backend.made_with["model"]["weights"] == weights


@pytest.mark.parametrize(("free", "is_compared"), [((), False), (controls.JUDGED, True)])
def test_only_where_settings_may_differ_are_they_compared(
    free: Any, is_compared: bool, asked: Any
) -> None:
    """The candidate's answers at other settings than BF16's say nothing; a point's do."""
    asked()
    other = dataclasses.replace(SAMPLER, max_denoising_steps=3)
    (task,) = open_tasks(SETTINGS, JUDGED, None)
    found = Answers(asked.run, ALONE, answers.AnswerRates())
    backends = [
        Counting(CHECKPOINT, digest, sampler, Placement(activations="none"), 2)
        for digest, sampler in (("a", SAMPLER), ("b", other))
    ]
    models = [
        compared_models.ComparedModel("bf16", backends[0], 0),
        compared_models.ComparedModel("quantized", backends[1], 0, free),
    ]
    found.ask(models, {task: 1})
    _, comparison = found.compared(models, task, JUDGED)
    assert (comparison is not None) == is_compared


@pytest.mark.parametrize("side", ["bf16", "quantized"])
def test_scores_that_were_changed_are_made_again(side: str, asked: Any) -> None:
    """Rows or conditions, one byte of either: BF16's answers come from the store of its samples."""
    asked()
    again = {"bf16": 0, "quantized": 3}[side]
    for name, old, new in (
        (f"{TASK}.jsonl", '"final_number": 0.0', '"final_number": 1.0'),
        (f"{TASK}.conditions.json", '"repeats": 1', '"repeats": 2'),
    ):
        path = asked.run.evaluation / side / name
        before = path.read_text("utf-8")
        assert old in before
        path.write_text(before.replace(old, new, 1), "utf-8")
        assert asked() == again
        assert path.read_text("utf-8") == before


def test_an_answer_with_any_end_of_a_line_is_read_back(tmp_path: Path) -> None:
    """Only a line feed ends a row: Python's splitlines also knows U+2028, U+0085, a form feed ..."""
    text = "one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven\r\neight\n"
    row = dataclasses.replace(rows([1.0])[0], text=text)
    scoring = Scoring(TASK, [row], {"task": TASK}, {"model": "any"})
    write_scoring(tmp_path, scoring)
    assert read_scoring(tmp_path, TASK) == scoring


def test_the_noise_floor_has_noise_of_its_own(asked: Any) -> None:
    more = {"options": compared_models.ModelOptions(noise_floor=True)}
    evaluate.evaluate(asked.run, CHECKPOINT, "source", SETTINGS, gate=JUDGED, **more)
    seeds = [
        {row.seed for row in read_scoring(asked.run.evaluation / side, TASK).rows}
        for side in ("bf16", "quantized", "bf16-again")
    ]
    assert seeds[0] == seeds[1]
    assert not seeds[0] & seeds[2]


def test_the_second_process_on_a_store_is_refused(asked: Any) -> None:
    """The store of BF16's samples is shared by runs; whoever opens it may cut off a torn line."""
    assert asked() == 6
    (store,) = (asked.run.path.parent / ".bf16").glob("*.jsonl")
    shutil.rmtree(asked.run.evaluation)
    with (
        locked(store.with_name(f".{store.stem}.lock"), "held"),
        pytest.raises(ResourceError, match=r"\.bf16.*process \d+ is at work") as error,
    ):
        asked()
    assert error.value.exit_code == 3


@pytest.mark.parametrize("key", ["dtype", "sampler", "tokenizer", "device", "threads", "versions"])
def test_sides_made_differently_are_not_comparable(key: str) -> None:
    def scoring(**changes: Any) -> Scoring:
        with_ = json.loads(json.dumps(made())) | {"model": "any"} | changes
        conditions = {"task": TASK, "sampler": {"max_denoising_steps": 48}}
        return Scoring(TASK, rows([1.0] * 4), conditions, with_)

    entry, _ = pair(scoring(), scoring(model="other"), Terms(**GATE))
    assert entry["not_comparable"] is None
    entry, comparison = pair(scoring(), scoring(**{key: "x"}), Terms(**GATE))
    assert key in entry["not_comparable"]
    assert comparison is None


@pytest.mark.parametrize(
    ("about", "revision", "fault"),
    [
        ({"fingerprint": "right"}, None, None),
        ({}, "v1.2", None),
        ({}, None, "does not say which weights"),
        ({"fingerprint": "wrong"}, None, "serves other weights"),
        ({"fingerprint": "wrong"}, "v1.2", "serves other weights"),
    ],
)
def test_a_served_model_says_what_it_is(
    about: dict[str, str], revision: str | None, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listed:
        def __init__(self, urls: Sequence[str], **_: Any) -> None:
            self.all = [SimpleNamespace(url=url, model="m", about=about) for url in urls]

    monkeypatch.setattr(compared_models, "Servers", Listed)
    if fault:
        with pytest.raises(InputError, match=fault):
            compared_models.ServedModel(["http://x"], 1, "right", revision)
        return
    model = compared_models.ServedModel(["http://x"], 1, "right", revision).made_with["model"]
    assert (model["weights"], model["revision"]) == (about.get("fingerprint"), revision)


def test_servers_of_one_side_serve_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listed:
        def __init__(self, urls: Sequence[str], **_: Any) -> None:
            modes = {"http://b": "none"}
            self.all = [
                SimpleNamespace(
                    url=url,
                    model="m",
                    about={"fingerprint": "right", "activations": modes.get(url, "per_layer")},
                )
                for url in urls
            ]

    monkeypatch.setattr(compared_models, "Servers", Listed)
    alike = compared_models.ServedModel(["http://a", "http://c"], 1, "right", None)
    assert alike.made_with == compared_models.ServedModel(["http://c"], 1, "right", None).made_with
    with pytest.raises(
        InputError, match="http://b: its activations is 'none', and that of http://a"
    ):
        compared_models.ServedModel(["http://a", "http://b"], 1, "right", None)
