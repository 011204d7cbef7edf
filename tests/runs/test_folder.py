"""A final name holds a whole result or nothing."""

from pathlib import Path

import pytest

from quantize.host.files import folder_when_complete, read_json, write_json, write_text
from tests.support.syncs import noted_syncs, synced


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"x": float("nan")})
    assert read_json(path) == {"x": 1}


def interrupted(final: Path, *, keep_partial: bool = False) -> None:
    with folder_when_complete(final, keep_partial=keep_partial) as folder:
        write_text(folder / "half.txt", "half")
        raise RuntimeError


def test_a_folder_appears_only_when_its_block_ends_well(tmp_path: Path) -> None:
    final = tmp_path / "calibration"
    with pytest.raises(RuntimeError):
        interrupted(final)
    assert not final.exists()
    with folder_when_complete(final) as folder:
        write_text(folder / "whole.txt", "whole")
    assert [p.name for p in tmp_path.iterdir()] == ["calibration"]
    assert [p.name for p in final.iterdir()] == ["whole.txt"]


def test_a_partial_folder_is_handed_on_when_asked(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint"
    with pytest.raises(RuntimeError):
        interrupted(final)
    with folder_when_complete(final, keep_partial=True) as folder:
        assert [p.name for p in folder.iterdir()] == ["half.txt"]


def test_a_second_result_replaces_the_first_whole(tmp_path: Path) -> None:
    final = tmp_path / "calibration"
    for name in ("one", "two"):
        with folder_when_complete(final) as folder:
            write_text(folder / name, name)
    assert [p.name for p in final.iterdir()] == ["two"]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    noted = noted_syncs(monkeypatch, path)
    write_text(path, "whole")
    assert synced(noted, path, appeared=False)
    assert noted[0].size == len("whole")
    assert synced(noted, tmp_path, appeared=True)


def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "checkpoint"
    noted = noted_syncs(monkeypatch, final)
    with folder_when_complete(final) as folder:
        (folder / "within").mkdir()
        for path in (folder / "a", folder / "within" / "b"):
            path.write_text("not synced by whoever wrote it")
    for path in (final, final / "a", final / "within", final / "within" / "b"):
        assert synced(noted, path, appeared=False), path
    assert synced(noted, tmp_path, appeared=True)
