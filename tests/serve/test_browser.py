"""The page in headless Chromium: a chat, its canvas denoising, desktop and phone, light and dark.

Needs `pip install playwright axe-playwright-python` and a Chromium (Debian: `apt install chromium`).
With SCREENSHOTS=FOLDER it leaves pictures there to look at.
"""

import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pictures import data_url, encoded, part, picture
from tests.support.serving import QUESTION, ScriptedEngine, running, text_of
from tests.support.serving import in_process as runtime_answer

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine", allow_module_level=True)

# What the canvas showed, one entry a redraw: its text and how many tokens were accepted.
WATCH = """() => {
  window.seen = [];
  const note = () => {
    const canvas = document.querySelector('.turn.model:last-of-type .canvas');
    if (canvas?.textContent) seen.push([canvas.textContent, canvas.querySelectorAll('.sure').length]);
  };
  new MutationObserver(note).observe(document.getElementById('chat'), {childList: true, subtree: true});
}"""


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Page:
    """A page of the server, and everything it complains about or loads from elsewhere."""

    def __init__(self, browser: Any, url: str, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 844}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._elsewhere(request.url, url))
        self.page.goto(url)

    def _elsewhere(self, wanted: str, url: str) -> None:
        if not wanted.startswith(f"{url}/"):
            self.complaints.append(wanted)

    def ask(self, question: str) -> None:
        self.page.locator("#prompt").fill(question)
        self.page.locator("#prompt").press("Enter")

    def answered(self) -> str:
        self.page.wait_for_function("() => document.getElementById('send').textContent === 'Send'")
        return self.page.locator(".turn.model .answer").last.inner_text()

    def picture(self, name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / f"{name}.png")


