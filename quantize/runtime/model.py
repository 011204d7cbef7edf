"""The two forward passes of block diffusion over transformers' modules: encode, then denoise.

The causal encoder reads prompt and committed canvases into a KV cache (`Prefix`); the bidirectional
decoder reads that cache and the canvas and never writes. What a canvas query sees: in full layers
the whole prefix, in sliding layers its last `sliding_window - 1` tokens, in both the whole canvas.

Ragged batches are left-padded, so that every row ends in the same column: appended canvases line up
and a sliding layer's cache, which keeps the last columns, keeps each row's own last tokens. Positions
count a row's own tokens, and padding is masked, so a row's result does not depend on its batch
(transformers' own `generate()` numbers the padding too). Masks are built here: transformers' encoder
drops the ones it builds itself.

The dynamic cache only. transformers' static cache is wrong past the sliding window.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from quantize.errors import InputError

Masks = dict[str, Tensor | None]


@dataclass
class Prefix:
    """KV cache of the tokens encoded so far, one left-padded row a sample.

    Attributes:
        cache: keys and values per layer, [B, kv heads, columns, head dim].
        lengths: [B] own tokens of each row.
        columns: columns encoded so far, padding included.
    """

    cache: DynamicCache
    lengths: Tensor
    columns: int

    def select(self, rows: Tensor) -> "Prefix":
        """Return a copy that holds `rows` only."""
        cache = copy.copy(self.cache)
        cache.layers = [_select_layer(layer, rows) for layer in self.cache.layers]
        return Prefix(cache, self.lengths[rows], self.columns)

    @property
    def is_padded(self) -> bool:
        """Whether any row is shorter than the longest."""
        return bool((self.lengths < self.columns).any())


def _select_layer(layer: Any, rows: Tensor) -> Any:
    selected = copy.copy(layer)
    selected.keys, selected.values = layer.keys[rows], layer.values[rows]
    return selected


def text_config(model: DiffusionGemmaForBlockDiffusion) -> Any:
    """Return the configuration of the text stack."""
    return model.config.text_config


def canvas_length(model: DiffusionGemmaForBlockDiffusion) -> int:
    """Return the tokens of one canvas."""
    config: Any = model.config
    return config.canvas_length


@torch.no_grad()
def encode_prompts(
    model: DiffusionGemmaForBlockDiffusion, prompts: Sequence[Sequence[int]]
) -> Prefix:
    """Encode ragged prompts.

    Raises:
        InputError: an empty prompt, a token outside the vocabulary, an image placeholder (images are
            not read here), or an attention implementation other than sdpa.
    """
    _check_prompts(model, prompts)
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor(
        [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device
    )
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    empty = Prefix(cache, torch.zeros(len(prompts), dtype=torch.long, device=model.device), 0)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    return _encode(model, empty, tokens, lengths)


@torch.no_grad()
def encode_canvas(model: DiffusionGemmaForBlockDiffusion, prefix: Prefix, canvas: Tensor) -> Prefix:
    """Append committed canvases [B, L] to `prefix`, whose cache is extended in place."""
    return _encode(model, prefix, canvas, prefix.lengths + canvas.shape[1])


def _encode(
    model: DiffusionGemmaForBlockDiffusion, prefix: Prefix, tokens: Tensor, lengths: Tensor
) -> Prefix:
    """Encode `tokens` [B, n] behind `prefix`; `lengths` counts each row's own tokens afterwards."""
    columns = prefix.columns + tokens.shape[1]
    padding = columns - lengths
    positions = torch.arange(prefix.columns, columns, device=tokens.device) - padding[:, None]
    model.model.encoder(
        input_ids=tokens,
        attention_mask=_encoder_masks(model, prefix.columns, columns, padding),
        position_ids=positions.clamp(min=0),
        past_key_values=prefix.cache,
    )
    return Prefix(prefix.cache, lengths, columns)


def _encoder_masks(
    model: DiffusionGemmaForBlockDiffusion, start: int, stop: int, padding: Tensor
) -> Masks:
    """Return causal masks [B, 1, stop - start, keys], true where a query sees a key.

    A padding query sees itself: a row of nothing but masked keys would make NaN keys and values.
    """
    window: int = text_config(model).sliding_window
    query = torch.arange(start, stop, device=padding.device)[:, None]
    key = torch.arange(stop, device=padding.device)[None, :]
    causal = (key <= query) & (key >= padding[:, None, None]) | (key == query)
    near = causal & (query - key < window)
    # A sliding layer's cache holds the last window - 1 columns before `start`.
    return {
        "full_attention": causal[:, None],
        "sliding_attention": near[:, None, :, max(0, start - window + 1) :],
    }


@torch.no_grad()
def decode_canvas(
    model: DiffusionGemmaForBlockDiffusion,
    prefix: Prefix,
    canvas: Tensor,
    self_conditioning: Tensor | None,
) -> Tensor:
    """Run the decoder on `canvas` [B, L] behind `prefix`, which is only read.

    Args:
        model: transformers' module.
        prefix: prompt and committed canvases.
        canvas: [B, L] token ids.
        self_conditioning: [B, L, V] temperature-divided logits of the step before, or None.

    Returns:
        [B, L, V] float32 logits, soft-capped.
    """
    if self_conditioning is not None:
        self_conditioning = self_conditioning.to(model.lm_head.weight.dtype)
    length = canvas.shape[1]
    positions = prefix.lengths[:, None] + torch.arange(length, device=canvas.device)
    return model(
        decoder_input_ids=canvas,
        self_conditioning_logits=self_conditioning,
        decoder_attention_mask=_decoder_masks(model, prefix, length),
        decoder_position_ids=positions,
        past_key_values=prefix.cache,
    ).logits


def _decoder_masks(
    model: DiffusionGemmaForBlockDiffusion, prefix: Prefix, length: int
) -> dict[str, Any]:
    """Return masks [B, 1, L, keys], or None when there is nothing to mask."""
    if not prefix.is_padded:
        return {"full_attention": None, "sliding_attention": None}
    window: int = text_config(model).sliding_window
    padding = (prefix.columns - prefix.lengths)[:, None, None, None]
    seen = torch.arange(prefix.columns + length, device=padding.device) >= padding
    seen = seen.expand(-1, 1, length, -1)
    return {
        "full_attention": seen,
        "sliding_attention": seen[..., max(0, prefix.columns - window + 1) :],
    }


def _check_prompts(
    model: DiffusionGemmaForBlockDiffusion, prompts: Sequence[Sequence[int]]
) -> None:
    config: Any = model.config
    if config._attn_implementation != "sdpa":
        raise InputError(
            f"attention implementation {config._attn_implementation!r}: this runtime builds "
            f"boolean masks for 'sdpa'; load the model with attn_implementation='sdpa'"
        )
    vocab: int = text_config(model).vocab_size
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"prompt {index} is empty")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise InputError(f"prompt {index} has a token outside the vocabulary of {vocab}")
        if config.image_token_id in prompt:
            raise InputError(f"prompt {index} has an image placeholder; images are not read here")
