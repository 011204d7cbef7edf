"""Caches encoded beginnings of prompts: shared system prompts and the turns of a chat.

The encoder is causal, so the keys and values of a prompt's first n tokens do not depend on later
tokens. Keys and values are kept in whole blocks. A block's key is the digest of all tokens up to the
block's end. A block is used only if all earlier blocks are kept too. Prompts are encoded block by block
even if no block is found, so the cache changes no sample. If the budget is exceeded, the least recently
used blocks are dropped. Prompts with pictures are not cached.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class PrefixCache(Generic[Kept]):
    """Keeps encoded blocks of `block` tokens, up to `budget` bytes, for one engine and one thread.

    `asked` counts tokens looked up, `reused` counts tokens found; kept blocks take `nbytes` bytes.
    """

    def __init__(self, budget: int, block: int) -> None:
        self.budget, self.block = budget, block
        self.asked = self.reused = self.nbytes = 0
        self._blocks: OrderedDict[bytes, tuple[Kept, int]] = OrderedDict()

    def find(self, prompt: Sequence[int]) -> list[Kept]:
        """Return the kept blocks of `prompt`, in order, up to the first block that is missing."""
        keys = list(takewhile(self._blocks.__contains__, self._keys(prompt)))
        for key in reversed(keys):  # a block is worth nothing without the blocks before it
            self._blocks.move_to_end(key)
        self.asked += len(prompt)
        self.reused += len(keys) * self.block
        return [self._blocks[key][0] for key in keys]

    def keep(self, prompt: Sequence[int], kept: Kept, nbytes: int) -> None:
        """Keep `kept`, the last of `prompt`'s whole blocks, unless its `nbytes` exceed the budget."""
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
