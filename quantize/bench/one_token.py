"""Continues texts greedily, one token per forward pass, to time the same weights without canvases.

The encoder is a causal language model: it has the decoder's layers, with layer scalars of its own. Here
the final norm and lm_head follow its last layer. A pass reads the weights that one token of each
sequence needs; a denoising step reads the weights that a whole canvas needs. `quantize bench
--autoregressive` compares the two times. The model was not trained for this, so its texts mean nothing.
The chosen token stays on the device as the next pass' input, so the host never waits for a token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.graphs import Replayed


class Continuation:
    """Extends the texts in `slots` of an engine, each text by one token per forward pass.

    With CUDA graphs, every pass after the first replays a graph. Slots cannot denoise afterwards.
    """

    def __init__(self, engine: FusedEngine, slots: Sequence[int], tokens: Sequence[int]) -> None:
        self._engine, self._model = engine, engine.model
        rows, device = len(slots), engine.model.weights.device
        self._slots, self._start, self._first = torch.zeros(
            3, rows, dtype=torch.int32, device=device
        )
        self._tokens, self._given = torch.zeros(2, rows, 1, dtype=torch.int64, device=device)
        self._append = Replayed(self._pass, engine.pool) if engine.graphs else self._pass
        self.begin(slots, tokens)

    def begin(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Begin a text in each slot after its context, with its token in `tokens`; keep the graph."""
        engine = self._engine
        engine.encoder.encode_waiting(slots)
        self._slots.copy_(torch.tensor(slots))
        self._first.copy_(torch.tensor([engine.sequences[slot].context for slot in slots]))
        self._given.copy_(torch.tensor(tokens)[:, None])
        self.rewind()

    def rewind(self) -> None:
        """Go back to the first tokens; later passes overwrite the cache entries made since then."""
        self._start.copy_(self._first)
        self._tokens.copy_(self._given)

    def run(self, count: int) -> list[list[int]]:
        """Append `count` tokens to each of B texts and return the tokens, [B][count]."""
        tokens: list[Tensor] = []
        for _ in range(count):
            self._append()
            tokens.append(self._tokens.clone())
        return torch.cat(tokens, 1).tolist()

    def experts_hit(self) -> list[int]:
        """Run one pass without a CUDA graph; return how many experts it reaches in each layer."""
        self._model.routed = []
        self._pass()
        reached = [int(ids.unique().numel()) for ids, _ in self._model.routed]
        self._model.routed = None
        return reached

    def _pass(self) -> None:
        encoded = self._model.encoding(self._tokens, self._slots, self._start, whole=True)
        h = self._model.run([encoded])[0]
        self._tokens.copy_(self._model.logits(h).argmax(-1, keepdim=True))
        self._start += 1
