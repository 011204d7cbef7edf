"""The `Engine` over transformers' modules: it serves CPUs, and simulates activations anywhere."""

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.errors import InputError
from quantize.runtime.engine import BatchEngine, Canvas, Meanwhile, Observer, OnDraft, by_sampler
from quantize.runtime.images import Images
from quantize.runtime.known_tokens import Given, Verdict, initial, lead, pinned, put
from quantize.runtime.modules.batch import ModulePasses
from quantize.runtime.modules.inputs import watch_inputs
from quantize.runtime.modules.passes import (
    Prefix,
    canvas_length,
    check_prompts,
    decode_canvas,
    encode_prompts,
    encode_tokens,
    merge,
    text_config,
)
from quantize.runtime.noise import CounterNoise
from quantize.runtime.prefixes import PrefixCache
from quantize.runtime.sampler import CanvasState, Sampler, decide

T = TypeVar("T")
BLOCK = 256  # tokens of a prompt that are encoded together where beginnings are kept
PARTS = 2  # parts of a batch that share a CPU's cores; more were not measured


@dataclass(eq=False)
class _Part:
    """Slots whose steps one thread takes, and the work it does now."""

    slots: list[int] = field(default_factory=list)
    cores: int = 1
    stop: threading.Event = field(default_factory=threading.Event)
    work: Future[dict[int, Canvas]] | None = None

    def take(self) -> dict[int, Canvas]:
        """Wait for the work and return the canvases that it finished."""
        work, self.work = self.work, None
        return {} if work is None else work.result()


@dataclass
class _Sequence:
    """What a slot holds: encoded tokens, tokens not yet encoded, and the canvas being denoised.

    `unencoded` is the prompt at first, and the last canvas later. `begun` are the tokens that its guide
    has the canvas begin with; None before it was asked.
    """

    seed: int
    sampler: Sampler
    part: _Part
    unencoded: list[int]
    prefix: Prefix | None = None
    canvases: int = 0
    state: CanvasState | None = None  # its one row
    steps: int = 0  # denoising steps that the canvas has taken
    given: Given | None = None
    begun: list[int] | None = None
    spent: int = 0  # steps that the canvas had taken when its guide had it denoised again


