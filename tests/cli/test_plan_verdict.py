"""What `quantize plan` and `run` say of a gate before any answer: out of reach, or not used."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from quantize.cli import cli
from quantize.pipeline.run import started
from quantize.recipe.reading import load_recipe, shipped_recipes


def recipe_file(folder: Path, **changes: Any) -> Path:
    fields = yaml.safe_load(shipped_recipes()["fp8_dynamic"])
    for section, keys in changes.items():
        fields[section] |= keys
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def plan(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["plan", *map(str, words)], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


def test_a_plan_whose_gate_cannot_pass_ends_with_4(tmp_path: Path) -> None:
    assert plan("--recipe", "fp8_dynamic")[0] == 0
    path = recipe_file(tmp_path)
    assert plan("--recipe", path)[0] == 0
    code, _ = plan("--recipe", path, "--limit", 20)
    assert code == 4
    run = ["run", "--recipe", str(path), "--limit", "20", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, [*run, "--until", "plan"], standalone_mode=False)
    assert done.return_value == 4
    done = CliRunner().invoke(cli, [*run, "--until", "convert", "--resume"], standalone_mode=False)
    assert done.return_value == 0  # what was asked for is done


def test_a_plan_of_the_bundled_model_says_what_is_asked_and_judged() -> None:
    code, told = plan("--recipe", "nvfp4")
    told = " ".join(told.split())
    assert code == 0
    assert "word_problems 400 128 5 points" in told
    assert "judged after 20%, 30%, 40%, 50%, 60%, 70%, 85%, 100% of 400 questions x 1" in told
    assert "KL at most 0.015 nats (none), 0.025 nats (per_layer); steps at most 10% more" in told
    assert "--gpu NAME" in told


def test_a_plan_of_the_real_model_says_what_judging_takes() -> None:
    code, told = plan("--recipe", "nvfp4", "--model", "google/diffusiongemma-26B-A4B-it")
    told = " ".join(told.split())
    assert code == 0
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
    rows = re.findall(r"(none|half the margin|the margin) (\d+)% (\d+)% (\d+)% (\S+) h ", told)
    assert [row[0] for row in rows] == ["none", "half the margin", "the margin"]
    assert all("| {} | {} % | {} % | {} % | {} |".format(*row) in page for row in rows)
    assert "asks only its own model: BF16's answers stay" in told
    assert "BF16 reads them again beside each model" in told
    assert "held-out trajectories" not in told


def test_a_plan_with_a_limit_says_how_much_is_replayed() -> None:
    real = ("--model", "google/diffusiongemma-26B-A4B-it")
    for words, said in (
        ((), "replay: 8 held-out trajectories"),
        (real, "replay: 8 of 16 held-out"),
    ):
        _, told = plan("--recipe", "nvfp4", "--limit", 40, *words)
        assert said in " ".join(told.split())


def test_keys_that_the_bundled_section_replaces_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_file(tmp_path, gate={"max_step_inflation": 0.3})
    assert "gate.max_step_inflation" in load_recipe(str(path)).unused_on_bundled()
    with started(str(path), None, tmp_path / "out", resume=False):
        pass
    said = " ".join(capsys.readouterr().err.split())
    assert "warning:" in said
    assert "gate.max_step_inflation" in said
    _, planned = plan("--recipe", path)  # which is looked at first
    assert "warning:" in planned
    assert "gate.max_step_inflation" in planned
    _, planned = plan("--recipe", recipe_file(tmp_path))  # a copy without an edit
    assert "warning" not in planned
    with started("fp8_dynamic", None, tmp_path / "shipped", resume=False):
        pass
    assert "warning" not in capsys.readouterr().err
