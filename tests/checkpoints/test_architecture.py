"""The layout that is spelled out against the one that transformers builds: every name, every shape."""

from typing import Any

import pytest
from tiny import tiny_config

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.architecture import TEXT_SIZES, VISION_SIZES, spelled_out
from quantize.checkpoints.layout import bf16_layout, built
from quantize.checkpoints.reader import known_config, read_json_object

CHANGES = [
    *(("text_config", key) for key in TEXT_SIZES if key != "num_hidden_layers"),
    *(("vision_config", key) for key in VISION_SIZES),
]


def tiny() -> dict[str, Any]:
    """The tiny config with every size said, as Google's says them."""
    config = tiny_config().to_dict()
    config["text_config"] |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    del config["text_config"]["per_layer_config"]
    return config


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
        ("text_config", {"num_global_key_value_heads": None}),
        ("text_config", {"attention_bias": True}),
        ("text_config", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}),
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
