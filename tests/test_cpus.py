"""The matrix of CPUs: what a processor can run, what a commit draws, and what is said in the end."""

import pytest

from tests.support import cpus, numeric


def test_what_is_chosen_for_the_matrix_is_there() -> None:
    assert numeric.stale() == []


def test_a_processor_skips_what_it_lacks_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {value for cell in cpus.cells() for value in cpus.environment(cell).values()}
    assert values > {*cpus.NEEDS}
    monkeypatch.setattr(cpus, "FACTS", "vendor_id: AuthenticAMD\nflags: sse4_1 avx avx2")
    skipped = (True, "skipped, this processor lacks avx512vl")
    assert cpus.run("OPENBLAS_CORETYPE=SkylakeX") == skipped
    able = [cell for cell in cpus.cells() if not cpus.lacking(cell)]
    assert "OPENBLAS_CORETYPE=Zen" in able
    assert not [c for c in able if "512" in c or c.startswith("MKL_ENABLE")]


def test_a_commit_draws_the_same_cells_each_time() -> None:
    drawn = cpus.chosen("2")
    assert drawn == cpus.chosen("2")
    assert len({*drawn} & {*cpus.cells()}) == 2


@pytest.mark.parametrize("red", [False, True])
def test_one_red_cell_is_enough(
    red: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table names it, and the last line sums as pytest would."""
    lines = iter(
        [
            (True, "7 passed, 1 skipped in 9.10s"),
            (not red, "1 failed, 6 passed in 70.02s (0:01:10)"),
        ]
    )
    monkeypatch.setattr(cpus, "chosen", lambda word: ["A=1", "B=2"])
    monkeypatch.setattr(cpus, "run", lambda cell: next(lines))
    assert cpus.main("2") == red
    *_, last_cell, closing = capsys.readouterr().out.splitlines()
    assert last_cell.startswith("RED ") == red
    assert " 13 passed, 1 skipped, 1 failed in 0.0" in closing
