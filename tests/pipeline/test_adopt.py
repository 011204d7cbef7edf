"""A point's settings in generation_config.json: verified, reported, published only if they passed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantize.checkpoints.reader import GENERATION, Checkpoint
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.hub.release import _check_artifact, _check_rows, _listed_files
from quantize.pipeline.adopt import _write
from quantize.pipeline.run import opened
from quantize.recipe.sections import Recipe
from quantize.reports.headline import chosen_point
from quantize.reports.provenance import without_places
from quantize.reports.scores import read_scoring, write_scoring
from quantize.runs.manifest import checksums, fingerprint
from quantize.runtime import Sampler
from tests.support.finished_run import bless
from tests.support.quick_run import TASK, Done, Quick, made_up_ranges


@pytest.fixture(scope="module")
def with_points(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny model with two operating points, which pass."""
    folder = tmp_path_factory.mktemp("points")
    with pytest.MonkeyPatch.context() as patch:
        quantize = Quick(folder, tiny_checkpoint, patch)
        assert quantize.run().code == 0
        assert quantize("evaluate", quantize.folder.path, "--steps", 20, "--steps", 10).code == 0
        assert quantize("report", quantize.folder.path).code == 0
    return folder


@pytest.fixture
def quick(with_points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quick:
    """A copy of that run, of the same model."""
    return Quick(tmp_path, with_points, monkeypatch, copy=True)


def test_a_point_that_passes_is_served_verified_and_published(quick: Quick) -> None:
    run, before = quick.folder, fingerprint(Checkpoint.open(quick.folder.checkpoint))
    done = quick("adopt", run.path, "t10")
    assert (done.code, done.redone()) == (0, ["verify", "report"])
    said = " ".join(done.err.split())
    assert "has the settings of operating point t10 now; the weights are as they were." in said
    assert said.index("adopt: generation_config.json in ") < said.index("verify: ")
    for read in (done, quick("verify", run.path)):  # convert's checks are of these weights still
        assert (read.code, "of another checkpoint" in read.err) == (0, False)
    assert "p is corrected over all points (Holm)" in run.report_md.read_text()
    assert Sampler.from_checkpoint(run.checkpoint).max_denoising_steps == 10
    report = read_json(run.report_json)
    assert report["served_at"] == "t10"
    assert report["verdict"]["outcome"] == "PASS"
    assert "has the settings of t10" in chosen_point(report)
    artifact = Checkpoint.open(run.checkpoint)
    assert fingerprint(artifact) == report["artifact"] != before
    assert fingerprint(artifact, settings_of=quick.model) == before  # what the scores name
    _check_artifact(run)
    assert "generation_config.json" in {file.path for file in _listed_files(run)}
    assert quick.run("--resume").redone() == []
    assert quick("adopt", run.path, "--own").code == 0
    assert fingerprint(Checkpoint.open(run.checkpoint)) == before
    assert read_json(run.report_json)["served_at"] is None


def test_settings_that_nobody_judged_fail(quick: Quick) -> None:
    """All digests agree, as if convert had written them."""
    settings = {"max_denoising_steps": 5, "entropy_bound": 0.1}
    with opened(quick.folder.path) as run:
        _write(run, settings)
    done = quick.run("--resume")
    assert (done.code, done.redone()) == (1, ["verify", "report"])
    assert "max_denoising_steps is 5, and the answers were judged at 48" in done.last


def test_a_model_without_settings_of_its_own_has_none_again(quick: Quick, tmp_path: Path) -> None:
    with opened(quick.folder.path) as run:
        bare = replace(run, source=replace(run.source, folder=tmp_path))
        for settings in ({"max_denoising_steps": 5, "entropy_bound": 0.1}, {}, {}):
            _write(bare, settings)
            assert (run.folder.checkpoint / GENERATION).exists() == bool(settings)
            files = read_json(run.folder.conversion_json)["files"]
            assert (GENERATION in files) == bool(settings)


def test_another_file_beside_new_settings_is_not_verified(quick: Quick) -> None:
    """Only what differs in generation settings keeps the name under which it was scored."""
    run = quick.folder
    assert quick("adopt", run.path, "t10").code == 0
    shard = run.checkpoint / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    verification = read_json(run.verification_json)
    artifact = Checkpoint.open(run.checkpoint)
    about = {"artifact": fingerprint(artifact), "sha256": checksums(artifact)}
    about["scored_as"] = fingerprint(artifact, settings_of=quick.model)
    write_json(run.verification_json, verification | about)
    with pytest.raises(InputError, match="another checkpoint was scored"):
        _check_artifact(run)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("t7",), 2, "no operating point 't7' was judged; there are: t10, t20"),
        (("t10", "--own"), 2, "name a point, or --own, not both"),
        (("none",), 2, "no operating points were judged; `quantize evaluate"),
        (("t10", "lost"), 1, "operating point t10 does not pass"),
        (("lost",), 1, "no operating point passes"),
        (("t10", "mode"), 2, "operating point t10 rounds activations fp8"),
    ],
)
def test_what_cannot_be_adopted_is_said_in_one_line(
    quick: Quick, words: tuple[str, ...], code: int, says: str
) -> None:
    path = quick.folder.report_json
    report = read_json(path)
    change = {"lost": {"passes": False}, "mode": {"activations": "fp8"}}.get(words[-1], {})
    points = [point | change for point in report["operating_points"]]
    write_json(path, report | {"operating_points": [] if words == ("none",) else points})
    quick.monkeypatch.setattr("quantize.pipeline.adopt.check_fresh", lambda *_: None)
    done = quick("adopt", quick.folder.path, *(words[:-1] if change else words))
    assert done.code == code
    assert says in done.last


