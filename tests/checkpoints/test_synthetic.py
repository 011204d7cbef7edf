"""The synthetic checkpoint has the real one's layout, and a forward pass over it is sane."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

from quantize.checkpoints.config_form import google_form
from quantize.checkpoints.layout import bf16_layout
from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.shards import plan_shards
from quantize.errors import InputError
from tests.support.synthetic import (
    _piece,
    _write_tokenizer,
    main,
    synthetic_config,
    write_synthetic,
)
from tests.support.tiny import tiny_config

REAL = {"tensors": 1047, "bytes": 51_647_562_456, "shards": 11}  # google/diffusiongemma-26B-A4B-it


def small_config() -> dict[str, Any]:
    config = google_form(tiny_config().to_dict())
    config["text_config"]["vocab_size"] = 1024
    return config | {"image_token_id": 1023, "boi_token_id": 1022, "eoi_token_id": 1021}


def test_full_size_has_the_real_layout():
    layout = bf16_layout(synthetic_config())
    shards = plan_shards([_piece(n, s, 0) for n, s in layout.items()], 5e9)
    total = sum(piece.nbytes for shard in shards for piece in shard.pieces)
    assert {"tensors": len(layout), "bytes": total, "shards": len(shards)} == REAL


def test_fewer_layers_keep_the_shapes():
    real, small = bf16_layout(synthetic_config()), bf16_layout(synthetic_config(8, 16, 2, 4096))
    for name, spec in small.items():
        if any(part in name for part in ("embed_tokens", "router", "experts", "layers.7.")):
            continue
        assert spec == real[name]
    assert small["model.decoder.layers.0.experts.gate_up_proj"].shape == (16, 1408, 2816)
    assert "model.decoder.layers.5.self_attn.v_proj.weight" not in small  # the full layer
    assert "model.decoder.layers.6.self_attn.v_proj.weight" in small
    assert "model.decoder.layers.7.self_attn.v_proj.weight" not in small  # the last one is full


def test_the_smallest_still_has_a_sliding_and_a_full_layer():
    types = synthetic_config(layers=2)["text_config"]["layer_types"]
    assert types == ["sliding_attention", "full_attention"]
    with pytest.raises(InputError, match="at least 2 layers"):
        synthetic_config(layers=1)


def test_same_seed_same_bytes_and_a_finite_spread_forward_pass(tmp_path: Path):
    a = write_synthetic(tmp_path / "a", small_config(), max_shard_bytes=300_000)
    b = write_synthetic(tmp_path / "b", small_config(), max_shard_bytes=300_000)
    c = write_synthetic(tmp_path / "c", small_config(), seed=1, max_shard_bytes=300_000)
    shards = sorted(p.name for p in a.glob("*.safetensors"))
    assert len(shards) > 2
    assert all((a / s).read_bytes() == (b / s).read_bytes() for s in shards)
    assert any((a / s).read_bytes() != (c / s).read_bytes() for s in shards)
    with pytest.raises(InputError, match="exists already"):
        write_synthetic(a, small_config())

    model = load(a)
    routed: list[torch.Tensor] = []
    for layer in model.model.decoder.layers:
        layer.router.register_forward_hook(lambda _m, _i, out: routed.append(out[2]))
    ids = torch.randint(3, 1000, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids, decoder_input_ids=ids[:, :16]).logits
    assert logits.isfinite().all()
    assert 0.05 < logits.std() < 20
    assert len(routed) == 6
    for index in routed:
        share = torch.bincount(index.flatten(), minlength=8) / index.numel()
        assert share.max() < 0.5  # 1/8 when even


def test_stand_in_tokenizer_has_every_id_and_the_real_control_tokens(tmp_path: Path):
    _write_tokenizer(tmp_path, synthetic_config())
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(262_144))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7+3?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    # ids of the real prompt format: <bos><|turn>user\n ... <turn|>\n<|turn>model\n<|channel>
    assert ids[:2] == [2, 105]
    assert [i for i in ids if i in (100, 101, 105, 106, 107)] == [
        105,
        107,
        106,
        107,
        105,
        107,
        100,
        107,
        101,
    ]
    assert tokenizer.convert_tokens_to_ids(["<|image|>", "<|image>", "<image|>"]) == [
        258_880,
        255_999,
        258_882,
    ]


def test_one_command_writes_it(tmp_path: Path):
    options = ["--layers", "2", "--experts", "1", "--vision-layers", "1", "--vocabulary", "1024"]
    result = CliRunner().invoke(main, [str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    assert len(Checkpoint.open(tmp_path / "out").tensors) == 69
