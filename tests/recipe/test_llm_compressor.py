"""llm-compressor's recipe files: what they become, and what is refused by name."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.errors import InputError, ResourceError
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Recipe
from quantize.schemes.records import SCHEMES
from tests.support.llm_compressor_oracle import need_llm_compressor

IGNORE = ["lm_head", "re:.*router.*", "re:.*self_conditioning.*", "re:.*vision.*"]
PRESET = {"scheme": "NVFP4", "targets": "Linear", "ignore": IGNORE}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}


def read(folder: Path, arguments: dict[str, Any], modifier: str = "QuantizationModifier") -> Recipe:
    need_llm_compressor()
    return load(folder, arguments, modifier)


def load(folder: Path, arguments: dict[str, Any], modifier: str) -> Recipe:
    file = folder / "My recipe-1.yaml"
    file.write_text(yaml.safe_dump({"quant_stage": {"quant_modifiers": {modifier: arguments}}}))
    return load_recipe(str(file))


@pytest.mark.parametrize(
    ("modifier", "scheme", "ours", "rounding"),
    [
        ("QuantizationModifier", "NVFP4", "NVFP4", "nearest"),
        ("QuantizationModifier", "FP8_DYNAMIC", "FP8_DYNAMIC", "nearest"),
        ("GPTQModifier", "W8A8", "INT8_DYNAMIC", "gptq"),
    ],
)
def test_examples_become_recipes_once_their_ignores_are_there(
    tiny_checkpoint: Path, tmp_path: Path, modifier: str, scheme: str, ours: str, rounding: str
) -> None:
    tensors = Checkpoint.open(tiny_checkpoint).tensors
    example = {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]}
    with pytest.raises(InputError, match="would quantize") as caught:
        plan_targets(tensors, read(tmp_path, example, modifier).quantization)
    for entry in IGNORE[1:]:
        assert f'"{entry}"' in str(caught.value)

    recipe = read(tmp_path, {**example, "ignore": IGNORE}, modifier)
    targets = plan_targets(tensors, recipe.quantization)
    assert {t.scheme.name for t in targets if t.scheme} == {ours}
    assert recipe.name == "my_recipe_1"
    assert recipe.quantization.rounding == rounding
    assert recipe.calibration is not None
    if rounding == "gptq":
        bundled = recipe.for_bundled_model().calibration
        assert bundled
        assert bundled.datasets == ["bundled"]
    assert recipe.verification.max_relative_error == {ours: SCHEMES[ours].largest_error(rounding)}
    assert (SCHEMES[ours].largest_error(rounding) > SCHEMES[ours].max_relative_error) == (
        rounding == "gptq"
    )


def test_config_groups_and_presets_say_the_same(tmp_path: Path) -> None:
    groups = read(tmp_path, {"config_groups": {"group_0": GROUP}, "ignore": IGNORE})
    preset = read(tmp_path, {**PRESET, "scheme": "FP8_DYNAMIC"})
    assert groups.quantization == preset.quantization
    mixed = {"NVFP4": ["re:.*experts.*"], "FP8_DYNAMIC": ["re:.*self_attn.*"]}
    recipe = read(tmp_path, {"scheme": mixed, "ignore": IGNORE, "weight_observer": "mse"})
    assert recipe.quantization.targets_by_scheme() == mixed
    assert recipe.quantization.observer == "memoryless_mse"


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**GROUP, **changes}}, "ignore": IGNORE}


@pytest.mark.parametrize(
    ("modifier", "arguments", "message"),
    [
        ("SmoothQuantModifier", {"smoothing_strength": 0.8}, "SmoothQuantModifier: only"),
        ("QuantizationModifier", {**PRESET, "schema": 1}, "schema: llm-compressor"),
        ("QuantizationModifier", {**PRESET, "scheme": "NVFP5"}, "QuantizationModifier.scheme"),
        ("GPTQModifier", {**PRESET, "scheme": "W4A16"}, "scheme: weights of .'int', 4"),
        ("GPTQModifier", {**PRESET, "actorder": "static"}, "actorder: inputs are rounded"),
        ("GPTQModifier", {**PRESET, "weight_observer": "mse"}, "weight_observer: GPTQ chooses"),
        ("GPTQModifier", {**PRESET, "dampening_frac": 0.1}, "dampening_frac: it is 0.01"),
        ("QuantizationModifier", {**PRESET, "targets": "Embedding"}, "not 'Embedding'"),
        ("QuantizationModifier", {**PRESET, "weight_observer": "imatrix_mse"}, "weight_observer: no"),
        ("QuantizationModifier", {**PRESET, "input_observer": "mse"}, "input_observer: mse"),
        (
            "QuantizationModifier",
            {**PRESET, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            "kv_cache_scheme",
        ),
        (
            "QuantizationModifier",
            group(output_activations=GROUP["input_activations"]),
            "output_activations",
        ),
        (
            "QuantizationModifier",
            group(weights={**GROUP["weights"], "symmetric": False}),
            "scheme: weights of",
        ),
        *(
            (modifier, group(weights={**GROUP["weights"], "actorder": "static"}), "actorder: inputs")
            for modifier in ("GPTQModifier", "QuantizationModifier")
        ),
        *(
            (
                "QuantizationModifier",
                group(**{part: {**GROUP[part], "observer_kwargs": {"norm": 2}}}),
                "observer_kwargs: observers have no settings",
            )
            for part in ("weights", "input_activations")
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, modifier: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, arguments, modifier)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quant_stage: {quant_modifiers: {}}", "it has 0 modifiers"),
        ("quant_stage: {modifiers: {}}", "not a group of modifiers"),
        ("{quant_stage: {quant_modifiers: {}}, quantization: {}}", "quantization: not a stage"),
    ],
)
def test_a_file_without_one_modifier_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_recipe(str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'llmcompressor'"),
        ImportError("cannot import name 'PreTrainedModel' from 'transformers'"),  # a later one
    ],
)
def test_without_llm_compressor_one_line_says_what_to_install(
    error: ImportError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "llmcompressor"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without("llmcompressor", error), *sys.meta_path])
    with pytest.raises(ResourceError) as caught:
        load(tmp_path, PRESET, "QuantizationModifier")
    assert str(caught.value) == (
        f"recipe {tmp_path / 'My recipe-1.yaml'}: a recipe file of llm-compressor needs "
        f"llmcompressor ({error}): pip install 'diffusiongemma-quantize[llmcompressor]'"
    )


class Without:
    """Answers for a package that it cannot be imported."""

    def __init__(self, package: str, error: ImportError) -> None:
        self.package, self.error = package, error

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == self.package:
            raise self.error
