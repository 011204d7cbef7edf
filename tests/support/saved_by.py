"""Saves a tiny model, as people have it, with the transformers that is imported; says what it answers.

    PYTHONPATH=FOLDER_OF_A_TRANSFORMERS python -m tests.support.saved_by OUT

For each of VARIANTS, OUT/VARIANT is a folder that `save_pretrained` wrote (some are changed after it,
as their names say). OUT/VARIANT.logits has what that version's own class computes from the folder: the
float32 logits of a canvas behind a prompt. A folder that the class cannot load has none.
`tests/data/saved_configs` has each version's config.json of `single`.
"""

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion

from tests.support.tiny import CANVAS, VOCAB, tiny_config, tiny_model, write_tokenizer

SINGLE = "model.safetensors"
QUERY = "model.decoder.layers.1.self_attn.q_proj.weight"
ENCODER = "model.encoder.language_model."
Tensors = dict[str, torch.Tensor]


def save(model: Any, folder: Path, **options: Any) -> None:
    """Save a model with a tokenizer's files, as small as they may be."""
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)


def logits(model: Any) -> torch.Tensor:
    """Return the logits of a canvas behind a prompt of 40 tokens, longer than the window of 32."""
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, VOCAB - 3, (1, 40), generator=draw)
    canvas = torch.randint(3, VOCAB - 3, (1, CANVAS), generator=draw)
    with torch.no_grad():
        return model(input_ids=prompt, decoder_input_ids=canvas).logits.float()


def edited(change: Callable[[Tensors], object], **config: Any) -> Callable[[Path], None]:
    """Return a variant whose tensors, and keys of config.json, are changed once they are saved."""

    def write(folder: Path) -> None:
        save(tiny_model(), folder)
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | config))

    return write


def with_copies(tensors: Tensors) -> None:
    """Add lm_head and the encoder's text weights, equal to the decoder's."""
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
    for name in [n for n in tensors if n.startswith("model.decoder.")]:
        if "self_conditioning" not in name and "layer_scalar" not in name:
            tensors[name.replace("model.decoder.", ENCODER, 1)] = tensors[name].clone()


def merged(*, decoder: bool) -> Callable[[Tensors], None]:
    """A low-rank change merged into one side alone; the other side's copies are there too."""

    def change(tensors: Tensors) -> None:
        with_copies(tensors)
        name = QUERY if decoder else QUERY.replace("model.decoder.", ENCODER, 1)
        draw = torch.Generator().manual_seed(2)
        rows, columns = tensors[name].shape
        low = torch.randn(rows, 2, generator=draw) @ torch.randn(2, columns, generator=draw)
        tensors[name] = (tensors[name] + 0.5 * low).bfloat16()

    return change


def own_head(tensors: Tensors) -> None:
    draw = torch.Generator().manual_seed(3)
    shape = tensors["model.decoder.embed_tokens.weight"].shape
    tensors["lm_head.weight"] = torch.randn(shape, generator=draw).bfloat16() / 8


def under_encoder_names(tensors: Tensors) -> None:
    """As a tool that walks `named_parameters` names them: the encoder comes first there."""
    for name in [n for n in tensors if n.startswith("model.decoder.layers.")]:
        if "layer_scalar" not in name:
            tensors[name.replace("model.decoder.", ENCODER, 1)] = tensors.pop(name)


def without_vision(tensors: Tensors) -> None:
    for name in [n for n in tensors if ".vision_tower." in n or ".embed_vision." in n]:
        del tensors[name]


def other_sizes(**text: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        fields = tiny_config().to_dict()
        fields["text_config"].pop("per_layer_config", None)
        sizes = {"global_head_dim": 32, "num_global_key_value_heads": 1} | text
        fields["text_config"] |= sizes
        torch.manual_seed(4)
        model = DiffusionGemmaForBlockDiffusion(type(tiny_config())(**fields)).bfloat16()
        save(model, folder)

    return write


def two_sets(folder: Path) -> None:
    save(tiny_model(), folder, max_shard_size="300KB")
    save(tiny_model(seed=5), folder.with_name("other"))
    shutil.move(folder.with_name("other") / SINGLE, folder / SINGLE)
    shutil.rmtree(folder.with_name("other"))


def beside(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save(tiny_model(), folder)
        (folder / name).write_text(content)

    return write


def wrong_total(folder: Path) -> None:
    save(tiny_model(), folder, max_shard_size="300KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 2
    path.write_text(json.dumps(index))


VARIANTS: dict[str, Callable[[Path], None]] = {
    "single": lambda folder: save(tiny_model(), folder),
    "sharded": lambda folder: save(tiny_model(), folder, max_shard_size="300KB"),
    "fp32": lambda folder: save(tiny_model().float(), folder),
    "fp16": lambda folder: save(tiny_model().half(), folder),
    "as many full heads": other_sizes(num_global_key_value_heads=None),
    "all layers alike": other_sizes(global_head_dim=16, num_global_key_value_heads=2),
    "seen by all": other_sizes(use_bidirectional_attention="all"),
    "copies": edited(with_copies),
    "copies, said to be untied": edited(with_copies, tie_word_embeddings=False),
    "said to be untied": edited(lambda _: None, tie_word_embeddings=False),
    "merged into the decoder": edited(merged(decoder=True)),
    "merged into the encoder": edited(merged(decoder=False)),
    "merged, said to be untied": edited(merged(decoder=True), tie_word_embeddings=False),
    "own head": edited(own_head),
    "own head, said to be untied": edited(own_head, tie_word_embeddings=False),
    "under encoder names": edited(under_encoder_names),
    "text only": edited(without_vision),
    "text only, said so": edited(without_vision, vision_config=None),
    "base model": lambda folder: save(tiny_model().model, folder),
    "two sets": two_sets,
    "adapter beside": beside("adapter_config.json", '{"peft_type": "LORA"}'),
    "samples": beside("generation_config.json", '{"do_sample": true, "top_k": 64}'),
    "quantization null": edited(lambda _: None, quantization_config=None),
    "wrong total": wrong_total,
}


def main(out: Path) -> None:
    """Write every variant, and what this transformers computes from it."""
    logging.disable(logging.CRITICAL)
    for name, write in VARIANTS.items():
        folder = out / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(folder)
            loaded: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype="auto")
            save_file({"logits": logits(loaded.eval())}, out / f"{name}.logits")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:150]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
