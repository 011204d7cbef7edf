"""Every command that a model card prints is run, or read by a parser, against what was judged."""

import ast
import json
import re
import shlex
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

import click
import pytest
import yaml

from quantize.bundled import CHECKPOINT
from quantize.cli import cli
from quantize.host.files import read_json
from quantize.recipe.reading import parse_recipe
from quantize.reports.card import SERVING
from quantize.runtime import Sampler
from tests.support.quick_run import Quick

ROOT = Path(__file__).parents[2]
# vLLM's, as docs/upstream and serving.yaml's comment name its version; argparse refuses any other flag.
VLLM = ArgumentParser(allow_abbrev=False, exit_on_error=False)
VLLM.add_argument("model")
VLLM.add_argument("--max-num-seqs", type=int)
VLLM.add_argument("--override-generation-config", type=json.loads)
VLLM.add_argument("--diffusion-config", type=json.loads)
VLLM.add_argument("--attention-backend")
VLLM.add_argument("--reasoning-parser")
VLLM.add_argument("--middleware")


@pytest.fixture(scope="module")
def with_point(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny model, judged at 10 steps too."""
    folder = tmp_path_factory.mktemp("point")
    with pytest.MonkeyPatch.context() as patch:
        quantize = Quick(folder, tiny_checkpoint, patch)
        licence = "---\nlicense: apache-2.0\n---\n"
        (quantize.model / "README.md").write_text(licence)
        assert quantize.run().code == 0
        assert quantize("evaluate", quantize.folder.path, "--steps", 10).code == 0
        assert quantize("report", quantize.folder.path).code == 0
    return folder


@pytest.fixture
def quick(with_point: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quick:
    """A copy of that run, of the same model."""
    return Quick(tmp_path, with_point, monkeypatch, copy=True)


def card_of(quick: Quick) -> dict[str, list[str]]:
    """Write a run's card, and return its code blocks by language."""
    done = quick("card", quick.folder.path)
    assert done.code == 0, done.err
    text = (quick.folder.checkpoint / "README.md").read_text()
    blocks: dict[str, list[str]] = {}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        blocks.setdefault(language, []).append(block)
    assert set(blocks) == {"", "python", "yaml"}
    return blocks


def commands(card: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the commands of a card, split into words, by program and what it does."""
    lines = "".join(card[""]).replace("\\\n", " ").splitlines()
    split = [shlex.split(line) for line in lines if line.strip()]
    by_program = {" ".join(words[:2]): words[2:] for words in split}
    assert set(by_program) == {
        "pip install",
        "vllm serve",
        "docker run",
        "quantize generate",
        "quantize run",
    }
    return by_program


def judged_sampler(quick: Quick, model: str) -> dict[str, object]:
    (path,) = (quick.folder.evaluation / model).glob("*.conditions.json")
    return read_json(path)["made_with"]["sampler"]


@pytest.mark.parametrize(("adopted", "model"), [(None, "quantized"), ("t10", "quantized-at-t10")])
def test_vllm_serves_what_was_judged(adopted: str | None, model: str, quick: Quick) -> None:
    if adopted:
        assert quick("adopt", quick.folder.path, adopted).code == 0
    found, sampler = commands(card_of(quick)), judged_sampler(quick, model)
    served: Namespace = VLLM.parse_args(found["vllm serve"])
    config = read_json(quick.folder.checkpoint / "config.json")
    diffusion = served.diffusion_config
    assert diffusion.pop("canvas_length") == config["canvas_length"]
    assert diffusion.get("max_denoising_steps", 48) == sampler["max_denoising_steps"]
    assert set(diffusion) <= {"max_denoising_steps"}
    assert served.override_generation_config == {"max_new_tokens": None}  # nothing of the sampler
    stated = asdict(Sampler.from_checkpoint(quick.folder.checkpoint))
    assert json.loads(json.dumps(stated)) == sampler
    words = found["docker run"]
    inside = words[words.index("vllm") + 1 :]
    assert VLLM.parse_args(inside) == VLLM.parse_args(found["vllm serve"])
    assert words[words.index("--entrypoint") + 2] == SERVING["image"]
    (plugin,) = found["pip install"]
    assert (ROOT / plugin / "pyproject.toml").is_file()
    middleware = served.middleware.partition(".")[0]
    assert (ROOT / plugin / f"{middleware}.py").is_file() or (ROOT / plugin / middleware).is_dir()


def test_our_own_commands_and_python_run_in_a_release(quick: Quick) -> None:
    """In the bundled model's folder: the tiny model's vocabulary has no word of a chat."""
    assert quick("adopt", quick.folder.path, "t10").code == 0
    card = card_of(quick)
    found, recipe = (
        commands(card),
        parse_recipe(quick.folder.recipe_yaml.read_text(), "recipe.yaml"),
    )
    quick.monkeypatch.chdir(CHECKPOINT)
    words = found["quantize generate"]
    assert words[words.index("--activations") + 1] == recipe.evaluation.activations
    done = quick("generate", *words, "--max-new-tokens", 16)
    assert done.code == 0, done.err
    (python,) = card["python"]
    assert f'activations="{recipe.evaluation.activations}"' in python
    tree = ast.parse(python.replace("max_new_tokens=256", "max_new_tokens=16"))
    exec(compile(tree, "card", "exec"), {})


def test_a_run_of_the_cards_recipe_would_make_the_same_release(quick: Quick) -> None:
    """Of the same model, which stands in no public place here, and with the settings of the point."""
    assert quick("adopt", quick.folder.path, "t10").code == 0
    card = card_of(quick)
    (text,) = card["yaml"]
    assert parse_recipe(text, "card") == parse_recipe(quick.folder.recipe_yaml.read_text(), "run")
    assert yaml.safe_load(text)
    words = commands(card)["quantize run"]
    run = cli.get_command(click.Context(cli), "run")
    assert run is not None
    with run.make_context("run", list(words)) as parsed:
        assert parsed.params["recipe"] == "recipe.yaml"
        assert parsed.params["model"], "without --model the bundled model would be quantized"
    readme = (quick.folder.checkpoint / "README.md").read_text()
    assert "`quantize adopt RUN t10`" in readme


def test_card_says_which_tasks_get_no_file_of_scores(quick: Quick) -> None:
    """Its help promised machine-readable scores, and of the bundled model's task there were none."""
    done = quick("card", quick.folder.path)
    assert "no .eval_results of word_problems: not judged, or no data set on the Hub" in done.last
    assert not (quick.folder.checkpoint / ".eval_results").exists()
    assert "AIME, GPQA, GSM8K, SVAMP" in " ".join(quick("card", "--help").out.split())
