"""The two forward passes of block diffusion over transformers' modules: encode, then denoise.

The causal encoder reads prompt and committed canvases into a KV cache (`Prefix`); the bidirectional
decoder reads that cache and the canvas and never writes. A canvas query sees the whole canvas, and in
full layers the whole prefix, in sliding layers the prefix' last `sliding_window - 1` tokens.

Ragged batches are left-padded, so that every row ends in the same column: appended canvases line up
and a sliding layer's cache, which keeps the last columns, keeps each row's own last tokens. Positions
count a row's own tokens and padding is masked, so a row's result does not depend on its batch
(transformers' own `generate()` numbers the padding too). Masks are built here: transformers' encoder
drops the ones it builds itself.

Only the dynamic cache is used: transformers' static cache is wrong past the sliding window.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from quantize.errors import InputError
from quantize.runtime.prompt.images import Images

Masks = dict[str, Tensor | None]

# transformers 5.24 calls the argument `cache`, and takes the old name until 5.40.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(DiffusionGemmaForBlockDiffusion.forward).parameters
)


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

    @classmethod
    def empty(cls, model: DiffusionGemmaForBlockDiffusion, rows: int) -> "Prefix":
        """Return the prefix of `rows` samples of which nothing is encoded yet."""
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        return cls(cache, torch.zeros(rows, dtype=torch.long, device=model.device), 0)

    def select(self, rows: Tensor) -> "Prefix":
        """Return a copy that holds `rows` only."""
        cache = copy.copy(self.cache)
        cache.layers = [_select_layer(layer, rows) for layer in self.cache.layers]
        return Prefix(cache, self.lengths[rows], self.columns)

    @property
    def padding(self) -> Tensor:
        """Masked columns at the left of each row, [B]."""
        return self.columns - self.lengths


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
    model: DiffusionGemmaForBlockDiffusion,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Images | None] | None = None,
) -> Prefix:
    """Encode ragged prompts, those of equal length together: no padding token is ever computed.

    So an observer or a router sees real tokens only, and no time goes into padding. A prompt with
    images is encoded alone: the model's vision tower fills its image placeholders, and the tokens of
    one image see each other in both directions.

    Raises:
        InputError: an empty prompt, a token outside the vocabulary, image placeholders that do not
            fit the images, or an attention implementation other than sdpa.
    """
    given = [None] * len(prompts) if images is None else list(images)
    check_prompts(model, prompts, given)
    by_length: dict[tuple[int, int], list[int]] = {}
    for row, (prompt, own) in enumerate(zip(prompts, given, strict=True)):
        by_length.setdefault((len(prompt), -1 if own is None else row), []).append(row)
    parts: list[tuple[list[int], Prefix]] = []
    for rows in by_length.values():
        nothing = Prefix.empty(model, len(rows))
        tokens = torch.tensor([list(prompts[row]) for row in rows], device=model.device)
        parts.append((rows, encode_tokens(model, nothing, tokens, given[rows[0]])))
    return merge(parts)


def merge(parts: Sequence[tuple[Sequence[int], Prefix]]) -> Prefix:
    """Join prefixes of any lengths, left-padded with zeros; rows go where their index says."""
    if len(parts) == 1:
        return parts[0][1]
    longest = max((part for _, part in parts), key=lambda part: part.columns)
    merged = longest.select(longest.lengths.new_zeros(sum(len(rows) for rows, _ in parts)))
    for rows, part in parts:
        merged.lengths[rows] = part.lengths
        for to, layer in zip(merged.cache.layers, part.cache.layers, strict=True):
            _place(to, layer, rows)
    return merged


def _place(to: Any, layer: Any, rows: Sequence[int]) -> None:
    """Write a layer's keys and values into `rows` of `to`, at the right end."""
    start = to.keys.shape[-2] - layer.keys.shape[-2]
    for target, source in ((to.keys, layer.keys), (to.values, layer.values)):
        target[rows, :, :start] = 0
        target[rows, :, start:] = source


@torch.no_grad()
def encode_tokens(
    model: DiffusionGemmaForBlockDiffusion,
    prefix: Prefix,
    tokens: Tensor,
    images: Images | None = None,
) -> Prefix:
    """Append `tokens` [B, n], such as a committed canvas, to `prefix`, extending its cache in place.

    With `images`, B is 1 and the tokens hold their placeholders.
    """
    columns = prefix.columns + tokens.shape[1]
    positions = prefix.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    seen: dict[str, Tensor] = {}
    blocks = None
    if images is not None:
        dtype, device = model.lm_head.weight.dtype, tokens.device
        seen["pixel_values"] = images.pixels.to(device, dtype)
        seen["image_position_ids"] = images.positions.to(device)
        blocks = _image_blocks(model, tokens)
    try:
        model.model.encoder(
            input_ids=tokens,
            attention_mask=_encoder_masks(model, prefix, columns, blocks),
            position_ids=positions,
            **{CACHE: prefix.cache},
            **seen,
        )
    except ValueError as error:
        if images is None:
            raise
        raise InputError(f"image placeholders and images do not fit: {error}") from error
    return Prefix(prefix.cache, prefix.lengths + tokens.shape[1], columns)


