"""What a stage hands to the next, changed behind each reader's back: nothing is read as fresh.

Every stage's output, above and below the size from which files count by a remembered sha256. The change
is one byte that keeps the file's size and time, as a copy that preserves times may.
"""

import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.errors import InputError
from quantize.host.files import read_json, write_bytes, write_json
from quantize.pipeline.stages import STAGES, Stage, stage
from quantize.pipeline.staleness import (
    change_for,
    check_fresh,
    forget,
    input_digests,
    reading,
    remember,
    upstream,
    why_stale,
)
from quantize.recipe.reading import load_recipe
from quantize.runs import digests
from quantize.runs.folder import RunDir
from quantize.runs.manifest import fingerprint

RECIPE = load_recipe("nvfp4")  # which has every stage
READ = [each for each in STAGES if any(each.name in reader.inputs for reader in STAGES)]


@pytest.fixture(params=["below 2 GB", "above 2 GB"])
def run(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:  # fmt: skip
    """A run whose stages are all done, with made-up results."""
    monkeypatch.setattr(digests, "REMEMBERED", tmp_path / "digests.json")
    if request.param == "above 2 GB":
        monkeypatch.setattr(digests, "TOGETHER", 0)
        monkeypatch.setattr(digests, "LARGE", 1 << 10)
        monkeypatch.setattr(digests, "SETTLED", 0)  # all that was read is remembered
    source = SimpleNamespace(folder=tmp_path / "bf16", shards=[])
    for file in tiny_checkpoint.glob("*"):
        shutil.copy(file, tmp_path)
    from quantize.checkpoints.reader import Checkpoint

    source = Checkpoint.open(tmp_path)
    folder = RunDir(tmp_path / "run")
    write_json(folder.manifest_json, {"source": {"fingerprint": fingerprint(source)}})
    write_json(folder.stages_json, {})
    for each in STAGES:
        make(folder, each, seed=0)
    return SimpleNamespace(folder=folder, source=source)


def files_of(folder: RunDir, made: Stage) -> list[Path]:
    """Return the files that a made-up stage writes: two where its result is a folder."""
    paths = [folder.path / name for name in made.files or (made.result,)]
    folders = [path for path in paths if not path.suffix]
    inside = [path / name for path in folders for name in ("one.safetensors", "deep/two.json")]
    return [*inside, *(path for path in paths if path.suffix), folder.path / made.result][
        : None if "." in made.result else -1
    ]


def make(folder: RunDir, made: Stage, seed: int) -> None:
    """Do a made-up stage: write its results and enter it."""
    for number, path in enumerate(files_of(folder, made)):
        write_bytes(path, random.Random(f"{made.name} {number} {seed}").randbytes(200_000))
    remember(folder, made, input_digests(folder, made))


def change(path: Path) -> None:
    """Change one byte in the middle, which keeps size and time."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_all_is_fresh_before(run: Any) -> None:
    assert [why_stale(run.folder, each) for each in STAGES] == [None] * len(STAGES)
    check_fresh(run.folder, RECIPE, STAGES)
    for each in STAGES:
        with reading(run, each) as inputs:
            assert inputs == input_digests(run.folder, each)


def test_a_stage_depends_on_what_its_inputs_were_made_from() -> None:
    names = {each.name: [before.name for before in upstream(each)] for each in STAGES}
    made = ["plan", "calibrate", "round", "convert"]
    assert names["evaluate"] == made  # which reads plan and convert
    assert names["report"] == [*made, "verify", "fidelity", "evaluate"]


@pytest.mark.parametrize("maker", READ, ids=lambda maker: maker.name)
def test_a_changed_output_is_fresh_to_no_reader(maker: Stage, run: Any) -> None:
    for path in files_of(run.folder, maker):
        whole = path.read_bytes()
        change(path)
        assert "changed after it was made" in str(why_stale(run.folder, maker))
        for reader in STAGES:
            if maker in upstream(reader):
                with pytest.raises(InputError, match=f"{maker.name} is stale"):
                    check_fresh(run.folder, RECIPE, upstream(reader))
            if maker.name in reader.inputs:
                assert why_stale(run.folder, reader) == f"{maker.name} changed since"
                said = f"not what {maker.name} wrote; .* makes it again"
                with pytest.raises(InputError, match=said), reading(run, reader):
                    pytest.fail("it was read")
        path.write_bytes(whole)
    assert why_stale(run.folder, maker) is None


def test_the_card_and_unfinished_files_are_no_part_of_a_result(run: Any) -> None:
    """`quantize card` writes into the checkpoint, which stays the one that was verified."""
    folder = run.folder.checkpoint
    for name in ("README.md", ".eval_results/scores.yaml", "shard.partial", "one.partial.json"):
        write_bytes(folder / name, b"x")
    assert why_stale(run.folder, stage("convert")) is None
    write_bytes(folder / "more.json", b"x")
    assert "changed after it was made" in str(why_stale(run.folder, stage("convert")))


def test_a_changed_result_leaves_those_fresh_whom_it_does_not_concern(run: Any) -> None:
    change(run.folder.conversion_json)
    change_for(run.folder, stage("convert"), ("fidelity", "never done"))
    why = {each.name: why_stale(run.folder, each) for each in STAGES}
    stale = {name for name, reason in why.items() if reason}
    assert stale == {each.name for each in STAGES if "convert" in each.inputs} - {"fidelity"}


def test_what_a_failed_try_would_leave_is_removed_unless_it_adds(run: Any) -> None:
    for each in STAGES:
        forget(run.folder, each)
        files = [path for path in files_of(run.folder, each) if path.parent == run.folder.path]
        assert all(path.exists() == each.adds for path in files)
        assert (each.name in read_json(run.folder.stages_json)) == each.adds
        forget(run.folder, each)  # what has no entry any more


@pytest.mark.parametrize("maker", READ, ids=lambda maker: maker.name)
def test_an_output_that_changes_while_it_is_read_is_refused(maker: Stage, run: Any) -> None:
    """Even if it is put back: what was read in between is not what the digests are of."""
    path = files_of(run.folder, maker)[0]
    for reader in (each for each in STAGES if maker.name in each.inputs):
        whole = path.read_bytes()
        with pytest.raises(InputError, match="changed while it ran"), reading(run, reader):
            change(path)
        path.write_bytes(whole)
        with reading(run, reader):  # only touched: its bytes are the same
            os.utime(path)


def test_a_refusal_says_what_is_wrong_and_what_to_do(run: Any) -> None:
    folder = run.folder.path
    change(run.folder.fidelity_json)
    with pytest.raises(InputError) as error:
        check_fresh(run.folder, RECIPE, STAGES)
    assert str(error.value) == (
        f"{folder}: fidelity is stale, fidelity.json changed after it was made; "
        f"`quantize fidelity {folder}` makes it again"
    )
    with pytest.raises(InputError) as error, reading(run, stage("report")):
        pass
    assert str(error.value) == (
        f"{folder}/fidelity.json: not what fidelity wrote; `quantize fidelity {folder}` makes it again"
    )
    with pytest.raises(InputError) as error, reading(run, stage("verify")):
        change(run.folder.conversion_json)
    assert str(error.value) == (f"{folder}: what verify reads changed while it ran; run it again")
    records = read_json(run.folder.stages_json)
    del records["verify"]
    write_json(run.folder.stages_json, records)
    assert why_stale(run.folder, stage("verify")) == "nothing says what its result was made from"


def test_a_result_that_is_gone_is_refused_unless_the_recipe_has_no_such_stage(run: Any) -> None:
    shutil.rmtree(run.folder.rounding)
    assert why_stale(run.folder, stage("round")) == "there is no result"
    said = "rounding: not what round wrote"
    with pytest.raises(InputError, match=said), reading(run, stage("convert")):
        pytest.fail("it was read")
    records = read_json(run.folder.stages_json)
    del records["round"]
    write_json(run.folder.stages_json, records)
    with reading(run, stage("convert")) as inputs:
        assert inputs["round"] is None


@pytest.mark.parametrize("maker", READ, ids=lambda maker: maker.name)
def test_what_is_made_otherwise_makes_its_readers_stale(maker: Stage, run: Any) -> None:
    make(run.folder, maker, seed=1)
    assert why_stale(run.folder, maker) is None
    readers = [each for each in STAGES if maker.name in each.inputs]
    assert {why_stale(run.folder, reader) for reader in readers} == {f"{maker.name} changed since"}


def test_the_bf16_model_that_changes_while_a_stage_reads_it(run: Any) -> None:
    (shard,) = run.source.shards
    with pytest.raises(InputError, match="changed while it ran"), reading(run, stage("convert")):
        change(shard)


def test_an_input_that_the_entry_does_not_know_makes_a_stage_stale(run: Any) -> None:
    """Another version may read more: then nothing says what the result was made from."""
    records = read_json(run.folder.stages_json)
    for name in ("model", "calibrate"):
        known = {key: value for key, value in records["convert"]["inputs"].items() if key != name}
        entry = records["convert"] | {"inputs": known}
        write_json(run.folder.stages_json, records | {"convert": entry})
        assert why_stale(run.folder, stage("convert")) == f"{name} changed since"
        more = records["convert"]["inputs"] | {"another": "digest"}
        write_json(run.folder.stages_json, records | {"convert": entry | {"inputs": more}})
        assert why_stale(run.folder, stage("convert")) == "another changed since"


def test_an_entry_of_samples_says_nothing_of_the_other_bytes(run: Any) -> None:
    """As versions up to 268631d wrote it for results above 2 GB."""
    records = read_json(run.folder.stages_json)
    from quantize.pipeline.staleness import _named

    old = digests.sampled(_named(run.folder, stage("convert")))
    write_json(run.folder.stages_json, records | {"convert": records["convert"] | {"result": old}})
    why = why_stale(run.folder, stage("convert"))
    small = digests.TOGETHER > 0
    said = "an earlier version read only samples of checkpoint or conversion.json"
    assert why == (None if small else said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "maker", [maker for maker in READ if "." not in maker.result], ids=lambda maker: maker.name
)
def test_a_file_above_2_gb_is_read_to_its_last_byte(
    maker: Stage, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes and the memory of digests as they are; the change is between two samples."""
    from quantize.checkpoints.reader import Checkpoint

    monkeypatch.setattr(digests, "REMEMBERED", tmp_path / "digests.json")
    for file in tiny_checkpoint.glob("*"):
        shutil.copy(file, tmp_path)
    run: Any = SimpleNamespace(folder=RunDir(tmp_path / "run"), source=Checkpoint.open(tmp_path))
    write_json(run.folder.manifest_json, {"source": {"fingerprint": fingerprint(run.source)}})
    write_json(run.folder.stages_json, {})
    for each in STAGES:
        make(run.folder, each, seed=0)
    large = run.folder.path / maker.result / "large.safetensors"
    with large.open("wb") as file:
        file.truncate(2_200_000_000)  # above 2 GiB; a hole takes no room on the disk
    remember(run.folder, maker, input_digests(run.folder, maker))
    readers = [reader for reader in STAGES if maker.name in reader.inputs]
    for reader in readers:
        remember(run.folder, reader, input_digests(run.folder, reader))
    time.sleep(2 * digests.SETTLED / 1e9)
    assert why_stale(run.folder, maker) is None  # this one is remembered
    assert [why_stale(run.folder, reader) for reader in readers] == [None] * len(readers)
    before = large.stat()
    assert before.st_blocks < 1000
    assert str(before.st_ino) in digests.REMEMBERED.read_text()
    with large.open("r+b") as file:
        file.seek(before.st_size // 2 + before.st_size // digests.SAMPLES // 2)
        file.write(b"x")
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "changed after it was made" in str(why_stale(run.folder, maker))
    for reader in readers:
        assert why_stale(run.folder, reader) == f"{maker.name} changed since"
        said = f"not what {maker.name} wrote; .* makes it again"
        with pytest.raises(InputError, match=said), reading(run, reader):
            pytest.fail("it was read")