def test_a_point_is_adopted_by_rows_of_its_own(quick: Quick) -> None:
    """Another point's rows, and those of a mode that is not judged, say nothing about it."""
    path = quick.folder.report_json
    report = read_json(path)
    rows = {row["activations"]: row for row in report["tasks"]}
    rows["at t20"]["made_with"]["model"]["weights"] = "ab" * 32
    made_with = rows["at t10"]["made_with"]
    mode = made_with | {"model": made_with["model"] | {"activations": "fp8"}}
    first = rows["at t10"] | {"activations": "fp8", "gated": False, "made_with": mode}
    write_json(path, report | {"tasks": [first, *report["tasks"]]})
    quick.monkeypatch.setattr("quantize.pipeline.adopt.check_fresh", lambda *_: None)
    quick.monkeypatch.setattr("quantize.pipeline.adopt.advance", lambda _: 0)
    refused = quick("adopt", quick.folder.path, "t20")
    assert (refused.code, "t20: scored on other weights" in refused.last) == (2, True)
    assert quick("adopt", quick.folder.path, "t10").code == 0


def wider_ranges(source: Path, recipe: Recipe, out: Path, *more: Any, **named: Any) -> None:
    """Stand in for a calibration that found other ranges."""
    made_up_ranges(source, recipe, out, *more, **named)
    scales = load_file(out / "input_scales.safetensors")
    save_file({name: scale / 2 for name, scale in scales.items()}, out / "input_scales.safetensors")


def with_other_weights(quick: Quick) -> Done:
    """Calibrate otherwise, and let the run go on: the points' scores stay from before."""
    quick.monkeypatch.setattr("quantize.stages.calibrate.calibrate.calibrate", wider_ranges)
    assert quick("calibrate", quick.folder.path).code == 0
    done = quick.run("--resume")
    assert (done.code, done.redone()) == (
        0, ["convert", "verify", "fidelity", "evaluate", "report"],
    )  # fmt: skip
    return done


