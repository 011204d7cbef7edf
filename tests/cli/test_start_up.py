"""What a command imports, which is what it costs before its work begins; no clock is asked."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantize.bundled import CHECKPOINT
from quantize.cli import COMMANDS, GROUPS, cli

HELP = {"torch", "numpy", "pydantic", "yaml", "rich", "safetensors", "scipy"}
ENGINES = {
    "transformers", "triton", "compressed_tensors", "huggingface_hub", "datasets",
    "lm_eval", "sklearn", "pandas", "fastapi", "uvicorn", "jinja2", "httpx", "accelerate", "gguf",
}  # fmt: skip
SCRIPT = """
import json, sys
from quantize import cli
for command in json.loads(sys.argv[1]):
    sys.argv = ["quantize", *command]
    assert cli._exit_code() == 0, command
print("IMPORTED", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def imported(*commands: list[object]) -> set[str]:
    """Run commands in a fresh process and return the packages that it has imported then."""
    told = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, told], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("IMPORTED")[2].split())


def test_import_and_help_need_click_alone() -> None:
    found = imported(["--help"], ["run", "--help"], ["serve", "--help"])
    assert "click" in found
    assert not found & (HELP | ENGINES)


@pytest.fixture(scope="module")
def of_planning(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out: Path = tmp_path_factory.mktemp("out")
    return imported(
        ["recipes"],
        ["plan", "--model", "google/diffusiongemma-26B-A4B-it"],
        ["plan"],
        ["inspect", CHECKPOINT],
        ["run", "--recipe", "fp8_dynamic", "--until", "plan", "--out", out],
    )


def test_plan_and_inspect_import_no_engine(of_planning: set[str]) -> None:
    assert "torch" in of_planning
    assert of_planning & ENGINES == {"jinja2"}  # which compiles the chat template


def test_help_names_every_command_once_and_cuts_no_sentence() -> None:
    text = CliRunner().invoke(cli, ["--help"]).stdout
    heads = re.findall(r"^  ([a-z][a-z-]*) {2,}\S", text, re.M)
    assert sorted(heads) == sorted(COMMANDS)
    assert len(set(heads)) == len(heads) > 25
    assert "..." not in text.partition("Run:")[2]
    assert [name for name in GROUPS if f"\n{name}:\n" not in text] == []
