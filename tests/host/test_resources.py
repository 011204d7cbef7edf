"""What a stage took is its own: no peak of what ran before, and the time of tries that failed."""

import gc
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from quantize import __version__
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.host import resources as measuring
from quantize.host.files import read_json, write_json
from quantize.host.resources import free_memory, measured
from quantize.pipeline import run as pipeline_run
from quantize.pipeline.run import work
from quantize.pipeline.stages import STAGES, Run
from quantize.recipe.reading import load_recipe
from quantize.runs import manifest
from quantize.runs.folder import RunDir
from quantize.runs.manifest import new_manifest, tool
from quantize.runtime.gpu import placement

LARGE = 300_000_000  # bytes, far over what moves by itself


def test_what_was_there_before_a_stage_is_left_out_of_its_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a model's memory is to be freed, and when the stage has ended."""
    for module in (placement, pipeline_run):  # from which conftest keeps it
        monkeypatch.setattr(module, "gc", gc)
    seen: list[int] = []

    def look(_: Run) -> None:
        seen.append(gc.get_freeze_count())
        placement.free_unused("cpu")
        seen.append(gc.get_freeze_count())
        gc.freeze()
        raise ZeroDivisionError

    recipe, source = load_recipe("fp8_dynamic"), Checkpoint.open(CHECKPOINT)
    run = Run(RunDir(tmp_path), recipe, source, [], is_bundled=True, instead={"convert": look})
    write_json(run.folder.manifest_json, new_manifest(source, "0", recipe.name, None))
    with pytest.raises(ZeroDivisionError):
        work(run, next(stage for stage in STAGES if stage.name == "convert"))
    assert seen[0] > 10_000
    assert seen[1] == gc.get_freeze_count() == 0


def test_the_peak_of_a_block_is_not_that_of_the_one_before() -> None:
    with measured() as first:
        np.ones(LARGE // 8)
    with measured() as second:
        time.sleep(0.02)
    if first["peak_rss_bytes"] is None:
        pytest.skip("this kernel does not let a process forget its peak")
    assert first["peak_rss_bytes"] - second["peak_rss_bytes"] > 0.8 * LARGE
    assert second["seconds"] >= 0.02
    assert (second["gpu"] is None) == (second["peak_gpu_bytes"] is None)


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 32e9), ("40000000000", 32e9), ("9000000000", 5.5e9)]
)
def test_a_container_may_leave_less_memory_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, free: float
) -> None:
    class Memory:
        available = 32_000_000_000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    monkeypatch.setattr(measuring, "CGROUP", tmp_path)
    assert free_memory() == 32e9
    files = "anon 4000000000\nactive_file 200000000\ninactive_file 300000000"
    content = {"max": limit, "current": "4000000000", "stat": files}
    for name, text in content.items():
        (tmp_path / f"memory.{name}").write_text(text + "\n")
    assert free_memory() == free


def test_where_the_peak_cannot_be_forgotten_none_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "FORGET", tmp_path / "missing" / "clear_refs")
    with measured() as facts:
        pass
    assert facts["peak_rss_bytes"] is None


def test_the_time_of_a_try_that_failed_is_counted(tmp_path: Path) -> None:
    source, recipe = Checkpoint.open(CHECKPOINT), load_recipe("nvfp4a16")
    fails = [True]

    def task(run: Run) -> None:
        time.sleep(0.05)
        if fails.pop():
            raise KeyboardInterrupt
        (run.folder.path / STAGES[0].result).write_text("")

    folder = RunDir(tmp_path / "run")
    run = Run(folder, recipe, source, [], is_bundled=True, instead={"plan": task})
    write_json(run.folder.manifest_json, new_manifest(source, "digest", "nvfp4a16", None))
    with pytest.raises(KeyboardInterrupt):
        work(run, STAGES[0])
    facts = read_json(run.folder.manifest_json)["stages"]["plan"]
    assert list(facts) == ["seconds_in_all"]
    fails.append(False)
    work(run, STAGES[0])
    again = read_json(run.folder.manifest_json)["stages"]["plan"]
    assert again["seconds_in_all"] >= facts["seconds_in_all"] + again["seconds"] - 0.02 >= 0.08
    assert again["ended"].endswith("+00:00")


def test_the_commit_of_the_code_is_that_of_its_checkout() -> None:
    found = tool()
    assert found["version"]
    checkout = Path(__file__).parents[2] / ".git"
    assert (found["commit"] is not None) == checkout.exists()
    if found["commit"]:
        assert len(found["commit"]) == 40
        assert isinstance(found["modified"], bool)


def test_code_that_was_copied_and_not_installed_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(manifest, "__file__", str(tmp_path / "quantize" / "runs" / "manifest.py"))
    monkeypatch.setattr(manifest, "distribution", missing)
    assert tool() == {"version": __version__, "commit": None, "modified": None}
