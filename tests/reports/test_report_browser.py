"""The report in headless Chromium: desktop and phone, light and dark, and all of axe's rules.

Needs `pip install playwright axe-playwright-python` and a Chromium (Debian: `apt install chromium`).
With SCREENSHOTS=FOLDER it leaves pictures there to look at.
"""

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.stages.evaluate.recording import leave_questions, record_differing
from quantize.stages.report.report import report as write_report
from tests.support.scripted_run import (
    Recorder,
    add_optional_parts,
    make_run,
    mock_data,
    recipe,
    steps_of,
)

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine", allow_module_level=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of a scripted run with everything that a report may hold, seven answers recorded."""
    data = mock_data(tmp_path_factory.mktemp("data") / "sets")
    run = make_run(tmp_path_factory.mktemp("outputs") / "run", data)
    add_optional_parts(run)
    sides: dict[str, Any] = {
        "bf16": Recorder([*steps_of("1 1 00", "1 2 11"), *steps_of("2 1 11", canvas=1)]),
        "quantized": Recorder(
            [*steps_of("1 1 00", "1 1 10", "1 2 11"), *steps_of("2 2 00", "2 1 11", canvas=1)]
        ),
    }
    requests = leave_questions(run.evaluation, "gsm8k", data / "gsm8k.jsonl")
    record_differing(run.evaluation, "gsm8k", requests, sides)
    tensors = Checkpoint.open(CHECKPOINT).tensors
    write_report(run, recipe(), plan_targets(tensors, recipe().quantization))
    return run.report_html


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_in_a_browser(
    width: int, scheme: str, report: Path, browser: Any, tmp_path: Path
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(report.as_uri())
    complaints.remove(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg").count() >= 4
    check_viewer(page)
    check_table(page)
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"report-{width}-{scheme}.png", full_page=True)
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 10
    assert [violation["id"] for violation in found["violations"]] == []
    assert complaints == []
    context.close()


def check_viewer(page: Any) -> None:
    """The viewer plays from the first step to the last, and then stops; both show one canvas."""
    problems = page.locator("#problem option").count()
    assert problems == 8
    for problem in range(problems):
        page.locator("#problem").select_option(str(problem))
        for step in range(int(page.locator("#step").get_attribute("max")) + 1):
            page.locator("#step").fill(str(step))
            shown = [page.locator(f"#result-{side}").inner_text() for side in ("bf16", "quantized")]
            canvases = {text.partition(",")[0] for text in shown}
            assert len(canvases) == 1 or any("done after" in text for text in shown)
    page.locator("#problem").select_option("0")
    last = int(page.locator("#step").get_attribute("max"))
    first_canvas = page.locator("#bf16").inner_text()
    page.locator("#play").click()
    assert page.locator("#play").inner_text() == "Pause"
    page.wait_for_function("document.getElementById('play').textContent === 'Play'", timeout=60000)
    assert int(page.locator("#step").input_value()) == last > 0
    assert page.locator("#where").inner_text().startswith(f"{last + 1} of {last + 1}")
    assert page.locator("#bf16").inner_text() != first_canvas
    assert "done after" in page.locator("#result-quantized").inner_text()


def check_table(page: Any) -> None:
    """A column's button sorts by it, again the other way round; `watch` opens the viewer."""

    def column(number: int) -> list[str]:
        return table.locator(f"tbody tr > :nth-child({number})").all_inner_texts()

    table = page.locator(".sortable").first
    assert column(1) == sorted(column(1), key=int)
    for order in ("ascending", "descending"):
        table.get_by_role("button", name="outcome").click()
        assert table.locator("th[aria-sort]").get_attribute("aria-sort") == order
        assert column(2) == sorted(column(2), reverse=order == "descending")
        assert table.locator("th[aria-sort]").inner_text().startswith("outcome")
    assert len(set(column(2))) > 1
    row = table.locator("tbody tr", has=page.locator("button.watch")).last
    row.locator("button.watch").click()
    chosen = page.locator("#problem option:checked").inner_text()
    assert (
        chosen == f"gsm8k {row.locator('th').inner_text()}: {row.locator('td').first.inner_text()}"
    )
    assert page.evaluate("document.activeElement.id") == "viewer"
