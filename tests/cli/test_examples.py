"""The help of every command ends with, or holds, an example that click reads."""

import shlex
from pathlib import Path

import click
import pytest

from quantize.cli import COMMANDS, cli
from quantize.cli.examples import EXAMPLES

CONTEXT = click.Context(cli, info_name="quantize")


def leaves() -> dict[str, click.Command]:
    commands: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = cli.get_command(CONTEXT, name)
        assert command is not None
        inner = command.commands if isinstance(command, click.Group) else {}
        commands |= {f"{name} {word}": c for word, c in inner.items()} or {name: command}
    return commands


@pytest.mark.parametrize("name", leaves())
def test_each_help_shows_an_example_that_parses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()
    command = leaves()[name]
    lines = command.get_help(click.Context(command, info_name=name)).splitlines()
    examples = [line.strip() for line in lines if line.startswith("  quantize ")]
    examples += [line.strip() for line in lines if line.startswith("    quantize ")]
    assert any(line.startswith(f"quantize {name}") for line in examples), "no example"
    for line in examples:
        words = shlex.split(line, comments=True)[1:]
        words = words[: words.index(">")] if ">" in words else words
        words = words[: words.index("then")] if "then" in words else words
        chosen = next(leaf for leaf in leaves() if words[: len(leaf.split())] == leaf.split())
        with leaves()[chosen].make_context(chosen, words[len(chosen.split()) :]):
            pass


def test_no_example_is_of_a_command_that_is_not_there() -> None:
    assert set(EXAMPLES) <= set(leaves())
