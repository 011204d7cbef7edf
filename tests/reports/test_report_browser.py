"""The report of a real run in headless Chromium: desktop and phone, light and dark, and axe's rules.

Needs `pip install playwright axe-playwright-python` and a Chromium (Debian: `apt install chromium`).
"""

import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine", allow_module_level=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of a short run on the bundled model; whatever its verdict."""
    out = tmp_path_factory.mktemp("outputs")
    command = ["run", "--recipe", "nvfp4", "--limit", "8", "--noise-floor", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "quantize", *command], check=False, timeout=500)
    assert done.returncode in (0, 4)
    (page,) = out.glob("nvfp4-*/report.html")
    return page


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
    assert page.locator("svg").count() >= 6
    check_viewer(page)
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 10
    serious = [v["id"] for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert serious == []
    assert complaints == []
    context.close()


def check_viewer(page: Any) -> None:
    """The viewer plays from the first step to the last, and then stops; both show one canvas."""
    assert page.locator("#problem option").count() == 8
    for problem in range(8):
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
