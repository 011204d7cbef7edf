"""docs/recipes.md: its reference is what the model says, and its worked examples do what they claim."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantize.checkpoints.reader import known_config
from quantize.checkpoints.targets import Target, plan_targets
from quantize.recipe.reading import load_recipe, parse_recipe, resolved, shipped_recipes
from quantize.recipe.sections import Recipe
from quantize.stages.evaluate.tasks import open_tasks
from quantize.stages.plan.estimate import cannot_pass
from quantize.stages.plan.plan import tensors_from_config
from tests.support.recipe_reference import PAGE, page


def test_the_reference_is_generated() -> None:
    text = PAGE.read_text("utf-8")
    assert text == page(text), "run: python -m tests.support.recipe_reference"


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        is_section = isinstance(value, dict) and key in Recipe.model_fields
        base[key] = merged(base[key], value) if is_section else value
    return base


def example(title: str, folder: Path) -> Recipe:
    """The NVFP4 recipe with the changed lines of the example under `title`."""
    found = re.search(rf"^### {title}$.*?```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.S | re.M)
    assert found, title
    fields = merged(yaml.safe_load(shipped_recipes()["nvfp4"]), yaml.safe_load(found[1]))
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(fields))
    return load_recipe(str(path))


def schemes(recipe: Recipe) -> dict[str, str | None]:
    config = known_config("google/diffusiongemma-26B-A4B-it")
    assert config is not None
    targets: list[Target] = plan_targets(tensors_from_config(config), recipe.quantization)
    return {target.name: target.scheme and target.scheme.name for target in targets}


def test_keep_a_layer_in_bf16(tmp_path: Path) -> None:
    found = schemes(example("Keep a layer in BF16", tmp_path))
    before = schemes(load_recipe("nvfp4"))
    changed = {name for name in before if found[name] != before[name]}
    assert changed == {n for n in before if ".decoder.layers.0." in n and before[n]}
    assert changed


def test_mix_schemes(tmp_path: Path) -> None:
    found = schemes(example("Mix schemes", tmp_path))
    assert {found[name] for name in found if ".experts." in name} == {"NVFP4"}
    assert {found[n] for n in found if re.search(r"decoder.*(\.mlp\.|_proj\.w)", n)} == {
        "FP8_DYNAMIC",
        None,  # self-conditioning
    }


def test_calibrate_on_other_data(tmp_path: Path) -> None:
    calibration = example("Calibrate on other data", tmp_path).calibration
    assert calibration is not None
    assert (calibration.datasets, calibration.prompts) == (["chats.jsonl"], 128)
    assert calibration.canvases == 2  # the rest stays


def test_two_limits_of_tokens_one_set_of_answers() -> None:
    section = (
        PAGE.read_text("utf-8").partition("### Two limits of tokens")[2].partition("\n### ")[0]
    )
    (changes,) = re.findall(r"```yaml\n(.*?)```", section, re.S)
    fields = yaml.safe_load(shipped_recipes()["nvfp4"]) | yaml.safe_load(changes)
    recipe = parse_recipe(yaml.safe_dump(fields), "mine")
    assert recipe.gate.margin_pp["gpqa_8k"] == recipe.gate.margin_pp["gpqa_diamond_thinking"]
    assert recipe.evaluation.answer_tokens("gpqa_8k") == 8192


def test_score_it_on_your_own_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's files, made as it says, are the tasks of a run on the bundled model."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text("utf-8")
    section = text.partition("### Score it on your own questions\n")[2].partition("\n## ")[0]
    (questions, totals, changes) = re.findall(r"```(?:json|yaml)\n(.*?)```", section, re.S)
    Path("orders.jsonl").write_text(questions)
    Path("totals.yaml").write_text(totals)
    for name in ("nvfp4", "fp8_dynamic"):
        fields = yaml.safe_load(shipped_recipes()[name]) | yaml.safe_load(changes)
        if "calibration" not in fields:
            del fields["bundled"]
        Path("mine.yaml").write_text(yaml.safe_dump(fields))
        recipe = resolved("mine.yaml", bundled=True)
        assert "warning" not in capsys.readouterr().err
        tasks = open_tasks(recipe.evaluation, recipe.gate, None)
        assert {task.name: task.plan.questions for task in tasks} == {"orders": 3, "totals": 3}
        assert recipe.gate.margin_pp == {"orders": 5, "totals": 5}
        assert len(cannot_pass(recipe)) == 2
