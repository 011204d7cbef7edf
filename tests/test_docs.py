"""Every command of README and docs is run, or marked with what it needs; every link leads somewhere.

A block under `<!-- needs a GPU, the network -->` is not run, but its `quantize` commands must parse.
The others are run in this process and share one run of the bundled model, on two questions: RUN stands
for its folder, and `quantize run` stops after the plan.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import click
import jsonschema_rs
import pytest

from quantize import cli
from quantize.pipeline import rehearse
from quantize.recipe.reading import shipped_recipes
from quantize.stages import denoising
from quantize.stages.fidelity import fidelity, held_out
from tests.support.documented import NEEDS, PAGES, ROOT, SHELL, Block, blocks
from tests.support.quick_run import in_few_steps
from tests.support.serving import Running, running, text_with_tools

ALL = blocks()
PYTHON_PAGES = ("docs/python.md", "docs/commands.md")


def shell(needy: bool) -> list[Block]:
    return [block for block in ALL if block.kind in SHELL and bool(block.needs) == needy]


def by_place(found: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", found, ids=lambda block: block.place)


def test_pages_and_blocks_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "gate-a-release.md"} <= {page.name for page in PAGES}
    assert len(shell(needy=False)) > 15
    assert {need for block in ALL for need in block.needs} <= NEEDS


def test_readme_says_on_which_cpu_and_at_which_load_a_run_took_so_long() -> None:
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert re.search(
        r"`make run` took [\d.]+ minutes on \w+ cores of an? [\w ]+, at a load of", text
    )


def test_readme_is_one_page_and_its_picture_is_small() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
    assert 10_000 < (ROOT / "docs" / "report.png").stat().st_size <= 200_000


@by_place(shell(needy=True))
def test_what_is_not_run_parses(block: Block) -> None:
    for words in block.commands:
        if "quantize" in words and words[0] not in ("docker", "vllm", "pip", "hf"):
            parse(words[words.index("quantize") + 1 :])


def test_commands_and_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One test, because all of it shares the run that docs/python.md makes, of few prompts."""
    monkeypatch.setattr(denoising, "HELD_OUT", 1)
    monkeypatch.setattr(rehearse, "PROMPTS", 1)
    monkeypatch.setattr(rehearse, "HELD_OUT", 1)
    monkeypatch.setattr(rehearse, "QUESTIONS", 2)
    in_few_steps(monkeypatch, steps=2)
    few = held_out.FRESH.model_copy(update={"prompts": 1, "canvases": 1})
    monkeypatch.setattr(held_out, "FRESH", few)
    # The first steps are the farthest from BF16; what is found there is test_fidelity's.
    monkeypatch.setattr(fidelity, "find_faults", lambda *_: [])
    for page in PYTHON_PAGES:
        folder = tmp_path / page.replace("/", "-")
        folder.mkdir()
        monkeypatch.chdir(folder)
        run_python(page)
    (run,) = (tmp_path / "docs-python.md" / "outputs").glob("nvfp4a16-*")
    capsys.readouterr()
    seen: list[list[str]] = []
    for block in shell(needy=False):
        folder = tmp_path / block.place.partition(":")[0].replace("/", "-")
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        for words in block.commands:
            if words[1] in ("plan", "recipes", "tasks") and words in seen:
                continue  # they leave nothing behind
            seen.append(words)
            code = follow(words, run, monkeypatch)
            error = capsys.readouterr().err
            assert code in (0, 4), f"{block.place}: {words} ended with {code}: {error}"


def run_python(page: str) -> None:
    """Run the blocks of a page, one after the other, as in a notebook."""
    examples = [b for b in ALL if b.kind == "python" and b.place.startswith(f"{page}:")]
    assert examples
    names: dict[str, object] = {}
    for block in examples:
        exec(compile(block.text, block.place, "exec"), names)


def follow(words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Do what a command says, or see that what it names is there; return its exit code."""
    match words:
        case ["make", *targets]:
            assert_targets(targets)
        case ["python", "-m", "pytest", *files]:
            assert all((ROOT / file).exists() for file in files), words
        case ["python", "-m", module, *_]:
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), words
        case ["curl", *_]:
            pass  # below, against a server
        case ["quantize", "serve", *_]:
            parse(words[1:])  # below, too
        case ["quantize", *rest]:
            return execute([re.sub(r"^RUN(?=/|$)", str(run), word) for word in rest], monkeypatch)
        case _:
            pytest.fail(f"nobody runs {words}; mark what the block needs")
    return 0


def execute(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line in this process; a redirection writes a file."""
    if ">" in words:
        place = words.index(">")
        Path(words[place + 1]).write_text(shipped_recipes()[words[place - 1]])
        words = words[:place]
    if words[0] == "run":
        words = [*words, "--until", "plan"]
    monkeypatch.setattr("sys.argv", ["quantize", *words])
    return cli._exit_code()


def assert_targets(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.M), target


def parse(words: list[str]) -> None:
    """Let click read a command's words, and no more: unknown commands and options raise."""
    name, *rest = words
    context = click.Context(cli.cli)
    command = cli.cli.get_command(context, name)
    assert command is not None, f"no command {name!r}"
    command.make_context(name, [word for word in rest if word != "..."], parent=context)


def test_an_unknown_option_does_not_parse() -> None:
    with pytest.raises(click.UsageError):
        parse(["run", "--recepi", "nvfp4"])


def test_forms_that_pages_show_say_where_values_end() -> None:
    """An integer without a maximum became 120 digits on a model that knows no JSON."""
    words = (words[-1] for block in ALL for words in block.commands if words[0] == "curl")
    bodies = [json.loads(text) for text in words if "response_format" in text]
    assert bodies
    for body in bodies:
        schema = body["response_format"]["json_schema"]["schema"]
        assert schema["additionalProperties"] is False
        fields = schema["properties"].values()
        assert all("maximum" in field for field in fields if field["type"] == "integer")


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_commands_are_answered() -> None:
    commands = [words for block in ALL for words in block.commands if words[0] == "curl"]
    with_tools = [words for words in commands if '"tools"' in words[-1]]
    assert len(commands) >= 5
    assert with_tools
    with running(api_key="a-key") as server:
        for words in (words for words in commands if words not in with_tools):
            answer = answered(words, server)
            if "completions" in " ".join(words):
                assert "226" in answer, words
            if form := json.loads(words[-1]).get("response_format") if "-d" in words else None:
                schema = form["json_schema"]["schema"]
                (choice,) = json.loads(answer)["choices"]
                jsonschema_rs.validate(schema, json.loads(choice["message"]["content"]))
    with running(text=text_with_tools(), api_key="a-key") as server:
        for words in with_tools:
            (choice,) = json.loads(answered(words, server))["choices"]
            (call,) = choice["message"]["tool_calls"]
            (tool,) = json.loads(words[-1])["tools"]
            assert choice["finish_reason"] == "tool_calls"
            assert call["function"]["name"] == tool["function"]["name"]
            arguments = json.loads(call["function"]["arguments"])
            jsonschema_rs.validate(tool["function"]["parameters"], arguments)


def answered(words: list[str], server: Running) -> str:
    """Return what a curl command prints that asks `server` and sends its key."""
    asked = [word.replace("http://127.0.0.1:8000", server.url) for word in words]
    command = [*asked, "-sS", "--fail", "-H", "Authorization: Bearer a-key"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
        if not link.startswith(("http://", "https://")):
            assert (page.parent / link).exists(), link
