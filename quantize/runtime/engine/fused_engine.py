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

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from quantize.errors import InputError, ResourceError
from quantize.runtime.engine.batch import FusedPasses
from quantize.runtime.engine.denoising import Denoiser, nothing
from quantize.runtime.engine.encoding import Encoder
from quantize.runtime.engine.graphs import Pool, bucket
from quantize.runtime.engine.interface import BatchEngine, Canvas, Meanwhile, OnDraft
from quantize.runtime.engine.lockstep import in_lockstep
from quantize.runtime.engine.slots import Slots, SlotSequence
from quantize.runtime.gpu.memory import DEFAULT_CONTEXT, SHORT, chunk_of
from quantize.runtime.model.cells import Cache, HostCells
from quantize.runtime.model.choices import RoutingLog
from quantize.runtime.model.inputs import ProductInputs
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.model.watching import Observer
from quantize.runtime.prompt.images import Images
from quantize.runtime.prompt.prefixes import PrefixCache
from quantize.runtime.sampler.known_tokens import NOTHING, Given
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import TextWeights

T = TypeVar("T")


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

    Attributes:
        sequences: slot -> the sequence that it holds.
        encoder: encodes prompts and finished canvases.
        denoiser: takes the steps of canvases.

    Raises:
        InputError: `max_context` is above the model's limit, or not above 0.
        ResourceError: the cache does not fit beside the weights.
    """

    def __init__(
        self, weights: TextWeights, *, capacity: int = 4, max_context: int | None = None,
        batch_invariant: bool = False, graphs: bool = True, inputs: ProductInputs | None = None,
        prefix_bytes: int = 0, lanes: int = 1, on_host: bool = False,
    ) -> None:  # fmt: skip
        config = weights.config
        limit: int = config.text_config.max_position_embeddings
        if max_context is not None and not 0 < max_context <= limit:
            raise InputError(f"max_context {max_context}: this model takes 1 to {limit} positions")
        self.capacity, self.lanes, self.slots = capacity, lanes, capacity * lanes
        self.canvas_length: int = config.canvas_length
        self.max_length = min(max_context or DEFAULT_CONTEXT, limit)
        self.device = weights.device
        cache = self._cache(weights, on_host)
        self.model = FusedModel(weights, cache, inputs)
        on_gpu = self.model.compute.whole
        self.model.encodes_alike = batch_invariant and on_gpu
        # no graph holds passes that go through the layers together
        lockstep = weights.streamed or on_host or lanes > 1
        self.graphs = graphs and self.device.type == "cuda" and not lockstep
        self.pool: Pool = torch.cuda.graph_pool_handle() if self.graphs else None
        keeps = prefix_bytes and isinstance(cache, Cache)
        chunk = chunk_of(self.canvas_length)
        self.prefixes = PrefixCache[list[Tensor]](prefix_bytes, chunk) if keeps else None
        self.sequences = Slots(capacity, lanes)
        self.encoder = Encoder(
            self.model, self.sequences, self.max_length, lockstep=lockstep, graphs=self.graphs,
            pool=self.pool, prefixes=self.prefixes,
        )  # fmt: skip
        alone = lanes == 1 and not on_host
        self.denoiser = Denoiser(
            self.model, self.sequences, self.encoder, graphs=self.graphs, pool=self.pool,
            joins=not batch_invariant and inputs is None and on_gpu and alone,
            smallest=bucket(capacity) if batch_invariant else 1,
        )  # fmt: skip

    def _cache(self, weights: TextWeights, on_host: bool) -> Cache | HostCells:
        make = HostCells if on_host else Cache.allocate
        shape = self.capacity, self.max_length, chunk_of(self.canvas_length)
        try:
            return make(weights.config, *shape, self.device, lanes=self.lanes)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"no GPU memory for {self.slots} sequences of {self.max_length} positions beside "
                f"{weights.nbytes / 1e9:.1f} GB of weights; lower the context or the batch"
            ) from error

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
        if slot in self.sequences or not 0 <= slot < self.slots:
            raise InputError(f"slot {slot} of {self.slots} is not free")
        self.encoder.check(prompt, images)
        known = given or NOTHING
        known.check(self.encoder.vocabulary)
        self.model.cache.clear(slot)
        sequence = SlotSequence(seed, denoising_settings(sampler), given=known)
        if images is None and self.encoder.waits(len(prompt)):
            sequence.unencoded = list(prompt)
        else:
            self.encoder.encode_prompt(slot, list(prompt), images)
            sequence.context = len(prompt)
        self.encoder.make_room(len(sequence.unencoded))
        self.sequences[slot] = sequence

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
            sequence = self.sequences[slot]
            if sequence.context + len(sequence.unencoded) + self.canvas_length > self.max_length:
                raise InputError(f"slot {slot}: no canvas fits within {self.max_length} positions")
        return self.denoiser.denoise(slots, on_draft, meanwhile or nothing)

    def release(self, slot: int) -> None:
        """Free a slot; if it is free already, do nothing."""
        self.sequences.pop(slot, None)

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> FusedPasses:
        """Encode prompts and return their passes; all slots must be free.

        Raise InputError as `admit` does, if a slot is taken, or if there are over `capacity` prompts.
        """
        return self.passes_from(0, lambda entered: self.model.run([entered])[0], prompts, images)

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
        if self.sequences or len(prompts) > self.capacity:
            raise InputError(f"{len(prompts)} prompts for {self.capacity} slots that must be free")
        encoded = [0] * len(prompts)
        given = [None] * len(prompts) if images is None else images
        for row, (prompt, pictures) in enumerate(zip(prompts, given, strict=True)):
            self.encoder.check(prompt, pictures)
            slot = lane * self.capacity + row
            self.model.cache.clear(slot)
            if pictures is not None:
                self.encoder.encode_prompt(slot, list(prompt), pictures)
                encoded[row] = len(prompt)
        return FusedPasses(self.model, prompts, self.encoder.chunk, encoded, lane, run, self.pool)

    def each(self, works: Sequence[Callable[[BatchEngine], T]]) -> list[T]:
        """Call each of `works` with an engine, up to `lanes` at once; return the results in order."""
        return in_lockstep(self, works) if self.lanes > 1 else [work(self) for work in works]

    @contextmanager
    def watching(
        self, *observers: Observer, on_pass: Callable[[Pass], object] | None = None
    ) -> Generator[None]:
        """Let `passes` call observers, as `BatchEngine.watching` says; the weights must be BF16."""
        model, inputs = self.model, self.model.inputs
        model.inputs = ProductInputs(model.weights.config.text_config, None, bf16=True)
        model.on_pass = on_pass or nothing
        try:
            with model.inputs.shown_to(observers):
                yield
        finally:
            model.inputs, model.on_pass = inputs, nothing

    @contextmanager
    def routing(
        self, *, noted: RoutingLog | None = None, given: RoutingLog | None = None
    ) -> Generator[None]:
        """Note the choices of encoder passes in `noted`, or make all passes take those in `given`.

        Raises:
            RuntimeError: the passes differ from those that made `given`.
        """
        waiting = given and RoutingLog(list(given.encoded), list(given.decoded))
        self.model.noted, self.model.given = noted, waiting
        try:
            yield
        finally:
            self.model.noted = self.model.given = None
        if waiting and (waiting.encoded or waiting.decoded):
            raise RuntimeError("some choices were not taken: the models ran other passes")

    def close(self) -> None:
        """Wait until no streamed layer is being copied."""
        self.model.weights.close()

    def warm_up(self, sampler: Sampler) -> None:
        """Compile the kernels and capture the graphs that `sampler` needs, for every batch size.

        All slots must be free. On a CPU, nothing is done. The vision tower is loaded later, with the
        first picture. Canvases take only one step here, since later steps launch the same kernels.
        """
        if not self.model.compute.whole:
            return
        before, self.denoiser.stops = self.denoiser.stops, lambda *_: 1
        longest = min(self.encoder.chunk, self.max_length - self.canvas_length)
        for length in range(self.encoder.short + 1, longest + SHORT, SHORT):
            self.admit(0, [1] * min(length, longest), 0, sampler)
            self.release(0)
        # A prompt one token longer than a canvas takes the pass of short prompts, if that is another.
        over = 1 if self.encoder.short == self.canvas_length else self.canvas_length + 1
        prompt = [1] * min(over, self.max_length - self.canvas_length)
        for rows in sorted({bucket(n) for n in range(1, self.capacity + 1)}):
            slots = range(min(rows, self.capacity))
            for slot in slots:
                self.admit(slot, prompt, slot, sampler)
            # The second canvas encodes what the first committed.
            for _ in range(min(2, (self.max_length - len(prompt)) // self.canvas_length)):
                self.denoise(slots)
            if self.graphs and self.denoiser.joins:
                step, _ = self.denoiser.steps[0, False].get(rows, denoising_settings(sampler), 0)
                step.capture_commits()
            for slot in slots:
                self.release(slot)
            self.denoiser.steps[0, False].hold()
        self.denoiser.stops = before

    def rewind(self, slot: int, before: Sequence[int]) -> None:
        """Undo a slot's last canvas, and the encoding of the previous canvas (tokens `before`)."""
        sequence = self.sequences[slot]
        sequence.canvases -= 1
        sequence.context -= len(before)
        sequence.unencoded = list(before)

    def drop_canvases(self, slots: Sequence[int]) -> None:
        """Discard the canvases that `Denoiser.begin_waiting` began."""
        for slot in slots:
            self.sequences[slot].end_canvas()


def denoising_settings(sampler: Sampler) -> Sampler:
    """Reset the settings that no canvas depends on: samplers that differ only in them share graphs."""
    return replace(sampler, max_new_tokens=1, max_length=None, eos_token_ids=(), pad_token_id=None)
