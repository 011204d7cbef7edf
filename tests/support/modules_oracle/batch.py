"""`Passes` over transformers' modules: one left-padded prefix for the batch."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from fused_dequant import CanvasState, Draw
from fused_dequant.sampler.canvas import sample
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.runtime.engine.interface import Decoded
from quantize.runtime.model.choices import Choices
from quantize.runtime.prompt.images import Images
from tests.support.modules_oracle.noise import Heard
from tests.support.modules_oracle.passes import (
    Prefix,
    canvas_length,
    decode_canvas,
    encode_prompts,
    encode_tokens,
    text_config,
)


class ModulePasses:
    """The passes of one batch; making them encodes its prompts.

    Raises:
        InputError: as in `encode_prompts`.
    """

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Images | None] | None,
        noise: Heard | None = None,
    ) -> None:
        self._model, self._noise = model, noise
        self.device = model.device
        self.canvas_length = canvas_length(model)
        self.vocabulary: int = text_config(model).vocab_size
        self._encoded = _Rows(list(range(len(prompts))), encode_prompts(model, prompts, images))
        self._decoding = self._encoded  # holds the rows that are still on the canvas

    def encode(self, rows: list[int], tokens: Tensor) -> None:
        """Append `tokens` [B, n] to the prefixes of `rows`; rows left out are gone."""
        kept = self._encoded.select(rows)
        prefix = encode_tokens(self._model, kept.prefix, tokens)
        self._encoded = self._decoding = _Rows(rows, prefix)

    def decode(self, rows: list[int], canvas: Tensor, conditioning: Tensor | None) -> Decoded:
        """Decode `canvas` [B, L] behind the prefixes of `rows`."""
        held = self._decoding if set(rows) <= set(self._decoding.rows) else self._encoded
        self._decoding = held.select(rows)
        with _chosen_experts(self._model) as chosen:
            logits = decode_canvas(self._model, self._decoding.prefix, canvas, conditioning)
        choices = Choices.of([(ids.int(), weights) for weights, ids in chosen], len(canvas))
        return Decoded(logits.shape, choices, logits, lambda rows: rows)

    def draw(self, decoded: Decoded, state: CanvasState, schedule: Tensor) -> tuple[Draw, Tensor]:
        """Draw from the logits, with transformers' random numbers where there are any."""
        scaled = decoded.rows / schedule[state.step - 1][:, None, None]
        if self._noise is not None:
            return self._noise.draw(scaled, state), scaled
        return sample(decoded.rows, state, schedule), scaled

    def condition(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return what the next step is conditioned on: the logits over the temperature."""
        return logits / temperature


class _Rows:
    """The prefixes of some rows of the batch."""

    def __init__(self, rows: list[int], prefix: Prefix) -> None:
        self.rows, self.prefix = rows, prefix

    def select(self, rows: list[int]) -> "_Rows":
        """Return the prefixes of `rows`; nothing is copied when these are all."""
        if rows == self.rows:
            return self
        index = torch.tensor(
            [self.rows.index(row) for row in rows], device=self.prefix.lengths.device
        )
        return _Rows(rows, self.prefix.select(index))


@contextmanager
def _chosen_experts(model: DiffusionGemmaForBlockDiffusion) -> Generator[list[tuple[Tensor, ...]]]:
    """Yield a list that every router of the decoder adds its weights and experts [tokens, k] to."""
    chosen: list[tuple[Tensor, ...]] = []

    def note(_: nn.Module, __: object, output: tuple[Tensor, ...]) -> None:
        chosen.append(output[-2:])

    layers = cast(Sequence[nn.Module], model.model.decoder.layers)
    hooks = [layer.get_submodule("router").register_forward_hook(note) for layer in layers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()
