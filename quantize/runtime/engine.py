"""Canvas by canvas: samples that join and leave while others run. What a server drives.

    admit a prompt to a free slot -> denoise a canvas for any set of slots -> ... -> release the slot

`generate` runs one batch from its prompts to its end; an `Engine` hands control back after every
canvas. Noise is addressed by (seed, canvas, step, position) and each slot's prefix is encoded on its
own, so a sample does not depend on who shares its canvases, or on when they came.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.errors import InputError
from quantize.runtime.generate import Sample, denoise_canvas
from quantize.runtime.model import (
    Prefix,
    canvas_length,
    encode_prompts,
    encode_tokens,
    merge,
    text_config,
)
from quantize.runtime.noise import CounterNoise
from quantize.runtime.sampler import Sampler, StepRecord

# (slot, step from 1, most probable tokens, which of them are accepted), after every denoising step
OnDraft = Callable[[int, int, list[int], list[bool]], None]


@dataclass(frozen=True)
class Canvas:
    """A finished canvas: its tokens, as committed before any EOS is looked for, and its steps."""

    tokens: list[int]
    steps: int


class Engine(Protocol):
    """A model that denoises one canvas at a time for up to `capacity` samples, each in a slot.

    `admit` encodes a prompt into a free slot and refuses, with an InputError, one the model cannot
    take. `denoise` runs one canvas for each of `slots` (distinct, admitted, in any order, of any age
    and settings) and returns them in that order; before it, it encodes the canvas that each slot
    finished last, so a sample's final canvas is never encoded. What it returns for a slot depends on
    (prompt, seed, sampler, canvases so far) alone, never on the other slots. `release` forgets a slot,
    at any canvas boundary, whatever has become of it. The caller looks for EOS, counts the budget and
    calls from one thread. Of `sampler` only the denoising settings are read.
    """

    @property
    def capacity(self) -> int:
        """Slots: 0 to capacity - 1."""
        ...

    @property
    def canvas_length(self) -> int:
        """Tokens of one canvas."""
        ...

    @property
    def max_length(self) -> int:
        """Positions the model was made for: prompt and new tokens together."""
        ...

    def admit(self, slot: int, prompt: Sequence[int], seed: int, sampler: Sampler) -> None:
        """Encode `prompt` (token ids) into a free slot; `seed` is that of its noise, int64.

        Raises:
            InputError: a prompt that the model cannot take.
        """
        ...

    def denoise(self, slots: Sequence[int], on_draft: OnDraft | None = None) -> list[Canvas]:
        """Denoise the next canvas of each slot."""
        ...

    def release(self, slot: int) -> None:
        """Free a slot."""
        ...


def by_sampler(
    samplers: Mapping[int, Sampler],
    denoise: Callable[[list[int], Sampler], Mapping[int, Canvas]],
) -> list[Canvas]:
    """Denoise slots of equal samplers as one batch; return the canvases in the order of `samplers`."""
    groups: dict[Sampler, list[int]] = {}
    for slot, sampler in samplers.items():
        groups.setdefault(sampler, []).append(slot)
    done: dict[int, Canvas] = {}
    for sampler, group in groups.items():
        done |= denoise(group, sampler)
    return [done[slot] for slot in samplers]


@dataclass
class _Sequence:
    """What a slot holds: everything encoded, and the canvas that is not encoded yet."""

    prefix: Prefix
    seed: int
    sampler: Sampler
    canvases: int = 0
    unencoded: list[int] = field(default_factory=list)


class ModelEngine:
    """The `Engine` over transformers' modules: a cache a slot, padded together for each canvas.

    Slots whose samplers differ are denoised one group after the other.

    Args:
        model: as `generate` takes it.
        capacity: slots.
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.canvas_length = canvas_length(model)
        self.max_length: int = text_config(model).max_position_embeddings
        self._slots: dict[int, _Sequence] = {}

    def admit(self, slot: int, prompt: Sequence[int], seed: int, sampler: Sampler) -> None:
        """Encode a prompt into a free slot.

        Raises:
            InputError: as `encode_prompts`; or the slot is taken or does not exist.
        """
        if slot in self._slots or not 0 <= slot < self.capacity:
            raise InputError(f"slot {slot} of {self.capacity} is not free")
        self._slots[slot] = _Sequence(encode_prompts(self.model, [prompt]), seed, sampler)

    def denoise(self, slots: Sequence[int], on_draft: OnDraft | None = None) -> list[Canvas]:
        """Denoise the next canvas of each slot, those of equal samplers as one batch."""
        samplers = {slot: self._slots[slot].sampler for slot in slots}
        return by_sampler(samplers, lambda group, own: self._denoise(group, own, on_draft))

    def release(self, slot: int) -> None:
        """Free a slot; one that is free already stays so."""
        self._slots.pop(slot, None)

    def _denoise(
        self, slots: list[int], sampler: Sampler, on_draft: OnDraft | None
    ) -> dict[int, Canvas]:
        sequences = [self._slots[slot] for slot in slots]
        for sequence in sequences:
            self._encode_last(sequence)
        device = self.model.device
        seeds = torch.tensor([s.seed for s in sequences], dtype=torch.int64, device=device)
        behind = torch.tensor([s.canvases for s in sequences], device=device)
        tokens, steps = denoise_canvas(
            self.model,
            merge([([row], s.prefix) for row, s in enumerate(sequences)]),
            torch.arange(len(slots), device=device),
            0,
            sampler,
            CounterNoise(seeds, behind),
            None if on_draft is None else lambda record: _show(record, slots, on_draft),
        )
        for sequence, committed in zip(sequences, tokens.tolist(), strict=True):
            sequence.canvases += 1
            sequence.unencoded = committed
        found = zip(slots, tokens.tolist(), steps.tolist(), strict=True)
        return {slot: Canvas(committed, count) for slot, committed, count in found}

    def _encode_last(self, sequence: _Sequence) -> None:
        if sequence.unencoded:
            tokens = torch.tensor([sequence.unencoded], device=self.model.device)
            sequence.prefix = encode_tokens(self.model, sequence.prefix, tokens)


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    on_draft: OnDraft | None = None,
) -> list[Sample]:
    """Answer any number of prompts, as many at once as the engine has slots.

    What `generate` does, on any engine: the same arguments, the same samples.

    Raises:
        InputError: a prompt that the engine cannot take.
    """
    samples = [Sample() for _ in prompts]
    waiting, running = deque(range(len(prompts))), dict[int, int]()
    while waiting or running:
        for slot in range(engine.capacity):
            if waiting and slot not in running:
                running[slot] = index = waiting.popleft()
                engine.admit(slot, prompts[index], seeds[index], sampler)
        slots = sorted(running)
        for slot, canvas in zip(slots, engine.denoise(slots, on_draft), strict=True):
            index = running[slot]
            samples[index].commit(canvas.tokens, canvas.steps, sampler)
            room = min(max_new_tokens, engine.max_length - len(prompts[index]))
            budget = -(-room // engine.canvas_length)
            if samples[index].finish == "eos" or samples[index].canvases >= budget:
                engine.release(slot)
                del running[slot]
    return samples


def _show(record: StepRecord, slots: list[int], on_draft: OnDraft) -> None:
    columns = (record.rows, record.argmax, record.accepted)
    for row, tokens, accepted in zip(*(column.tolist() for column in columns), strict=True):
        on_draft(slots[row], record.step, tokens, accepted)