def test_points_scored_on_other_weights_are_not_read_adopted_or_published(quick: Quick) -> None:
    run, mixed = quick.folder, read_json(quick.folder.report_json)
    done = with_other_weights(quick)
    kept = run.evaluation / "quantized-at-t10" / f"{TASK}.jsonl"
    assert kept.exists()
    report = read_json(run.report_json)
    assert report["operating_points"] == []
    assert {task["activations"] for task in report["tasks"]} == {"per_layer"}
    said = f"evaluation/quantized-at-t10/{TASK}.jsonl is not read: scored on other weights"
    assert [sentence.startswith(said) for sentence in report["not_read"]] == [True, False]
    assert said in done.err
    assert said in run.report_md.read_text()
    assert quick("adopt", run.path, "t10").code == 2
    # As an earlier version left it: a report of both.
    stale = {key: mixed[key] for key in ("operating_points", "tasks")}
    write_json(run.report_json, report | stale)
    bless(run)
    refused = quick("adopt", run.path, "t10")
    assert (refused.code, "t10: scored on other weights" in refused.last) == (2, True)
    with pytest.raises(InputError, match=r"report.json: .* scored on other weights"):
        _check_rows(run)
    # Asked again, it is of these weights.
    assert quick("evaluate", run.path, "--steps", 10).code == 0
    assert quick("report", run.path).code == 0
    (point,) = read_json(run.report_json)["operating_points"]
    assert point["name"] == "t10"
    assert quick("adopt", run.path, "t10").code == 0


@pytest.mark.parametrize("model", ["bf16", "quantized"])
def test_a_report_of_scores_on_other_weights_is_refused(model: str, quick: Quick) -> None:
    """Scores that a stage left although every digest agrees."""
    run = quick.folder
    scoring = read_scoring(run.evaluation / model, TASK)
    made_with = scoring.made_with | {"model": {"weights": "ab" * 32, "activations": "none"}}
    write_scoring(run.evaluation / model, replace(scoring, made_with=made_with))
    bless(run)
    refused = quick("report", run.path)
    assert refused.code == 2
    assert f"evaluation/{model}/{TASK}.jsonl is not read: scored on other weights" in refused.last
    assert f"`quantize evaluate {run.path}` scores it again" in refused.last


def test_runs_are_not_compared_by_scores_of_weights_that_they_had(quick: Quick) -> None:
    run = quick.folder
    quick.monkeypatch.setattr("quantize.stages.calibrate.calibrate.calibrate", wider_ranges)
    assert quick("compare", run.path, run.path).code == 0
    for stage in ("calibrate", "convert", "verify"):
        assert quick(stage, run.path).code == 0
    fidelity_again = f"`quantize fidelity {run.path}` makes it again"
    refused = quick("compare", run.path, run.path)
    assert refused.code == 2
    assert f"fidelity is stale, calibrate changed since; {fidelity_again}" in refused.last
    assert quick("fidelity", run.path).code == 0
    refused = quick("compare", run.path, run.path)
    assert refused.code == 2
    assert "evaluate is stale, convert changed since" in refused.last
    run.stages_json.unlink()
    refused = quick("compare", run.path, run.path)
    assert refused.code == 2
    assert f"{TASK}: scored on other weights" in refused.last
    run.verification_json.unlink()  # nothing says which weights the run has
    assert quick("compare", run.path, run.path).code == 0


def test_a_noise_floor_of_another_bf16_model_is_not_read(quick: Quick) -> None:
    run = quick.folder
    assert quick("evaluate", run.path, "--noise-floor").code == 0
    assert quick("report", run.path).code == 0
    assert len(read_json(run.report_json)["noise_floor"]) == 1
    assert quick.run("--resume", "--noise-floor").redone() == []
    scoring = read_scoring(run.evaluation / "bf16-again", TASK)
    made_with = scoring.made_with | {"model": {"weights": "ab" * 32, "activations": "none"}}
    write_scoring(run.evaluation / "bf16-again", replace(scoring, made_with=made_with))
    bless(run)
    assert quick("report", run.path).code == 0
    report = read_json(run.report_json)
    assert report["noise_floor"] == []
    assert "bf16-again" in report["not_read"][0]
    assert "not read" in run.report_html.read_text()
    again = quick.run("--resume", "--noise-floor")
    assert "evaluate: the noise floor is not scored" in again.err
    assert len(read_json(run.report_json)["noise_floor"]) == 1


