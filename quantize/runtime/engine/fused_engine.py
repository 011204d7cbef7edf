"""The `Engine` on the fused kernels: slots share one cache, and a step is two CUDA graphs.

A step of B sequences replays two graphs:

    decoder -> lm_head -> sample -> accept          soft embedding of the logits, for the next step

All that changes between replays is in device memory: canvas, step, temperature, slots, context. Graphs
are captured for some batch sizes (1, 2, 3, 4, 6, 8, 12, 16, 32, ...) and sampler settings; `Steps`
decides which. A batch between two of these sizes is filled up with copies of its first sequence, which
write the same values to the same cells. While the GPU makes the soft embedding, the host learns which
canvases are finished. Each sequence has its own step number. `denoise` returns as soon as one canvas
is finished. Its slot may begin a canvas or take another prompt while the other canvases continue.

A canvas' first step also encodes the canvas before it: one pass of 512 rows reads the weights once for
both. With `batch_invariant`, no sample depends on its batch. All steps then have one shape. Finished
canvases and prompts of up to SHORT tokens are encoded before a step, at most TOGETHER in a pass, each
rounded as if it were alone. Longer prompts are encoded in chunks when admitted; a chunk without
pictures replays a graph. On a CPU there are no graphs, and kernels are their torch references.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from fused_dequant import Probabilities
from torch import Tensor

from quantize.errors import InputError, ResourceError
from quantize.runtime.engine.batch import FusedPasses
from quantize.runtime.engine.graphs import (
    Pool,
    Replayed,
    Running,
    Step,
    Steps,
    Told,
    bucket,
    until_finished,
)
from quantize.runtime.engine.interface import BatchEngine, Canvas, Meanwhile, OnDraft
from quantize.runtime.engine.lockstep import in_lockstep
from quantize.runtime.gpu.memory import CANVASES_A_PIECE, DEFAULT_CONTEXT, SHORT, chunk_of
from quantize.runtime.model.cells import Cache, HostCells
from quantize.runtime.model.inputs import Inputs
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.model.watching import Observer, OnLogits
from quantize.runtime.prompt.images import Images
from quantize.runtime.prompt.pieces import SoftTokens, Span, pictures, pieces, soft_tokens
from quantize.runtime.prompt.prefixes import PrefixCache
from quantize.runtime.sampler.known_tokens import NOTHING, Given, Verdict
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import TextWeights

T = TypeVar("T")
Row = tuple[int, int, list[int]]  # slot, number of encoded positions, tokens after these
TOGETHER = 8  # sequences encoded at once by launches configured for one; more would hardly gain


@dataclass
class _Sequence:
    """What a slot holds. Its canvas is in a row of a step, or saved while other slots are denoised."""

    seed: int
    sampler: Sampler
    context: int = 0  # encoded positions
    canvases: int = 0
    unencoded: list[int] = field(default_factory=list)  # a short prompt, or the canvas before
    given: Given = NOTHING
    # tokens with which the guide lets the canvas begin; None before the guide is asked
    begun: list[int] | None = None
    spent: int = 0  # steps of earlier tries of a canvas that the guide has denoised again
    step: Step | None = None
    row: int = 0
    saved: list[Tensor] | None = None
    taken: int = 0  # steps of the canvas

    @property
    def under_way(self) -> bool:
        return self.step is not None or self.saved is not None

    def save(self) -> None:
        assert self.step is not None
        self.saved, self.step = [kept.clone() for kept in self.step.row(self.row)], None

    def stand_in(self, step: Step, row: int) -> None:
        if self.saved is not None:
            for kept, saved in zip(step.row(row), self.saved, strict=True):
                kept.copy_(saved)
        self.step, self.row, self.saved = step, row, None

    def end_canvas(self) -> None:
        self.step, self.saved, self.taken = None, None, 0


class FusedEngine:
    """Denoises canvases of up to `capacity` sequences on the fused kernels.

    Args:
        weights: from `load_packed` or `random_weights`.
        capacity: the most sequences per pass; a power of two, 3, 6 or 12 wastes no rows.
        max_context: positions that a sequence may take, prompt and answer; None for 8,192 or the
            model's limit, whichever is less. Full layers' caches have room for all these positions.
        batch_invariant: run every step at the shape of a full engine, so that a sample's tokens do not
            depend on the other samples. If False, tokens on a GPU may depend on them, since kernels
            round differently for other numbers of rows. On a CPU, tokens never depend on them.
        graphs: use CUDA graphs; not on a CPU, with `on_host`, streamed weights or several lanes.
        inputs: rounds the inputs of products, or shows them to observers; if None, only kernels round.
        prefix_bytes: bytes for the cache of encoded beginnings of prompts; no cache if 0, or `on_host`.
        lanes: number of batches, each in `capacity` slots of its own, that go through the layers
            together. With several lanes, a finished canvas is encoded by a pass of its own.
        on_host: keep keys and values on the host; the device has room for two lanes at one layer.
        sparse: omit a position's least probable tokens, together at most 0.001 of its probability, from
            the next step's self-conditioning (`fused_dequant.sparse_soft_embedding`).

    Attributes:
        stops: None, or a function of (seed, canvas index) that returns the most steps that the canvas
            may take; canvases of random weights never stop by themselves.

    Raises:
        InputError: `max_context` is above the model's limit, or not above 0.
        ResourceError: the cache does not fit beside the weights.
    """

    def __init__(
        self, weights: TextWeights, *, capacity: int = 4, max_context: int | None = None,
        batch_invariant: bool = False, graphs: bool = True, inputs: Inputs | None = None,
        prefix_bytes: int = 0, lanes: int = 1, on_host: bool = False, sparse: bool = False,
    ) -> None:  # fmt: skip
        config = weights.config
        limit: int = config.text_config.max_position_embeddings
        if max_context is not None and not 0 < max_context <= limit:
            raise InputError(f"max_context {max_context}: this model takes 1 to {limit} positions")
        self.capacity, self.lanes, self.slots = capacity, lanes, capacity * lanes
        self.canvas_length: int = config.canvas_length
        self.max_length = min(max_context or DEFAULT_CONTEXT, limit)
        self.device = weights.device
        self._chunk = chunk_of(self.canvas_length)
        self._short = min(max(SHORT, self.canvas_length), self.max_length)
        self._vocabulary: int = config.text_config.vocab_size
        self._placeholder: int | None = config.image_token_id
        self._inputs = inputs
        try:
            make = HostCells if on_host else Cache.allocate
            cache = make(config, capacity, self.max_length, self._chunk, self.device, lanes=lanes)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"no GPU memory for {self.slots} sequences of {self.max_length} positions beside "
                f"{weights.nbytes / 1e9:.1f} GB of weights; lower the context or the batch"
            ) from error
        self.model = FusedModel(weights, cache, inputs, sparse=sparse)
        on_gpu = self.model.cores is None
        self.model.encodes_alike = batch_invariant and on_gpu
        self._smallest = bucket(capacity) if batch_invariant and on_gpu else 1
        # commits and first steps in one pass
        alone = lanes == 1 and not on_host
        self._joins = not batch_invariant and inputs is None and on_gpu and alone
        # no graph holds passes that go through the layers together
        self._lockstep = weights.streamed or on_host or lanes > 1
        self.graphs = graphs and self.device.type == "cuda" and not self._lockstep
        self.pool: Pool = torch.cuda.graph_pool_handle() if self.graphs else None
        self._slots: dict[int, _Sequence] = {}
        keeps = prefix_bytes and isinstance(cache, Cache)
        self.prefixes = PrefixCache[list[Tensor]](prefix_bytes, self._chunk) if keeps else None
        self._steps = {  # by lane, and whether guides decide on its canvases
            (lane, guided): Steps(partial(self._step, lane=lane, keep=guided), capacity)
            for lane in range(lanes)
            for guided in (False, True)
        }
        self._commits: dict[tuple[int, int], Replayed] = {}
        self.stops: Callable[[int, int], int] | None = None

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        seed: int,
        sampler: Sampler,
        images: Images | None = None,
        given: Given | None = None,
    ) -> None:
        """Put a prompt into a free slot; encode it now, or let `denoise` encode it with others.

        Short texts wait for `denoise`. In lockstep without a prefix cache, texts that fit one pass wait
        too. If planned memory cannot hold all waiting tokens, other slots' tokens are encoded now.
        Raise InputError as `Engine.admit` does, or if the slot is not free. Raise ResourceError if
        there is no memory for the vision tower.
        """
        if slot in self._slots or not 0 <= slot < self.slots:
            raise InputError(f"slot {slot} of {self.slots} is not free")
        self._check(prompt, images)
        known = given or NOTHING
        known.check(self._vocabulary)
        self.model.cache.clear(slot)
        sequence = _Sequence(seed, _denoising(sampler), given=known)
        if images is None and self._waits(len(prompt)):
            sequence.unencoded = list(prompt)
        else:
            self._encode_long(slot, list(prompt), images)
            sequence.context = len(prompt)
        self._make_room(len(sequence.unencoded))
        self._slots[slot] = sequence

    def denoise(
        self,
        slots: Sequence[int],
        on_draft: OnDraft | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Canvas | None]:
        """Denoise until a canvas is finished; return each slot's finished canvas, or None.

        Slots with equal settings share passes. Raise InputError if a slot has no room for a canvas.
        """
        for slot in slots:
            sequence = self._slots[slot]
            if sequence.context + len(sequence.unencoded) + self.canvas_length > self.max_length:
                raise InputError(f"slot {slot}: no canvas fits within {self.max_length} positions")
        # A first step also encodes what fills a canvas: less would lie where the next canvas writes.
        first = {slot for slot in slots if len(self._slots[slot].unencoded) == self.canvas_length}
        entering = self._encodings([s for s in slots if not (self._joins and s in first)])
        kinds: dict[tuple[int, bool, Sampler], list[int]] = {}
        for slot in slots:
            sequence = self._slots[slot]
            guided = sequence.given.guide is not None
            kind = slot // self.capacity, guided, sequence.sampler
            kinds.setdefault(kind, []).append(slot)
        done: dict[int, Canvas] = {}
        while not done:  # runs once, unless guides have all canvases denoised again
            done = self._denoise(kinds, entering, meanwhile or _nothing, on_draft)
            entering, meanwhile = [], None
        return [done.get(slot) for slot in slots]

    def _waits(self, length: int) -> bool:
        """Whether `denoise` encodes a text: if it is short, or in lockstep, if it fits one pass."""
        if length <= self._short:
            return True
        room = self._padded(length) <= min(self._chunk, self.max_length)
        return self._lockstep and self.prefixes is None and room

    def _make_room(self, more: int) -> None:
        """Encode the waiting tokens if planned memory does not hold them and `more` tokens at once."""
        counts = [len(own.unencoded) for own in self._slots.values()]
        waiting = sum(self._padded(count) for count in (*counts, more) if count)
        if waiting > max(self.slots * self._short, self._chunk):
            self.encode_last(list(self._slots))

    def _step(self, rows: int, sampler: Sampler, *, lane: int, keep: bool) -> Step:
        coldest = min(sampler.t_min, sampler.t_max)
        left = self._probabilities if self.model.looks(coldest) else None
        return Step(self.model, rows, sampler, self._logits, self.pool, keep, left, lane)

    def release(self, slot: int) -> None:
        """Free a slot; if it is free already, do nothing."""
        self._slots.pop(slot, None)

    @cached_property
    def _logits(self) -> Tensor:
        """The buffer that a step writes the logits of its pieces into, bf16 [rows, V]."""
        rows = self.capacity if self.model.cores else min(bucket(self.capacity), CANVASES_A_PIECE)
        rows *= self.canvas_length
        return torch.empty(rows, self._vocabulary, dtype=torch.bfloat16, device=self.device)

    @cached_property
    def _probabilities(self) -> Probabilities:
        """Buffers of lm_head's probabilities, as many rows as `_logits`, for the soft embedding."""
        return Probabilities.room(self._logits, sparse=self.model.sparse)

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> FusedPasses:
        """Encode prompts and return their passes; all slots must be free.

        Raise InputError as `admit` does, if a slot is taken, or if there are over `capacity` prompts.
        """
        return self.passes_from(0, lambda own: self.model.run([own])[0], prompts, images)

    def passes_from(
        self,
        lane: int,
        run: Callable[[Pass], Tensor],
        prompts: Sequence[Sequence[int]],
        images: Sequence[Images | None] | None,
    ) -> FusedPasses:
        """Encode prompts in the slots of `lane`, and return their passes, as `passes` does.

        `run` takes one pass through all layers and returns its rows, as `FusedModel.run` does.
        """
        if self._slots or len(prompts) > self.capacity:
            raise InputError(f"{len(prompts)} prompts for {self.capacity} slots that must be free")
        encoded = [0] * len(prompts)
        given = [None] * len(prompts) if images is None else images
        for row, (prompt, own) in enumerate(zip(prompts, given, strict=True)):
            self._check(prompt, own)
            slot = lane * self.capacity + row
            self.model.cache.clear(slot)
            if own is not None:
                self._encode_long(slot, list(prompt), own)
                encoded[row] = len(prompt)
        return FusedPasses(self.model, prompts, self._chunk, encoded, lane, run, self.pool)

    def each(self, works: Sequence[Callable[[BatchEngine], T]]) -> list[T]:
        """Call each of `works` with an engine, up to `lanes` at once; return the results in order."""
        return in_lockstep(self, works) if self.lanes > 1 else [work(self) for work in works]

    @contextmanager
    def watching(
        self,
        *observers: Observer,
        on_pass: Callable[[Pass], object] | None = None,
        on_logits: OnLogits | None = None,
    ) -> Generator[None]:
        """Let `passes` call observers, as `BatchEngine.watching` says; the weights must be BF16."""
        model, own = self.model, self.model.inputs
        model.inputs = Inputs(model.weights.config.text_config, None, bf16=True)
        model.on_pass, model.on_logits = on_pass or _nothing, on_logits or _nothing
        try:
            with model.inputs.shown_to(observers):
                yield
        finally:
            model.inputs, model.on_pass, model.on_logits = own, _nothing, _nothing

    def close(self) -> None:
        """Wait until no streamed layer is being copied."""
        self.model.weights.close()

    def warm_up(self, sampler: Sampler) -> None:
        """Compile the kernels and capture the graphs that `sampler` needs, for every batch size.

        All slots must be free. On a CPU, nothing is done. The vision tower is loaded later, with the
        first picture. Canvases take only one step here, since later steps launch the same kernels.
        """
        if self.model.cores:
            return
        before, self.stops = self.stops, lambda *_: 1
        longest = min(self._chunk, self.max_length - self.canvas_length)
        for length in range(self._short + 1, longest + SHORT, SHORT):
            self.admit(0, [1] * min(length, longest), 0, sampler)
            self.release(0)
        # A prompt one token longer than a canvas takes the pass of short prompts, if that is another.
        over = 1 if self._short == self.canvas_length else self.canvas_length + 1
        prompt = [1] * min(over, self.max_length - self.canvas_length)
        for rows in sorted({bucket(n) for n in range(1, self.capacity + 1)}):
            slots = range(min(rows, self.capacity))
            for slot in slots:
                self.admit(slot, prompt, slot, sampler)
            # The second canvas encodes what the first committed.
            for _ in range(min(2, (self.max_length - len(prompt)) // self.canvas_length)):
                self.denoise(slots)
            if self.graphs and self._joins:
                self._steps[0, False].get(rows, _denoising(sampler), 0)[0].capture_commits()
            for slot in slots:
                self.release(slot)
            self._steps[0, False].hold()
        self.stops = before

    def context(self, slot: int) -> int:
        """Return how many positions of a slot are encoded."""
        return self._slots[slot].context

    def rewind(self, slot: int, before: Sequence[int]) -> None:
        """Undo a slot's last canvas, and the encoding of the previous canvas (tokens `before`)."""
        sequence = self._slots[slot]
        sequence.canvases -= 1
        sequence.context -= len(before)
        sequence.unencoded = list(before)

    def begin_canvases(self, slots: Sequence[int]) -> tuple[Step, bool]:
        """Begin canvases in slots of equal settings; return their `Step`, and whether to use graphs."""
        self.encode_last(slots)
        sampler = self._slots[slots[0]].sampler
        step, worth = self._steps[0, False].get(self._rows_for(len(slots)), sampler, len(slots))
        self._begin(step, list(slots), self.graphs and worth)
        return step, self.graphs and worth

    def drop_canvases(self, slots: Sequence[int]) -> None:
        """Discard the canvases that `begin_canvases` began."""
        for slot in slots:
            self._slots[slot].end_canvas()

    def _rows_for(self, sequences: int) -> int:
        return sequences if self.model.cores else max(self._smallest, bucket(sequences))

    def _check(self, prompt: Sequence[int], images: Images | None) -> None:
        if not prompt:
            raise InputError("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise InputError(f"the prompt has a token outside the vocabulary of {self._vocabulary}")
        if (self._placeholder in prompt) != (images is not None):
            words = ("an image placeholder and no image", "images and no placeholder")
            raise InputError(f"the prompt has {words[images is not None]}")
        if len(prompt) + self.canvas_length > self.max_length:
            raise InputError(
                f"the prompt has {len(prompt)} tokens: no canvas of {self.canvas_length} fits behind "
                f"it within {self.max_length} positions"
            )

    def _encode_long(self, slot: int, prompt: list[int], images: Images | None) -> None:
        """Encode a prompt of any length, with its pictures, in chunks.

        If the cache has room, a chunk of text is padded to a multiple of SHORT, for which there is a
        graph: kernel by kernel, the launches would take longer than the encoding.
        """
        seen = pictures(prompt, self._placeholder)
        chunks = pieces(len(prompt), self._chunk, seen)
        embeddings = None if images is None else self._soft(images, seen)
        found = self.prefixes.find(prompt) if self.prefixes and images is None else []
        for (start, end), block in zip(chunks, found, strict=False):
            self._resident.restore(slot, start, end, block)
        for start, end in chunks[len(found) :]:
            soft = None if embeddings is None else soft_tokens((start, end), seen, embeddings)
            length = end - start
            if not self.model.cores:
                length = min(-(-length // SHORT) * SHORT, self._chunk)
            run = slot, start, prompt[start:end]
            # Observers are shown no padding, nor a graph's rows.
            watched = self.model.inputs is not self._inputs
            if not watched and soft is None and start + length <= self.max_length:
                self._encode([run], length)
                if self.prefixes and images is None and end - start == self._chunk:
                    block = self._resident.block(slot, start, end)
                    self.prefixes.keep(prompt[:end], block, sum(kept.nbytes for kept in block))
                continue
            self.model.run([self._pass([run], end - start, soft)])

    def _soft(self, images: Images, seen: list[Span]) -> Tensor:
        """Return the soft tokens of a prompt's images, [tokens, H]."""
        tower = self.model.weights.tower
        if tower is None:
            raise InputError("these weights have no vision tower: they take no images")
        embeddings = self.model.alone(lambda: tower(images))
        places = sum(behind - first for first, behind in seen)
        if len(embeddings) != places:
            raise InputError(
                f"image placeholders and images do not fit: {places} and {len(embeddings)} tokens"
            )
        return embeddings

    def encode_last(self, slots: Sequence[int]) -> None:
        """Encode the waiting tokens of slots (short prompts, last canvases), as `denoise` would."""
        self.model.run(self._encodings(slots))

    def _encodings(self, slots: Sequence[int]) -> list[Pass]:
        """Return the passes that encode the waiting tokens of slots, and count these as encoded.

        Canvases share a pass, and so do prompts of one length. On a CPU and in lockstep, the caller
        runs the passes with the first step, so that weights are read once. Elsewhere they run here.
        """
        kinds: dict[tuple[int, int], list[Row]] = {}
        for slot in slots:
            sequence = self._slots[slot]
            if run := sequence.unencoded:
                kind = slot // self.capacity, self._padded(len(run))
                kinds.setdefault(kind, []).append((slot, sequence.context, run))
                sequence.context += len(run)
                sequence.unencoded = []
        passes = [(rows, n) for (_, n), alike in kinds.items() for rows in self._together(alike, n)]
        if self.model.cores or self._lockstep:
            return [self._pass(rows, length) for rows, length in passes]
        for rows, length in passes:
            self._encode(rows, length)
        return []

    def _padded(self, length: int) -> int:
        if self.model.cores:
            return length
        if length <= self.canvas_length:
            return self.canvas_length
        return self._short if length <= self._short else -(-length // SHORT) * SHORT

    def _together(self, rows: list[Row], length: int) -> list[list[Row]]:
        """Group rows of one length into as few passes as planned memory allows."""
        if self.model.cores:
            return [rows]
        most = max(1, self.capacity * self._short // length)
        if self.model.encodes_alike:
            most = min(most, TOGETHER)
        parts = [rows[start : start + most] for start in range(0, len(rows), most)]
        return [part + part[:1] * (bucket(len(part)) - len(part)) for part in parts]

    def _encode(self, rows: list[Row], length: int) -> None:
        replayed = self._commits.setdefault(
            (len(rows), length), Replayed(self.model.encode, self.pool)
        )
        if self.graphs:
            replayed(*self._filled(rows, length))
        else:
            self.model.run([self._pass(rows, length)])

    def _pass(self, rows: list[Row], length: int, soft: SoftTokens | None = None) -> Pass:
        """Return the pass that encodes rows of one lane, padded to `length` after their tokens."""
        added = [(slot % self.capacity, start, len(run)) for slot, start, run in rows]
        lane = rows[0][0] // self.capacity
        return self.model.encoding(*self._filled(rows, length), soft, lane=lane, added=added)

    def _filled(self, rows: list[Row], length: int) -> tuple[Tensor, Tensor, Tensor]:
        filled = torch.tensor([run + [0] * (length - len(run)) for *_, run in rows])
        places = torch.tensor([(slot % self.capacity, at) for slot, at, _ in rows]).int().T
        # The host does not wait: what it launches next, it launches while the GPU works.
        tokens = filled.to(self.device, non_blocking=True)
        slots, contexts = places.contiguous().to(self.device, non_blocking=True)
        return tokens, slots, contexts

    @property
    def _resident(self) -> Cache:
        assert isinstance(self.model.cache, Cache)  # else no prefixes are kept
        return self.model.cache

    def _denoise(
        self,
        kinds: Mapping[tuple[int, bool, Sampler], list[int]],
        entering: list[Pass],
        launched: Callable[[], None],
        on_draft: OnDraft | None,
    ) -> dict[int, Canvas]:
        """Take steps until a canvas is finished; return the finished ones by slot.

        `kinds` are the batches: (lane, whether guides decide the canvases, settings) -> slots.
        """
        batches: list[Running] = []
        for (lane, guided, sampler), slots in kinds.items():
            begun = sum(not self._slots[slot].under_way for slot in slots)
            rows = self._rows_for(len(slots))
            step, worth = self._steps[lane, guided].get(rows, sampler, begun)
            graphs = self.graphs and worth
            standing, committed = self._begin(step, slots, graphs)
            taken, most = [s.taken for s in standing], [step.limit] * len(standing)
            if self.stops is not None:
                most = [min(step.limit, self.stops(s.seed, s.canvases)) for s in standing]
            batches.append(Running(step, taken, most, committed, graphs))
        held = [{slot: self._slots[slot].row for slot in slots} for slots in kinds.values()]

        def show() -> None:
            if on_draft is None:
                return
            for own, rows in zip(batches, held, strict=True):
                state = own.step.state
                for slot, row in rows.items():
                    step, accepted = int(state.step[row]) - 1, state.accepted[row].tolist()
                    on_draft(slot, step, state.argmax[row].tolist(), accepted)

        told = until_finished(self.model, batches, entering, launched, show)
        done: dict[int, Canvas] = {}
        for own, rows, found in zip(batches, held, told, strict=True):
            done |= self._ended(own.step, rows, found)
        return done

    def _ended(self, step: Step, rows: Mapping[int, int], told: list[Told]) -> dict[int, Canvas]:
        """Note the steps that a batch has taken; return its finished canvases by slot."""
        done: dict[int, Canvas] = {}
        for slot, row in rows.items():
            sequence = self._slots[slot]
            tokens, sequence.taken, finished = told[row]
            if not finished:
                continue
            verdict = Verdict(tokens)
            if (guide := sequence.given.guide) is not None:
                verdict = guide.settle(step.last_logits(sequence.row), tokens)
            sequence.spent += sequence.taken
            sequence.end_canvas()
            if verdict.stand is not None:
                sequence.begun = verdict.tokens[: verdict.stand]
                continue
            done[slot] = Canvas(verdict.tokens, sequence.spent)
            sequence.spent, sequence.begun = 0, None
            sequence.canvases += 1
            sequence.unencoded = verdict.tokens
        return done

    def _begin(self, step: Step, slots: list[int], graphs: bool) -> tuple[list[_Sequence], int]:
        """Begin canvases in a step's rows; return their sequences, and how many runs it encodes."""
        new = {slot for slot in slots if not self._slots[slot].under_way}
        rows = self._seat(step, slots)
        runs: list[Row] = []
        for slot in slots:
            sequence = self._slots[slot]
            if sequence.unencoded:
                runs.append((slot, sequence.context, sequence.unencoded))
                sequence.context += len(sequence.unencoded)
                sequence.unencoded = []
            if sequence.begun is None:
                guide = sequence.given.guide
                sequence.begun = [] if guide is None else list(guide.lead())
        standing = [(slot, self._slots[slot]) for slot in rows]
        given = [(t % self.capacity, s.context, s.seed, s.canvases, t in new) for t, s in standing]
        known = None
        if any(s.given is not NOTHING for _, s in standing):
            length = self.canvas_length
            known = [s.given.rows(s.canvases, length, s.begun or []) for _, s in standing]
        committed = step.commit([(slot % self.capacity, at, run) for slot, at, run in runs])
        step.begin(given, known, graphs)
        return [sequence for _, sequence in standing], committed

    def _seat(self, step: Step, slots: list[int]) -> list[int]:
        """Give each of `slots` a row of a step, and return the slot of each row.

        A sequence keeps its row of this step, or gets a free row. Sequences of other slots are saved.
        Rows that stay free hold copies of the first slot's row.
        """
        for slot, sequence in self._slots.items():
            if sequence.step is not None and (sequence.step is step) != (slot in slots):
                sequence.save()
        rows = {self._slots[s].row: s for s in slots if self._slots[s].step is step}
        free = [row for row in range(step.rows) if row not in rows]
        for slot in slots:
            if self._slots[slot].step is not step:
                rows[free[0]] = slot
                self._slots[slot].stand_in(step, free.pop(0))
        for row in free:
            rows[row] = slots[0]
            for kept, own in zip(step.row(row), step.row(self._slots[slots[0]].row), strict=True):
                kept.copy_(own)
        return [rows[row] for row in range(step.rows)]


def _denoising(sampler: Sampler) -> Sampler:
    """Reset the settings that no canvas depends on: samplers that differ only in them share graphs."""
    return replace(sampler, max_new_tokens=1, max_length=None, eos_token_ids=(), pad_token_id=None)


def _nothing(*_: object) -> None:
    pass
