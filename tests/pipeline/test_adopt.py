"""A point's settings in generation_config.json: verified, reported, published only if they passed."""

from dataclasses import replace
from pathlib import Path

import pytest
from quick_run import Quick

from quantize.checkpoints.reader import GENERATION, Checkpoint
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.hub.release import _check_artifact, _listed_files
from quantize.pipeline.adopt import _write
from quantize.pipeline.run import opened
from quantize.reports.headline import chosen_point
from quantize.runs.manifest import checksums, fingerprint
from quantize.runtime import Sampler


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
