"""The layout that is spelled out against the one that transformers builds: every name, every shape."""

from typing import Any

import pytest
from tiny import tiny_config

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.architecture import spelled_out
from quantize.checkpoints.config_form import SIZES, google_form
from quantize.checkpoints.layout import bf16_layout, built
from quantize.checkpoints.reader import known_config, read_json_object

SHAPELESS = {"top_k_experts", "sliding_window", "max_position_embeddings", "pooling_kernel_size"}
CHANGES = [
    (section, key)
    for section in ("text_config", "vision_config")
    for key in SIZES[section]
    if key not in SHAPELESS and (section, key) != ("text_config", "num_hidden_layers")
]


def tiny() -> dict[str, Any]:
    return google_form(tiny_config().to_dict())


@pytest.mark.parametrize("config", [tiny(), read_json_object(CHECKPOINT / "config.json")])
def test_a_small_layout_is_transformers(config: dict[str, Any]) -> None:
    assert spelled_out(config) == built(config)


def test_the_real_layout_is_transformers() -> None:
    config = known_config("google/diffusiongemma-26B-A4B-it")
    assert config is not None
    found = spelled_out(config)
    assert found is not None
    assert len(found) == 1047
    assert found == built(config)


@pytest.mark.parametrize(("section", "key"), CHANGES)
def test_every_size_counts(section: str, key: str) -> None:
    config = tiny()
    before = spelled_out(config)
    config[section][key] *= 2
    assert spelled_out(config) == built(config)
    assert spelled_out(config) != before


def test_fewer_layers() -> None:
    config = tiny()
    config["text_config"] |= {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
    }
    assert spelled_out(config) == built(config)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("vision_config", {"standardize": False}),
        ("vision_config", {"use_clipped_linears": True}),
    ],
)
def test_what_is_not_spelled_out_is_asked_of_transformers(
    section: str, fields: dict[str, Any]
) -> None:
    config = tiny()
    config[section] |= fields
    assert spelled_out(config) is None
    assert bf16_layout(config) == built(config)