def _image_blocks(model: DiffusionGemmaForBlockDiffusion, tokens: Tensor) -> Tensor:
    """Return which tokens belong to one image, a run of placeholders: bool [B, n, n]."""
    config: Any = model.config
    is_image = tokens == config.image_token_id
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, -1))
    block = torch.where(is_image, starts.cumsum(-1), 0)
    return (block[:, :, None] == block[:, None, :]) & is_image[:, :, None]


def _encoder_masks(
    model: DiffusionGemmaForBlockDiffusion,
    prefix: Prefix,
    columns: int,
    blocks: Tensor | None = None,
) -> Masks:
    """Return causal masks [B, 1, n, keys], true where a query sees a key.

    `blocks` bool [B, n, n] adds new tokens that see each other against that order.
    """
    window: int = text_config(model).sliding_window
    device = prefix.lengths.device
    query = torch.arange(prefix.columns, columns, device=device)[:, None]
    key = torch.arange(columns, device=device)[None, :]
    causal = (key <= query) & (key >= prefix.padding[:, None, None])
    near = causal & (query - key < window)
    if blocks is not None:
        wide = torch.nn.functional.pad(blocks, (prefix.columns, 0))
        causal, near = causal | wide, near | wide
    return {
        "full_attention": causal[:, None],
        "sliding_attention": near[:, None, :, _first_sliding_column(prefix, window) :],
    }


def _first_sliding_column(prefix: Prefix, window: int) -> int:
    """Return the first column that a sliding layer's cache, of window - 1 columns, still holds."""
    return max(0, prefix.columns - window + 1)


@torch.no_grad()
def decode_canvas(
    model: DiffusionGemmaForBlockDiffusion,
    prefix: Prefix,
    canvas: Tensor,
    self_conditioning: Tensor | None,
    conditioned: Tensor | None = None,
) -> Tensor:
    """Run the decoder on `canvas` [B, L] behind `prefix`, which is only read.

    Args:
        model: transformers' module.
        prefix: prompt and committed canvases.
        canvas: [B, L] token ids.
        self_conditioning: [B, L, V] temperature-divided logits of the step before, or None.
        conditioned: [B] bool, rows that have had a step before; None for all.

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
        self_conditioning_mask=conditioned,
        decoder_attention_mask=_decoder_masks(model, prefix, length),
        decoder_position_ids=positions,
        **{CACHE: prefix.cache},
    ).logits


def _decoder_masks(model: DiffusionGemmaForBlockDiffusion, prefix: Prefix, length: int) -> Masks:
    """Return masks [B, 1, L, keys], or None when there is nothing to mask."""
    if not prefix.padding.any():
        return {"full_attention": None, "sliding_attention": None}
    window: int = text_config(model).sliding_window
    columns = torch.arange(prefix.columns + length, device=prefix.lengths.device)
    seen = (columns >= prefix.padding[:, None, None, None]).expand(-1, 1, length, -1)
    return {
        "full_attention": seen,
        "sliding_attention": seen[..., _first_sliding_column(prefix, window) :],
    }


def check_prompts(
    model: DiffusionGemmaForBlockDiffusion,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Images | None],
) -> None:
    """Refuse what `encode_prompts` refuses, except images that do not fit their placeholders.

    Raises:
        InputError: as in `encode_prompts`.
    """
    config: Any = model.config
    if config._attn_implementation != "sdpa":
        raise InputError(
            f"attention implementation {config._attn_implementation!r}: this runtime builds "
            f"boolean masks for 'sdpa'; load the model with attn_implementation='sdpa'"
        )
    vocab: int = text_config(model).vocab_size
    for index, (prompt, own) in enumerate(zip(prompts, images, strict=True)):
        if not prompt:
            raise InputError(f"prompt {index} is empty")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise InputError(f"prompt {index} has a token outside the vocabulary of {vocab}")
        if (config.image_token_id in prompt) != (own is not None):
            word = (
                "an image placeholder and no image" if own is None else "images and no placeholder"
            )
            raise InputError(f"prompt {index} has {word}")