class ModelEngine:
    """The `Engine` over transformers' modules: one cache a slot, padded together for each step.

    Slots share a decoder pass whatever canvas and step each is at; those whose samplers differ take
    turns. On a CPU the slots are split into two parts, each on a thread and half of the cores, or on
    all of them while the other has no slots: products this small gain little from a second core
    (bundled model, one slot: 323 tokens/s on one, 408 on two). A part goes on while the caller is busy
    with what another one has finished.

    Args:
        model: transformers' module.
        capacity: number of slots.
        max_context: positions a sample may take, prompt and answer; None for all the model knows.
        prefix_bytes: memory for beginnings of prompts that are kept encoded; 0 keeps none.

    Raises:
        InputError: the model knows fewer positions.
    """

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        capacity: int = 1,
        max_context: int | None = None,
        prefix_bytes: int = 0,
    ) -> None:
        limit: int = text_config(model).max_position_embeddings
        if max_context is not None and not 0 < max_context <= limit:
            raise InputError(f"max_context {max_context}: this model takes 1 to {limit} positions")
        self.model = model
        self.capacity = capacity
        self.canvas_length = canvas_length(model)
        self.max_length = max_context or limit
        self.prefixes = PrefixCache[Prefix](prefix_bytes, BLOCK) if prefix_bytes else None
        self._slots: dict[int, _Sequence] = {}
        cores = torch.get_num_threads()
        parts = min(PARTS, cores) if model.device.type == "cpu" else 1
        self._parts = [_Part() for _ in range(parts)]
        self._cores = cores
        self._pool = ThreadPoolExecutor(parts, "denoise")
        self._finished: dict[int, Canvas] = {}

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        seed: int,
        sampler: Sampler,
        images: Images | None = None,
        given: Given | None = None,
    ) -> None:
        """Put a prompt into a free slot. One with images is encoded now, since only the tower knows
        whether they fit; others are encoded in `denoise`, where slots share the cores.

        Raises:
            InputError: as in `encode_prompts`; or the slot is taken or does not exist.
        """
        if slot in self._slots or not 0 <= slot < self.capacity:
            raise InputError(f"slot {slot} of {self.capacity} is not free")
        check_prompts(self.model, [prompt], [images])
        if given is not None:
            given.check(text_config(self.model).vocab_size)
        taken = [sequence.part for sequence in self._slots.values()]
        sequence = _Sequence(
            seed, sampler, min(self._parts, key=taken.count), list(prompt), given=given
        )
        if images is not None:
            sequence.prefix = encode_prompts(self.model, [prompt], [images])
            sequence.unencoded = []
        self._slots[slot] = sequence

    def denoise(
        self,
        slots: Sequence[int],
        on_draft: OnDraft | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Canvas | None]:
        """Denoise until a canvas of at least one of the slots is finished."""
        while self._finished.keys().isdisjoint(slots):
            for part in self._parts:
                self._set_to_work(part, [s for s in slots if self._slots[s].part is part], on_draft)
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            wait([part.work for part in self._parts if part.work], return_when=FIRST_COMPLETED)
            for part in self._parts:
                if part.work and part.work.done():
                    self._finished |= part.take()
        return [self._finished.pop(slot, None) for slot in slots]

    def release(self, slot: int) -> None:
        """Free a slot once its running step, if any, is over; a free slot stays free."""
        sequence = self._slots.pop(slot, None)
        if sequence is None:
            return
        part = sequence.part
        if part.work and slot in part.slots:
            part.stop.set()
            wait([part.work])
            if part.work.exception() is None:
                self._finished |= part.take()
            part.work = None  # if it failed, the slots that stay take the step again
        self._finished.pop(slot, None)

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.model.device

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> ModulePasses:
        """Encode `prompts` as a batch, beside the slots.

        Raises:
            InputError: as in `encode_prompts`.
        """
        return ModulePasses(self.model, prompts, images)

    @contextmanager
    def watching(
        self,
        *observers: Observer,
        on_encoded: Callable[[], object] = lambda: None,
        on_pass: Callable[[Any], object] | None = None,
    ) -> Generator[None]:
        """Show the input rows of every Linear while the block runs; only one thread may run passes."""
        if on_pass is not None:
            raise ValueError("modules have no passes that could be taken through one layer")
        encoder = self.model.model.encoder
        with encoder.register_forward_hook(lambda *_: on_encoded()):  # noqa: SIM117
            with watch_inputs(self.model, *observers):
                yield

    def each(self, works: Sequence[Callable[[BatchEngine], T]]) -> list[T]:
        """Do works one after the other."""
        return [work(self) for work in works]

    def close(self) -> None:
        """Do nothing: nothing is on its way."""

    def warm_up(self, sampler: Sampler) -> None:
        """Do nothing: modules need no compilation."""

    def _set_to_work(self, part: _Part, slots: list[int], on_draft: OnDraft | None) -> None:
        """Start a part that rests; one that works stops after its step if slots or cores change."""
        busy = {id(sequence.part) for sequence in self._slots.values()}
        cores = self._cores // max(1, len(busy))
        if part.work is None and slots:
            part.slots, part.cores = slots, cores
            part.stop.clear()
            part.work = self._pool.submit(self._advance, part, on_draft)
        elif part.cores != cores or not set(slots) <= set(part.slots):
            part.stop.set()

    def _advance(self, part: _Part, on_draft: OnDraft | None) -> dict[int, Canvas]:
        """Take steps until a canvas is finished, or the part is told to stop."""
        torch.set_num_threads(part.cores)  # holds for this thread
        for slot in part.slots:
            self._begin(self._slots[slot])
        samplers = {slot: self._slots[slot].sampler for slot in part.slots}
        groups = [
            _Group(self.model, {slot: self._slots[slot] for slot in group}, on_draft)
            for group in by_sampler(samplers).values()
        ]
        over = False
        while not over and not part.stop.is_set():
            steps = [group.step() for group in groups]  # every group steps before any is looked at
            over = any(steps)
        done: dict[int, Canvas] = {}
        for group in groups:
            done |= group.end()
        return done

    def _begin(self, sequence: _Sequence) -> None:
        """Encode the unencoded tokens, and fill the next canvas with noise."""
        if sequence.state is not None:
            return
        if sequence.prefix is None:
            sequence.prefix = self._encode_prompt(sequence.unencoded)
        elif sequence.unencoded:
            tokens = torch.tensor([sequence.unencoded], device=self.model.device)
            sequence.prefix = encode_tokens(self.model, sequence.prefix, tokens)
        sequence.unencoded = []
        row = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        vocabulary: int = text_config(self.model).vocab_size
        noise = _noise([sequence], self.model.device)
        canvas = noise.initial_canvas(0, row, self.canvas_length, vocabulary)
        known = None
        if sequence.given is not None:
            if sequence.begun is None:
                sequence.begun = lead(sequence.given)
            canvas = put(self._known(initial, sequence), canvas)
            known = self._known(pinned, sequence)
        sequence.state = CanvasState.begin(canvas, row, sequence.sampler, known)
        sequence.steps = 0

    def _encode_prompt(self, prompt: Sequence[int]) -> Prefix:
        """Encode a prompt without pictures, block by block behind what is known of it.

        So it is where nothing is kept: on some CPUs a block is rounded otherwise than a whole prompt.
        """
        found, block = [] if self.prefixes is None else self.prefixes.find(prompt), BLOCK
        prefix = found[-1].shared() if found else Prefix.empty(self.model, 1)
        for start in range(len(found) * block, len(prompt), block):
            tokens = torch.tensor([prompt[start : start + block]], device=self.model.device)
            prefix = encode_tokens(self.model, prefix, tokens)
            if self.prefixes is not None and tokens.shape[1] == block:
                kept = prefix.shared()
                self.prefixes.keep(prompt[: start + block], kept, kept.nbytes)
        return prefix

    def _known(
        self,
        what: Callable[[Given | None, int, int, Sequence[int]], list[int]],
        sequence: _Sequence,
    ) -> torch.Tensor:
        begun = sequence.begun or []
        row = what(sequence.given, sequence.canvases, self.canvas_length, begun)
        return torch.tensor([row], device=self.model.device)


