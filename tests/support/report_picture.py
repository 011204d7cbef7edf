"""Makes docs/report.png, the picture of a report in README, from the report of a run.

    python -m tests.support.report_picture outputs/nvfp4-0123abc/report.html

Needs playwright and a Chromium, as tests/serve/test_browser.py does.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[2] / "docs" / "report.png"
MOST = 200_000  # bytes


def taken(report: Path) -> bytes:
    """Return a picture of a report's first screen, as it looks in a light window."""
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 860}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        found = page.screenshot()
        browser.close()
    return found


def small(picture: bytes) -> bytes:
    """Return it in 64 colours: text and lines need no more."""
    out = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(64).save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    found = small(taken(Path(sys.argv[1])))
    if len(found) > MOST:
        sys.exit(f"{len(found)} bytes, more than {MOST}")
    PICTURE.write_bytes(found)
    print(f"{PICTURE}: {len(found)} bytes")
