"""Encodes prompts and finished canvases in an engine's slots: now, with others, or before a step.

Long prompts are encoded in chunks when admitted; a chunk without pictures replays a CUDA graph. Short
prompts and finished canvases wait, and share passes. On a CPU and in lockstep, these passes go through
the layers together with the next step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.engine.graphs import Pool, Replayed, bucket
from quantize.runtime.engine.slots import Run, Slots
from quantize.runtime.gpu.memory import SHORT, chunk_of
from quantize.runtime.model.cells import Cache
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.prompt.images import Images
from quantize.runtime.prompt.pieces import SoftTokens, Span, pictures, pieces, soft_tokens
from quantize.runtime.prompt.prefixes import PrefixCache

TOGETHER = 8  # sequences encoded at once by launches configured for one; more would hardly gain


class Encoder:
    """Encodes tokens after what the slots hold.

    Args:
        model: whose cache gets the keys and values.
        slots: the engine's slots and their sequences.
        max_length: positions that a sequence may take.
        lockstep: whether passes of several batches go through the layers together.
        graphs: whether to replay CUDA graphs, in memory `pool`.
        prefixes: the cache of encoded beginnings of prompts, or None.

    Attributes:
        chunk: the most tokens of one pass.
        short: the most tokens of a text that waits for others.
        commits: (sequences, length) -> the pass that encodes so many padded sequences.
    """

    def __init__(
        self, model: FusedModel, slots: Slots, max_length: int, *, lockstep: bool, graphs: bool,
        pool: Pool, prefixes: PrefixCache[list[Tensor]] | None,
    ) -> None:  # fmt: skip
        config = model.weights.config
        self._model, self._slots, self._max_length = model, slots, max_length
        self._lockstep, self.graphs, self._pool = lockstep, graphs, pool
        self._prefixes, self._inputs = prefixes, model.inputs
        self.canvas_length: int = config.canvas_length
        self.chunk = chunk_of(self.canvas_length)
        self.short = min(max(SHORT, self.canvas_length), max_length)
        self.vocabulary: int = config.text_config.vocab_size
        self._placeholder: int | None = config.image_token_id
        self.commits: dict[tuple[int, int], Replayed] = {}

    def check(self, prompt: Sequence[int], images: Images | None) -> None:
        """Raise InputError for a prompt that the model cannot take, or pictures that do not fit it."""
        if not prompt:
            raise InputError("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            at = next(n for n, token in enumerate(prompt) if not 0 <= token < self.vocabulary)
            raise InputError(
                f"token {at} of the prompt, {prompt[at]}, is outside the vocabulary of "
                f"{self.vocabulary}"
            )
        if (self._placeholder in prompt) != (images is not None):
            words = ("an image placeholder and no image", "images and no placeholder")
            raise InputError(f"the prompt has {words[images is not None]}")
        if len(prompt) + self.canvas_length > self._max_length:
            raise InputError(
                f"the prompt has {len(prompt)} tokens: no canvas of {self.canvas_length} fits behind "
                f"it within {self._max_length} positions"
            )

    def waits(self, length: int) -> bool:
        """Whether a step encodes a text: if it is short, or in lockstep, if it fits one pass."""
        if length <= self.short:
            return True
        room = self._padded(length) <= min(self.chunk, self._max_length)
        return self._lockstep and self._prefixes is None and room

    def make_room(self, more: int) -> None:
        """Encode the waiting tokens if planned memory does not hold them and `more` tokens at once."""
        counts = [len(sequence.unencoded) for sequence in self._slots.values()]
        waiting = sum(self._padded(count) for count in (*counts, more) if count)
        if waiting > max(self._slots.count * self.short, self.chunk):
            self.encode_waiting(list(self._slots))

    def encode_prompt(self, slot: int, prompt: list[int], images: Images | None) -> None:
        """Encode a prompt of any length, with its pictures, in chunks.

        If the cache has room, a chunk of text is padded to a multiple of SHORT, for which there is a
        graph: kernel by kernel, the launches would take longer than the encoding.
        """
        seen = pictures(prompt, self._placeholder)
        chunks = pieces(len(prompt), self.chunk, seen)
        embeddings = None if images is None else self._soft(images, seen)
        blocks = self._prefixes.find(prompt) if self._prefixes and images is None else []
        for (start, end), block in zip(chunks, blocks, strict=False):
            self._resident.restore(slot, start, end, block)
        for start, end in chunks[len(blocks) :]:
            soft = None if embeddings is None else soft_tokens((start, end), seen, embeddings)
            length = end - start
            if self._model.compute.whole:
                length = min(-(-length // SHORT) * SHORT, self.chunk)
            run = slot, start, prompt[start:end]
            # Observers are shown no padding, nor a graph's rows; and no graph takes given choices.
            model = self._model
            watched = model.inputs is not self._inputs or bool(model.noted or model.given)
            if not watched and soft is None and start + length <= self._max_length:
                self.encode([run], length)
                if self._prefixes and images is None and end - start == self.chunk:
                    block = self._resident.block(slot, start, end)
                    self._prefixes.keep(prompt[:end], block, sum(cells.nbytes for cells in block))
                continue
            self._model.run([self._pass([run], end - start, soft)])

    def _soft(self, images: Images, seen: list[Span]) -> Tensor:
        """Return the soft tokens of a prompt's images, [tokens, H]."""
        tower = self._model.weights.tower
        if tower is None:
            raise InputError("these weights have no vision tower: they take no images")
        embeddings = self._model.compute.one(lambda: tower(images))
        places = sum(behind - first for first, behind in seen)
        if len(embeddings) != places:
            raise InputError(
                f"image placeholders and images do not fit: {places} and {len(embeddings)} tokens"
            )
        return embeddings

    def encode_waiting(self, slots: Sequence[int]) -> None:
        """Encode the waiting tokens of slots: short prompts, and canvases that were finished."""
        self._model.run(self.waiting_passes(slots))

    def waiting_passes(self, slots: Sequence[int]) -> list[Pass]:
        """Return the passes that encode the waiting tokens of slots, and count these as encoded.

        Canvases share a pass, and so do prompts of one length. On a CPU and in lockstep, the caller
        runs the passes with the first step, so that weights are read once. Elsewhere they run here.
        """
        kinds: dict[tuple[int, int], list[Run]] = {}
        for slot in slots:
            for run in self._slots[slot].to_encode(slot):
                kind = self._slots.lane(slot), self._padded(len(run[2]))
                kinds.setdefault(kind, []).append(run)
        passes = [(runs, n) for (_, n), alike in kinds.items() for runs in self._together(alike, n)]
        if self._lockstep or not self._model.compute.whole:
            return [self._pass(runs, length) for runs, length in passes]
        for runs, length in passes:
            self.encode(runs, length)
        return []

    def _padded(self, length: int) -> int:
        if not self._model.compute.whole:
            return length
        if length <= self.canvas_length:
            return self.canvas_length
        return self.short if length <= self.short else -(-length // SHORT) * SHORT

    def _together(self, runs: list[Run], length: int) -> list[list[Run]]:
        """Group runs of one length into as few passes as planned memory allows."""
        if not self._model.compute.whole:
            return [runs]
        most = max(1, self._slots.capacity * self.short // length)
        if self._model.encodes_alike:
            most = min(most, TOGETHER)
        parts = [runs[start : start + most] for start in range(0, len(runs), most)]
        return [part + part[:1] * (bucket(len(part)) - len(part)) for part in parts]

    def encode(self, runs: list[Run], length: int) -> None:
        """Encode runs of one lane, padded to `length`, in one pass, which is captured if it may be."""
        replayed = self.commits.setdefault(
            (len(runs), length), Replayed(self._model.encode, self._pool)
        )
        if self.graphs:
            replayed(*self._filled(runs, length))
        else:
            self._model.run([self._pass(runs, length)])

    def _pass(self, runs: list[Run], length: int, soft: SoftTokens | None = None) -> Pass:
        """Return the pass that encodes runs of one lane, padded to `length` after their tokens."""
        added = [(self._slots.place(slot), start, len(tokens)) for slot, start, tokens in runs]
        lane = self._slots.lane(runs[0][0])
        return self._model.encoding(*self._filled(runs, length), soft, lane=lane, added=added)

    def _filled(self, runs: list[Run], length: int) -> tuple[Tensor, Tensor, Tensor]:
        filled = torch.tensor([tokens + [0] * (length - len(tokens)) for *_, tokens in runs])
        places = torch.tensor([(self._slots.place(slot), at) for slot, at, _ in runs]).int().T
        # The host does not wait: what it launches next, it launches while the GPU works.
        device = self._model.weights.device
        tokens = filled.to(device, non_blocking=True)
        slots, contexts = places.contiguous().to(device, non_blocking=True)
        return tokens, slots, contexts

    @property
    def _resident(self) -> Cache:
        assert isinstance(self._model.cache, Cache)  # else no prefixes are kept
        return self._model.cache
