"""Writes a random BF16 checkpoint in the exact layout of the real one, at full size or smaller.

    python -m tests.support.synthetic OUT            # 1,047 tensors, 51.6 GB, 11 shards
    python -m tests.support.synthetic OUT --layers 2 --vision-layers 1 --vocabulary 4096 # 3.4 GB

Sizes, speed, memory and restarts can be tried with it; its answers are noise. Names, shapes, dtypes and
sharding are those of google/diffusiongemma-26B-A4B-it, whose config ships; the tokenizer is the bundled
one, its vocabulary filled up with unused tokens and its image tokens at the real ids.

Weights are scaled so that a forward pass stays finite and routing is spread: a Linear of K inputs has
a standard deviation of 1/sqrt(K), so every projection keeps the size of its normalized input; the
router's is 1, so that its logits (scaled by 1/sqrt(hidden) inside the model) have one of 1; norms are
1 + noise; layer scalars 0.1 to 0.2, as released. Every block of 16M values has a generator of its own,
seeded with its tensor's name: the same bytes on any number of threads.
"""

import hashlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.layout import TensorSpec, bf16_layout
from quantize.checkpoints.reader import known_config, read_json_object
from quantize.checkpoints.shards import Piece, plan_shards, state_path, write_shards
from quantize.checkpoints.targets import module_class
from quantize.errors import InputError
from quantize.host.files import folder_when_complete, write_json, write_text

MODEL = "google/diffusiongemma-26B-A4B-it"
MAX_SHARD_BYTES = 5e9
BLOCK_VALUES = 1 << 24
Fill = Callable[..., torch.Tensor]  # fills a tensor in place with values of a generator
SLIDING_PER_FULL = 5
GENERATION = {
    "max_new_tokens": 256, "max_denoising_steps": 48, "t_max": 0.8, "t_min": 0.4,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "stability_threshold": 1, "confidence_threshold": 0.005, "eos_token_id": [1, 106, 50],
    "pad_token_id": 0,
}  # fmt: skip


def synthetic_config(
    layers: int = 30, experts: int = 128, vision_layers: int = 27, vocabulary: int = 262_144
) -> dict[str, Any]:
    """Return the real model's config with fewer layers, experts, vision layers or tokens.

    Raises:
        InputError: there are fewer than 2 layers (one sliding, one full) or 1,024 tokens.
    """
    if layers < 2 or experts < 1 or vision_layers < 1 or vocabulary < 1024:
        raise InputError("at least 2 layers, 1 expert, 1 vision layer and 1,024 tokens are needed")
    config: dict[str, Any] = json.loads(json.dumps(known_config(MODEL)))
    text = config["text_config"]
    period = ["sliding_attention"] * min(SLIDING_PER_FULL, layers - 1) + ["full_attention"]
    # transformers makes the last layer a full one, whatever the config says
    text["layer_types"] = [*(period * layers)[: layers - 1], "full_attention"]
    text["num_hidden_layers"] = layers
    text["num_experts"] = experts
    text["top_k_experts"] = min(text["top_k_experts"], experts)
    text["vocab_size"] = vocabulary
    config["vision_config"]["num_hidden_layers"] = vision_layers
    if vocabulary < 262_144:
        ids = ("image_token_id", "boi_token_id", "eoi_token_id")
        config |= {name: vocabulary - 1 - i for i, name in enumerate(ids)}
    return config


def write_synthetic(
    out: Path, config: dict[str, Any], *, seed: int = 0, max_shard_bytes: float = MAX_SHARD_BYTES
) -> Path:
    """Write a random checkpoint of `config` to the new folder `out`, or go on with one begun there.

    Raises:
        InputError: `out` exists. ResourceError: not enough disk.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; name another folder or remove it")
    layout = bf16_layout(config)
    pieces = [_piece(name, spec, seed) for name, spec in layout.items()]
    with folder_when_complete(out, keep_partial=True) as folder:
        write_shards(plan_shards(pieces, max_shard_bytes), folder, f"{seed}", what="synthetic")
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", GENERATION)
        _write_tokenizer(folder, config)
    state_path(folder).unlink()
    return out


def _piece(name: str, spec: TensorSpec, seed: int) -> Piece:
    count, fill = math.prod(spec.shape), _filling(name, spec.shape)
    tasks = (
        partial(_block, f"{seed} {name} {start}", min(BLOCK_VALUES, count - start), fill)
        for start in range(0, count, BLOCK_VALUES)
    )
    return Piece({name: spec}, tuple(tasks))


def _block(key: str, count: int, fill: Fill) -> torch.Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(count, dtype=torch.bfloat16)
    fill(values, generator=generator)
    return values.view(torch.uint8)


def _filling(name: str, shape: tuple[int, ...]) -> Fill:
    """Return the function that fills a tensor of the name's class with random values."""
    kind = module_class(name)
    if kind == "layer_scalar":
        return lambda tensor, **how: tensor.uniform_(0.1, 0.2, **how)
    mean, std = 0.0, shape[-1] ** -0.5
    if kind == "router" and name.endswith("proj.weight"):
        std = 1.0
    elif name.endswith("std_bias"):
        std = 0.01
    elif len(shape) == 1:  # norms, router scales, the vision tower's std_scale
        mean, std = 1.0, 0.05
    return partial(torch.Tensor.normal_, mean=mean, std=std)


def _write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Write the bundled tokenizer, padded to the vocabulary, with image tokens at their real ids."""
    data = read_json_object(CHECKPOINT / "tokenizer.json")
    vocabulary: dict[str, int] = data["model"]["vocab"]
    names = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
    for token in names.values():
        vocabulary.pop(token)
    vocabulary |= {token: config[key] for key, token in names.items()}
    taken, size = set(vocabulary.values()), config["text_config"]["vocab_size"]
    vocabulary |= {f"<unused{i}>": i for i in range(size) if i not in taken}
    data["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    for token in data["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    write_text(folder / "tokenizer.json", json.dumps(data, ensure_ascii=False))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        write_text(folder / name, (CHECKPOINT / name).read_text("utf-8"))


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--layers", default=30, show_default=True)
@click.option("--experts", default=128, show_default=True)
@click.option("--vision-layers", default=27, show_default=True)
@click.option("--vocabulary", default=262_144, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(out: Path, seed: int, **shape: int) -> None:
    """Write a random checkpoint in the real model's layout to OUT."""
    write_synthetic(out, synthetic_config(**shape), seed=seed)


if __name__ == "__main__":
    main()
