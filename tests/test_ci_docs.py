"""docs/ci.md: its workflow, commands and files exist, and its exit codes are those of the help."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from quantize.cli import EXIT_CODES, cli
from quantize.runs.folder import RunDir

TEXT = (Path(__file__).parents[1] / "docs" / "ci.md").read_text("utf-8")


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (job,) = yaml.safe_load(block)["jobs"].values()
    return job["steps"]


def test_every_command_exists_with_its_options(steps: list[dict[str, Any]]) -> None:
    lines = [line for step in steps for line in str(step.get("run", "")).splitlines()]
    lines += re.findall(r"`(quantize [a-z]+[^`]*)`", TEXT)
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("quantize ")]
    assert {command[0] for command in commands} == {"plan", "run", "card", "push", "report"}
    for name, *words in commands:
        done = CliRunner().invoke(cli, [name, "--help"])
        assert done.exit_code == 0, name
        for option in (word for word in words if word.startswith("--")):
            assert f"{option} " in done.output + " ", f"{name} {option}"


def test_the_files_that_are_kept_are_those_that_a_run_leaves(steps: list[dict[str, Any]]) -> None:
    (kept,) = [step["with"]["path"].split() for step in steps if "upload" in step.get("uses", "")]
    run = RunDir(Path("outputs/nvfp4-0123abc"))
    reports = (run.report_json, run.report_md, run.report_html, run.junit_xml)
    left = [*reports, run.manifest_json, run.recipe_yaml]
    assert [any(path.match(pattern) for pattern in kept) for path in left] == [True] * len(left)
    assert all(any(path.match(pattern) for path in left) for pattern in kept)
    assert [step["if"] for step in steps if "if" in step] == ["always()"]


def test_exit_codes_are_those_of_the_help() -> None:
    stated = re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)
    assert stated == re.findall(r"^  (\d+) ", EXIT_CODES, re.MULTILINE)