def ready(page: Any) -> None:
    page.wait_for_function("() => document.getElementById('model').textContent === 'bundled'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_chat_round_trip(browser: Any, width: int, scheme: str) -> None:
    with running() as server:
        view = Page(browser, server.url, width, scheme)
        ready(view.page)
        view.page.evaluate(WATCH)
        view.page.locator("#seed").fill("3")
        view.ask(QUESTION)
        view.page.wait_for_function("() => window.seen.length > 2")
        view.picture(f"denoising-{width}-{scheme}")
        assert view.answered() == text_of(runtime_answer(QUESTION, 3))
        seen = view.page.evaluate("window.seen")
        assert len({text for text, _ in seen}) > 1  # the canvas moved
        assert len({count for _, count in seen}) > 1
        assert "tokens a forward" in view.page.locator(".facts").inner_text()
        assert view.page.locator(".canvas").inner_text() == ""
        view.page.locator("#thinking").check()
        view.page.locator("#seed").fill("5")
        view.page.locator("#clear").click()
        view.ask(QUESTION)
        view.answered()
        assert view.page.locator(".thoughts").last.inner_text().strip()
        view.picture(f"answered-{width}-{scheme}")
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        view.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
        found = view.page.evaluate("axe.run()")
        assert len(found["passes"]) > 10
        assert [violation["id"] for violation in found["violations"]] == []
        assert view.complaints == []
        view.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_the_interface(browser: Any, width: int, scheme: str) -> None:
    with running() as server:
        view = Page(browser, server.url, width, scheme)
        view.page.goto(f"{server.url}/docs")
        assert view.page.get_by_role("heading", name="POST /v1/chat/completions").count() == 1
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        view.picture(f"docs-{width}-{scheme}")
        view.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
        assert [
            violation["id"] for violation in view.page.evaluate("axe.run()")["violations"]
        ] == []
        assert view.complaints == []
        view.context.close()


def test_an_answer_is_replayed_and_saved_as_a_page(browser: Any, tmp_path: Path) -> None:
    """By the keyboard alone: an example, slow motion, the replay, and a page that plays by itself."""
    with running() as server:
        view = Page(browser, server.url, width=390, scheme="dark")
        ready(view.page)
        view.page.locator("#seed").fill("3")
        view.page.evaluate(WATCH)
        view.page.locator(".examples button").first.focus()
        view.page.keyboard.press("Enter")
        answer = view.answered()
        assert "226" in answer
        played = len(view.page.evaluate("window.seen"))
        assert played >= 2
        again = view.page.get_by_role("button", name="Replay")
        again.focus()
        view.page.keyboard.press("Enter")
        view.page.wait_for_function("() => document.querySelector('.canvas').textContent")
        view.picture("replay-390-dark")
        view.page.wait_for_function("() => !document.querySelector('.canvas').textContent")
        assert view.page.locator(".turn.model .answer").inner_text() == answer
        assert len(view.page.evaluate("window.seen")) > played
        with view.page.expect_download() as download:
            view.page.get_by_role("button", name="Save as a page").press("Enter")
        download.value.save_as(tmp_path / "canvas.html")
        view.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
        assert [each["id"] for each in view.page.evaluate("axe.run()")["violations"]] == []
        alone = view.context.new_page()
        alone.goto((tmp_path / "canvas.html").as_uri())
        alone.wait_for_function("() => document.querySelector('.canvas').textContent")
        if folder := os.environ.get("SCREENSHOTS"):
            alone.screenshot(path=Path(folder) / "saved.png")
        alone.wait_for_function("() => !document.querySelector('button').disabled")
        assert alone.locator(".answer").inner_text() == answer
        alone.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
        assert [each["id"] for each in alone.evaluate("axe.run()")["violations"]] == []
        view.context.close()


def test_a_picture_is_sent_with_the_question(browser: Any, tmp_path: Path) -> None:
    shown = encoded(picture())
    (tmp_path / "shown.png").write_bytes(shown)
    with running() as server:
        view = Page(browser, server.url, width=390)
        ready(view.page)
        view.page.locator("#seed").fill("3")
        view.page.locator("#picture").set_input_files(tmp_path / "shown.png")
        view.picture("with-picture")
        view.ask(QUESTION)
        answer = view.answered()
        content = [part(data_url(shown)), {"type": "text", "text": QUESTION}]
        create: Any = server.openai.chat.completions.create
        reply = create(
            model="bundled", messages=[{"role": "user", "content": content}], seed=3
        )  # fmt: skip
        assert answer == reply.choices[0].message.content
        assert f"{reply.usage.completion_tokens} tokens" in view.page.locator(".facts").inner_text()
        assert "[shown.png]" in view.page.locator(".turn.you").inner_text()
        assert view.page.locator("#picture").evaluate("input => input.files.length") == 0
        assert view.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert view.complaints == []
        view.context.close()


def test_stop_frees_the_slot_and_errors_are_shown(browser: Any) -> None:
    engine = ScriptedEngine(1)
    with running(engine, max_num_seqs=1) as server:
        view = Page(browser, server.url)
        ready(view.page)
        view.ask("something long")
        assert engine.entered.acquire(timeout=20)
        view.page.locator("#send").click()
        view.answered()
        assert view.page.locator(".facts").inner_text() == "stopped"
        engine.allowed.release(2)
        server.settle()
        engine.fault = RuntimeError("broken")
        engine.allowed.release()
        view.ask("again")
        view.answered()
        assert view.page.locator(".facts.error").inner_text().startswith("the engine failed")
        view.picture("error")
        view.context.close()


def test_the_page_says_what_was_ignored(browser: Any) -> None:
    with running() as server:
        view = Page(browser, server.url)
        ready(view.page)

        def with_temperature(route: Any) -> None:
            body = json.loads(route.request.post_data) | {"temperature": 0.3}
            route.continue_(post_data=json.dumps(body))

        view.page.route("**/v1/chat/completions", with_temperature)
        view.ask(QUESTION)
        view.answered()
        assert view.page.locator(".facts").inner_text().endswith("ignored: temperature")
        view.context.close()


def test_a_server_with_a_key_asks_for_it(browser: Any) -> None:
    engine = ScriptedEngine(1)
    engine.free = True
    with running(engine, max_num_seqs=1, api_key="sesame") as server:
        view = Page(browser, server.url, width=390)
        view.page.wait_for_function(
            "() => document.getElementById('model').textContent === 'needs an API key'"
        )
        view.page.locator("#key").fill("sesame")
        view.page.locator("#key").blur()
        ready(view.page)
        view.picture("key")
        view.ask("hello")
        assert view.answered().startswith("c1 ")
        assert view.complaints == []
        view.context.close()