class _Group:
    """Slots of one sampler that take steps together, each at its own step number."""

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        sequences: dict[int, _Sequence],
        on_draft: OnDraft | None,
    ) -> None:
        self._model, self._sequences, self._on_draft = model, sequences, on_draft
        rows = list(sequences.values())
        self._sampler = rows[0].sampler
        self._state = CanvasState.join([s.state for s in rows if s.state is not None])
        parts = [([row], s.prefix) for row, s in enumerate(rows) if s.prefix is not None]
        self._prefix = merge(parts)
        self._steps = torch.tensor([s.steps for s in rows], device=model.device)
        self._noise = _noise(rows, model.device)
        self._logits: torch.Tensor | None = None  # of the last step

    @property
    def _over(self) -> torch.Tensor:
        return self._state.finished | (self._steps >= self._sampler.max_denoising_steps)

    def step(self) -> bool:
        """Take one step; return whether it was the last of a canvas."""
        state, before = self._state, self._steps > 0
        conditioned = None if before.all() else before
        logits = decode_canvas(
            self._model, self._prefix, state.canvas, state.self_conditioning, conditioned
        )
        self._logits = logits
        self._steps = self._steps + 1
        self._state, accepted, _ = decide(state, logits, 0, self._steps, self._sampler, self._noise)
        if self._on_draft is not None:
            columns = (self._steps, self._state.argmax, accepted)
            found = zip(self._sequences, *(column.tolist() for column in columns), strict=True)
            for slot, step, tokens, kept in found:
                self._on_draft(slot, step, tokens, kept)
        return bool(self._over.any())

    def end(self) -> dict[int, Canvas]:
        """Give every slot its state back, and return the canvases that are finished."""
        done: dict[int, Canvas] = {}
        over, steps = self._over.tolist(), self._steps.tolist()
        for row, (slot, sequence) in enumerate(self._sequences.items()):
            sequence.state, sequence.steps = (
                self._state.select(self._state.rows[row, None]),
                steps[row],
            )
            if over[row] and (canvas := self._settled(row, sequence)):
                done[slot] = canvas
        return done

    def _settled(self, row: int, sequence: _Sequence) -> Canvas | None:
        """Return what is committed of a canvas; None where its guide has it denoised again."""
        assert sequence.state is not None
        verdict = Verdict(sequence.state.argmax[0].tolist())
        guide = None if sequence.given is None else sequence.given.guide
        if guide is not None and self._logits is not None:
            verdict = guide.settle(self._logits[row], verdict.tokens)
        sequence.state = None
        sequence.spent += sequence.steps
        if verdict.stand is not None:
            sequence.begun = verdict.tokens[: verdict.stand]
            return None
        steps, sequence.spent, sequence.begun = sequence.spent, 0, None
        sequence.unencoded = verdict.tokens
        sequence.canvases += 1
        return Canvas(verdict.tokens, steps)


def _noise(sequences: Sequence[_Sequence], device: torch.device) -> CounterNoise:
    seeds = torch.tensor([s.seed for s in sequences], dtype=torch.int64, device=device)
    return CounterNoise(seeds, torch.tensor([s.canvases for s in sequences], device=device))
