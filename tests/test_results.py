"""Every figure of README follows from recorded results, from a plan, or from a file that says it."""

import re
import runpy

import pytest

from tests.support.documented import ROOT
from tests.support.recorded_results import (
    RESULTS,
    compared,
    evaluation_rows,
    peer_rows,
    quality_rows,
    sizes,
    speed_rows,
)

README = (ROOT / "README.md").read_text("utf-8")
REAL = "google/diffusiongemma-26B-A4B-it"
# What is no result: names, versions, settings of the measurement, and sizes that a config states.
STATED = {
    "a name or a version": ["8", "4", "16", "0.26", "0.33", "5.17", "5.24", "3.11", "2.0", "2.15",
                            "2.11", "2.13", "3.6", "3.7", "3.9", "95"],
    "the architecture": ["256", "64", "128", "25.2B"],
    "a setting of the measurement": ["2,000", "1,024", "500"],
}  # fmt: skip


@pytest.mark.parametrize("rows", [quality_rows, speed_rows], ids=lambda rows: rows.__name__)
def test_tables_of_readme_are_made_from_what_was_recorded(rows) -> None:
    for row in rows():
        assert row in README.splitlines(), f"{row}: run python -m tests.support.recorded_results"


def test_the_pages_of_docs_have_the_same_figures() -> None:
    evaluation = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    for row in evaluation_rows():
        assert f"\n{row}" in evaluation
    runtime = (ROOT / "docs" / "runtime.md").read_text("utf-8").splitlines()
    assert len(peer_rows()) == 12
    for row in peer_rows():
        assert row in runtime, f"{row}: run python -m tests.support.recorded_results"


def test_every_other_figure_of_readme_is_derived_too() -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+", " ", README, flags=re.DOTALL)
    tables = {*quality_rows(), *speed_rows()}
    text = "\n".join(line for line in text.splitlines() if line not in tables)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("| NVFP4, W4A4"))
    names = r"(?:26B-A4B|26B|26b|GSM8K|NVFP4|MXFP4|FP8|INT8|W8A8|W4A4|BF16|float32|H200|H100|FP4)"
    found = {*re.findall(r"\d[\d,.]*\d[A-Z]?|\d[A-Z]?\b", re.sub(names, " ", text))}
    before, fp8 = sizes("fp8_dynamic", REAL)
    nvfp4 = sizes("nvfp4", REAL)[1]
    derived = {f"{size / 1e9:.1f}" for size in (before, fp8, nvfp4)}
    derived.add(f"{100 * compared('FP8').base:.0f}")
    run = RESULTS["make_run"]
    derived |= {f"{run['wall_seconds'] / 60:.1f}", *map(str, run["load"])}
    assert derived <= found
    known = {figure for figures in STATED.values() for figure in figures}
    assert found - derived - known == set(), "a figure that nothing derives"


def test_the_command_prints_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tests" / "support" / "recorded_results.py"), run_name="__main__")
    assert quality_rows()[1] in capsys.readouterr().out
