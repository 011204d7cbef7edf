"""The layouts that ship against those that transformers builds, and what a layout is found by."""

import json
from typing import Any

import pytest

from quantize.bundled import CHECKPOINT
from quantize.checkpoints import layout
from quantize.checkpoints.config_form import SIZES, google_form
from quantize.checkpoints.layout import KNOWN, bf16_layout, built, shape_key
from quantize.checkpoints.reader import known_config, read_json_object
from tests.support import layouts
from tests.support.tiny import tiny_config

SHAPELESS = {"top_k_experts", "sliding_window", "max_position_embeddings", "pooling_kernel_size"}
FLAGS = {"text_config": ["layer_types"], "vision_config": ["standardize", "use_clipped_linears"]}
CHANGES = [
    (section, key)
    for section in ("text_config", "vision_config")
    for key in (*SIZES[section], *FLAGS[section])
    if key not in SHAPELESS and (section, key) != ("text_config", "num_hidden_layers")
]


def tiny() -> dict[str, Any]:
    return google_form(tiny_config().to_dict())


def test_what_ships_is_what_transformers_builds() -> None:
    assert json.loads(KNOWN.read_text("utf-8")) == layouts.shapes()


def test_known_models_need_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = known_config("google/diffusiongemma-26B-A4B-it")
    assert real is not None
    configs = [real, read_json_object(CHECKPOINT / "config.json")]
    expected = [built(config) for config in configs]
    monkeypatch.setattr(layout, "built", lambda _: {})
    assert [bf16_layout(config) for config in configs] == expected
    assert len(expected[0]) == 1047
    assert bf16_layout(tiny()) == {}  # transformers is asked


@pytest.mark.parametrize(("section", "key"), CHANGES)
def test_all_that_shapes_depend_on_is_in_the_key(section: str, key: str) -> None:
    config = tiny()
    before, plain = shape_key(config), bf16_layout(config)
    value = config[section][key]
    if key == "layer_types":
        value = ["full_attention" for _ in value]
    elif isinstance(value, bool):
        value = not value
    else:
        value *= 2
    config[section][key] = value
    assert shape_key(config) != before
    assert bf16_layout(config) == built(config) != plain


def test_fewer_layers() -> None:
    config = tiny()
    config["text_config"] |= {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
    }
    assert shape_key(config) != shape_key(tiny())
    assert bf16_layout(config) == built(config)
