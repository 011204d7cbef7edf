"""The commands of README and docs that need a GPU, as `python -m quantize` in a process of its own.

What no test has is replaced: a model of the Hub by the bundled one, RUN by a run of it, URL by servers
of both sides, eight GPUs by those that are here, thousands of questions by two, a third of the real
model's bytes by half of the bundled one's, in one scheme of three, all sizes of products that `tune`
times by one. A command that is then the same
as another is run once. Blocks that need vLLM, docker or another program are run by nobody here.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock

from quantize.bundled import CHECKPOINT
from quantize.recipe.reading import shipped_recipes
from tests.support.documented import SHELL, Block, blocks
from tests.support.server_process import KEY, process

pytestmark = pytest.mark.gpu
FOUND = [b for b in blocks() if b.kind in SHELL and {*b.needs} - {"the network"} == {"a GPU"}]
RUN = re.compile(r"^(?:RUN|outputs/(\w+)-\.\.\.)(?=/|$)")
TWO = ["--limit", "2"]
NUMBERS = itertools.count()  # of the runs' folders


BF16_BYTES = (CHECKPOINT / "model.safetensors").stat().st_size
RAN = ("run", "--recipe", "nvfp4", *TWO)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with one run of the bundled model; workers of pytest-xdist copy one run."""
    made = tmp_path_factory.mktemp("docs")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        quantize(made, *RAN)
        return made
    shared = tmp_path_factory.getbasetemp().parent / "docs-run"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            shared.mkdir()
            quantize(shared, *RAN)
    return Path(shutil.copytree(shared, made, dirs_exist_ok=True))


def quantize(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> str:
    """Run a command; it ends with 0, or with 4 where two questions decide nothing."""
    start = [sys.executable, "-m", *launcher, *(("-m",) if launcher else ()), "quantize"]
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "OPENAI_API_KEY": KEY}  # `tune` writes there
    done = subprocess.run(
        [*start, *words], cwd=folder, env=os.environ | own, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 4), f"{words} ended with {done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def here(words: list[str], folder: Path) -> list[str]:
    """Return a command's words with what is here in place of what they name, none for `RAN`."""
    told = [RUN.sub(lambda found: newest(folder, found[1] or "nvfp4"), word) for word in words]
    if told[0] == "measure":  # of a model that nobody has here
        told[1:2] = ["bundled", "--prompts", "2", "--canvases", "2", "--out", f"{next(NUMBERS)}"]
    for option in ("--model", "--limit", "--out"):
        if option in told:
            at = told.index(option)
            del told[at : at + 2]
    told += TWO if told[0] == "run" else []
    if "17e9" in told:
        told[told.index("17e9")] = str(BF16_BYTES // 2)
        told += ["--scheme", "NVFP4A16"]
    if told == ["tune"]:
        told += ["--only", "^linear/fp8/4096x2816 M=256$"]
    if tuple(told) == RAN:
        return []
    return told + (["--out", f"{next(NUMBERS)}"] if told[0] in ("run", "rehearse") else [])


def newest(folder: Path, recipe: str) -> str:
    """Return the last run of a recipe that a block, or the fixture, has made."""
    return str(max(folder.glob(f"*/{recipe}-*"), key=lambda run: run.stat().st_mtime))


def name(block: Block) -> str:
    """Where a block stands, and the subcommands in it."""
    return "-".join(
        [block.place, *(words[words.index("quantize") + 1] for words in block.commands)]
    )


@pytest.mark.parametrize("block", FOUND, ids=name)
def test_commands_run(block: Block, folder: Path) -> None:
    for words in block.commands:
        if words[0] == "torchrun":
            count, rest = words[2], words[words.index("quantize") + 1 :]
            assert count.isdigit()
            processes = str(max(1, min(int(count), torch.cuda.device_count())))
            launcher = ("torch.distributed.run", "--nproc-per-node", processes)
            quantize(folder, *here(rest, folder), launcher=launcher)
        elif "serve" in words:
            serves(words[words.index("serve") + 1 :], folder)
        elif "URL" in words:
            told = here(words[1:], folder)
            told[1] = served_run(folder)
            with process() as (base, _), process(checkpoint=f"{told[1]}/checkpoint") as (own, _):
                at = {"--server": f"{own}/v1", "--base-server": f"{base}/v1"}
                quantize(
                    folder, *[at[told[n - 1]] if w == "URL" else w for n, w in enumerate(told)]
                )
        else:
            assert words[0] == "quantize", words
            if told := here(words[1:], folder):
                quantize(folder, *told)


def served_run(folder: Path) -> str:
    """Return a run whose recipe limits no denoising steps, which servers do not report."""
    fields = yaml.safe_load(shipped_recipes()["nvfp4"]) | {"name": "served"}
    fields["gate"] |= {"max_step_inflation": None}
    fields["bundled"]["gate"] |= {"max_step_inflation": None}
    recipe = folder / "served.yaml"
    recipe.write_text(yaml.safe_dump(fields))
    quantize(folder, "run", "--recipe", str(recipe), *TWO, "--until", "fidelity")
    return newest(folder, "served")


def serves(words: list[str], folder: Path) -> None:
    """Start a server as the page says, on a free port, ask for its models, and end it."""
    told = ["bundled" if word == "ORG/NAME" else word for word in here(words, folder)]
    command = [sys.executable, "-m", "quantize", "serve", *told, "--port", "0"]
    environment = os.environ | {"QUANTIZE_API_KEY": KEY}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, cwd=folder
    ) as server:
        assert server.stderr is not None
        seen = ""
        while not (port := re.search(r"at http://\S+:(\d+)", seen)):
            line = server.stderr.readline()
            assert line, seen
            seen += line
        try:
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port[1]}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
            )
            assert urllib.request.urlopen(asked, timeout=30).status == 200
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def test_blocks_are_found() -> None:
    assert len(FOUND) >= 7
