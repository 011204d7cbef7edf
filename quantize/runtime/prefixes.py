"""Keeps beginnings of prompts encoded: shared system prompts and the turns of a chat.

The encoder is causal, so its keys and values of a prompt's first n tokens do not depend on what
follows. They are kept in whole blocks: block k of a prompt is found under the digest of all tokens up
to its end, and used only if every block before it is there too. Prompts are encoded block by block
whether or not one is found, so a sample has the same tokens. When the budget is spent, the blocks that
were used longest ago go first. Prompts with pictures are left out.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class PrefixCache(Generic[Kept]):
    """Keeps encoded blocks of `block` prompt tokens, at most `budget` bytes; one engine, one thread.

    `asked` counts the tokens of all prompts looked up, `reused` those found; `nbytes` are kept now.
    """

    def __init__(self, budget: int, block: int) -> None:
        self.budget, self.block = budget, block
        self.asked = self.reused = self.nbytes = 0
        self._blocks: OrderedDict[bytes, tuple[Kept, int]] = OrderedDict()

    def find(self, prompt: Sequence[int]) -> list[Kept]:
        """Return what is kept for the prompt's blocks, in order, up to the first that is missing."""
        found = list(takewhile(self._blocks.__contains__, self._keys(prompt)))
        for key in reversed(found):  # a block is worth nothing without those before it
            self._blocks.move_to_end(key)
        self.asked += len(prompt)
        self.reused += len(found) * self.block
        return [self._blocks[key][0] for key in found]

    def keep(self, prompt: Sequence[int], kept: Kept, nbytes: int) -> None:
        """Keep `kept`, the last block of `prompt` (whole blocks), unless `nbytes` exceed the budget."""
        *before, key = self._keys(prompt)
        if key in self._blocks or nbytes > self.budget:
            return
        self._blocks[key] = kept, nbytes
        self.nbytes += nbytes
        for older in reversed(before):
            if older in self._blocks:
                self._blocks.move_to_end(older)
        while self.nbytes > self.budget:
            _, (_, gone) = self._blocks.popitem(last=False)
            self.nbytes -= gone

    def _keys(self, prompt: Sequence[int]) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for end in range(self.block, len(prompt) + 1, self.block):
            digest.update(array("q", prompt[end - self.block : end]).tobytes())
            yield digest.copy().digest()
