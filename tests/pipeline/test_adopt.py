"""A point's settings in generation_config.json: verified, reported, published only if they passed."""

from pathlib import Path

import pytest
from quick_run import Quick

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.hub.release import _check_artifact, _listed_files
from quantize.pipeline.adopt import _write
from quantize.pipeline.run import opened
from quantize.reports.headline import chosen_point
from quantize.runs.manifest import checksums, fingerprint
from quantize.runtime import Sampler


@pytest.fixture
def quick(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quick:
    """A finished run of the tiny model with two operating points, which pass."""
    quantize = Quick(tmp_path, tiny_checkpoint, monkeypatch)
    assert quantize.run().code == 0
    assert quantize("evaluate", quantize.folder.path, "--steps", 20, "--steps", 10).code == 0
    assert quantize("report", quantize.folder.path).code == 0
    return quantize


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
        (("lost",), 1, "operating point t10 does not pass"),
        (("mode",), 2, "operating point t10 rounds activations fp8"),
    ],
)
def test_what_cannot_be_adopted_is_said_in_one_line(
    quick: Quick, words: tuple[str, ...], code: int, says: str
) -> None:
    path = quick.folder.report_json
    report = read_json(path)
    change = {"lost": {"passes": False}, "mode": {"activations": "fp8"}}.get(words[0], {})
    points = [point | change for point in report["operating_points"]]
    write_json(path, report | {"operating_points": [] if words == ("none",) else points})
    quick.monkeypatch.setattr("quantize.pipeline.adopt.check_fresh", lambda *_: None)
    done = quick("adopt", quick.folder.path, *(("t10",) if change else words))
    assert done.code == code
    assert says in done.last