def test_a_checkpoint_that_changed_is_not_adopted(quick: Quick) -> None:
    """Nothing is written before every result is known to be up to date."""
    run = quick.folder
    before = (run.checkpoint / GENERATION).read_bytes()
    shard = run.checkpoint / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    refused = quick("adopt", run.path, "t10")
    assert refused.code == 2
    assert "convert is stale, checkpoint or conversion.json changed" in refused.last
    assert (run.checkpoint / GENERATION).read_bytes() == before


def test_a_point_that_is_not_faster_is_not_recommended(quick: Quick) -> None:
    """Both points answered with as many tokens a forward as the model's own settings."""
    report = read_json(quick.folder.report_json)
    assert [point["passes"] for point in report["operating_points"]] == [True, True]
    assert chosen_point(report).startswith("None of 2 operating points that passes is faster")
    done = quick("adopt", quick.folder.path)
    assert (done.code, "no operating point passes and is faster" in done.last) == (1, True)
    report["operating_points"][1]["tokens_per_forward"] += 1
    assert "Fastest of 2 operating points" in chosen_point(report)


def test_the_cards_commands_serve_the_adopted_steps(quick: Quick) -> None:
    run = quick.folder
    (quick.model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for point, stated in (("t10", 10), ("--own", None)):
        assert quick("adopt", run.path, point).code == 0
        assert quick("card", run.path).code == 0
        text = (run.checkpoint / "README.md").read_text()
        configs = re.findall(r"--diffusion-config '(\{.*?\})'", text)
        assert len(configs) == 2  # vLLM's command, and docker's
        assert [json.loads(each).get("max_denoising_steps") for each in configs] == [stated] * 2
        judged = (
            "`quantize evaluate RUN --steps 10`, `quantize report RUN`, `quantize adopt RUN t10`"
        )
        assert (judged in " ".join(text.split())) == (stated == 10)
    (quick.model / "README.md").unlink()


def test_the_cards_own_command_finds_the_folder_that_it_stands_in(quick: Quick) -> None:
    (quick.model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert quick("card", quick.folder.path).code == 0
    text = (quick.folder.checkpoint / "README.md").read_text()
    assert "quantize generate . " in text
    assert 'folder = Path(".")' in text
    assert quick("card", quick.folder.path, "--repo", "a/b").code == 0
    text = (quick.folder.checkpoint / "README.md").read_text()
    assert "quantize generate a/b " in text
    assert 'snapshot_download("a/b")' in text
    (quick.model / "README.md").unlink()


def test_neither_bundle_nor_card_name_a_place_of_this_machine(tmp_path: Path) -> None:
    data = tmp_path / "secret" / "mine.jsonl"
    recipe = f"name: x\nevaluation: {{own_tasks: {{mine: {{data: {data}, prompt: q}}}}}}\n"
    assert str(tmp_path) not in without_places(recipe)
    assert "data: mine.jsonl" in without_places(recipe)


def test_the_card_says_mode_health_routing_and_what_was_not_judged(quick: Quick) -> None:
    (quick.model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert quick("card", quick.folder.path).code == 0
    (quick.model / "README.md").unlink()
    text = (quick.folder.checkpoint / "README.md").read_text()
    for said in (
        "## Health of answers",
        "Not tested: ",
        "a limit on the distance from BF16 on replayed canvases (no gate.max_kl_nats)",
        "that the router chooses too, by layer: 1.000",
        "as Blackwell serves NVFP4. Hopper and older GPUs leave them in BF16 (mode none), which was "
        "not judged; `quantize evaluate RUN --activations none` judges it too",
    ):
        assert said in text, said
