"""Encodes and decodes one batch with the kernels, in slots of the engine's cache (`DrawingPasses`).

Inside `watching`, if every observer only launches GPU work, a canvas' second and later steps
use CUDA graphs, one for each number of canvases. All other passes launch kernel by kernel.

Sequences of unequal lengths are padded to share a pass, so that streamed weights are read once for all.
The padding's keys and values come after a sequence's tokens, and are overwritten before anything reads
them. Observers see no padding. Logits are computed when they are read; on a CPU, canvas by canvas.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from fused_dequant import CanvasState, Draw, lm_head, sample
from torch import Tensor

from quantize.runtime.engine.graphs import Pool, Replayed
from quantize.runtime.engine.interface import Decoded, joined
from quantize.runtime.gpu.cores import WholeDevice
from quantize.runtime.model.choices import Choices
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel


class FusedPasses:
    """The passes of one batch; the constructor encodes the prompts.

    `lane` selects the batch's slots (`lockstep`). A pass encodes up to `chunk` tokens of each prompt.
    `encoded` has how many tokens of each prompt are encoded already: 0, or all of a prompt with
    pictures. `run` takes a pass through the layers and returns its rows. `pool` is None without graphs.
    """

    def __init__(
        self, model: FusedModel, prompts: Sequence[Sequence[int]], chunk: int,
        encoded: Sequence[int], lane: int, run: Callable[[Pass], Tensor], pool: Pool,
    ) -> None:  # fmt: skip
        self._model, self._lane, self._run = model, lane, run
        self._pool, self._steps = pool, dict[int, Replayed]()
        config = model.weights.config
        self.device = model.weights.device
        self.canvas_length: int = config.canvas_length
        self.vocabulary: int = config.text_config.vocab_size
        self._context = list(encoded)
        waiting = {row: list(prompt) for row, prompt in enumerate(prompts) if not encoded[row]}
        while waiting:
            self._encode({row: tokens[:chunk] for row, tokens in waiting.items()})
            waiting = {row: tokens[chunk:] for row, tokens in waiting.items() if tokens[chunk:]}

    def encode(self, rows: list[int], tokens: Tensor) -> None:
        """Encode `tokens` int64 [B, L] and append them to the sequences of `rows`."""
        self._encode(dict(zip(rows, tokens.tolist(), strict=True)))

    def _encode(self, tokens: dict[int, list[int]]) -> None:
        longest = max(map(len, tokens.values()))
        filled = [sequence + [0] * (longest - len(sequence)) for sequence in tokens.values()]
        real = [
            i * longest + at
            for i, sequence in enumerate(tokens.values())
            for at in range(len(sequence))
        ]
        start = self._integers([self._context[row] for row in tokens])
        shown, entering = (torch.tensor(values, device=self.device) for values in (real, filled))
        added = [(row, self._context[row], len(sequence)) for row, sequence in tokens.items()]
        given = entering, self._integers(tokens), start
        self._run(self._model.encoding(*given, real=shown, lane=self._lane, added=added))
        for row, sequence in tokens.items():
            self._context[row] += len(sequence)

    def decode(self, rows: list[int], canvas: Tensor, conditioning: Tensor | None) -> Decoded:
        """Decode `canvas` int64 [B, L] after `rows`' text; `conditioning` is bf16 [B, L, H] or None."""
        model, (B, L) = self._model, canvas.shape
        context = self._integers([self._context[row] for row in rows])
        given = canvas, self._integers(rows), context
        if conditioning is None:
            _, h, *chosen = self._decoded(*given, None)
        elif (
            self._pool is None or model.inputs is None or not model.inputs.replayable
            or model.given is not None
        ):  # fmt: skip
            _, h, *chosen = self._decoded(*given, conditioning.flatten(0, 1))
        else:
            replayed = B in self._steps  # the first call launches each kernel, and calls `on_pass`
            step = self._steps.setdefault(B, Replayed(self._decoded, self._pool))
            entered, *results = step(*given, conditioning.flatten(0, 1))
            h, *chosen = (result.clone() for result in results)  # the next step overwrites them
            if replayed:
                model.on_pass(entered)
        head = partial(_logits, model.compute, model.weights.embedding, model.softcap)
        return Decoded((B, L, self.vocabulary), Choices(*chosen), h, head)

    def _decoded(
        self, canvas: Tensor, slots: Tensor, context: Tensor, signal: Tensor | None
    ) -> tuple[Pass, Tensor, Tensor, Tensor]:
        """Return a pass as it enters the first layer, its rows after the last, and its `Choices`."""
        (B, L), model = canvas.shape, self._model
        entering = model.decoding(canvas, model.behind(slots, context, L), signal)
        entering.routed, entering.lane = [], self._lane
        entered, h = replace(entering), self._run(entering).view(B, L, -1)
        chosen = Choices.of(entering.routed, B)
        return entered, h, chosen.experts, chosen.weights

    def draw(self, decoded: Decoded, state: CanvasState, schedule: Tensor) -> tuple[Draw, Tensor]:
        """Draw as in `DrawingPasses.draw`, from the bf16 logits of a few canvases at a time."""
        model, (B, L, _) = self._model, decoded.shape
        inverse = (1 / schedule[state.step.long() - 1])[:, None].repeat(1, L)

        def of(piece: slice) -> tuple[Draw, Tensor]:
            logits = model.logits(decoded.rows[piece].flatten(0, 1))
            drawn = sample(logits.view(-1, L, logits.shape[1]), state.part(piece), schedule)
            sharpness = inverse[piece].flatten()
            signal = model.soft_embedding(logits, sharpness)
            return drawn, signal.view(-1, L, signal.shape[1])

        at_once = model.compute.canvases_at_once
        pieces = [slice(start, start + at_once) for start in range(0, B, at_once)]
        drawn, signals = zip(*model.compute.each(of, pieces), strict=True)
        return Draw.join(drawn), joined(signals)

    def condition(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return the soft embedding bf16 [b, L, H] of logits [b, L, V] divided by `temperature`."""

        def soft(piece: Tensor) -> Tensor:
            rows = piece.flatten(0, 1).to(torch.bfloat16)
            inverse = (1 / temperature).expand(len(rows)).contiguous()
            return self._model.soft_embedding(rows, inverse).view(*piece.shape[:2], -1)

        return self._model.compute.by_canvas(soft, logits)

    def _integers(self, values: Sequence[int] | dict[int, list[int]]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


def _logits(compute: WholeDevice, embedding: Tensor, softcap: float, rows: Tensor) -> Tensor:
    """Return the logits of rows [b, L, H], as `Decoded.head` does."""

    def head(rows: Tensor) -> Tensor:
        logits = lm_head(rows.flatten(0, 1), embedding, softcap)
        return logits.unflatten(0, rows.shape[:2]).float()

    return compute.by_canvas(head, rows)
