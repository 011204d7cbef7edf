"""Canvas by canvas: samples that join and leave while others run. What a server drives.

    admit a prompt to a free slot -> denoise a canvas for any set of slots -> ... -> release the slot

`generate` runs one batch from its prompts to its end; an `Engine` hands control back whenever a canvas
is finished. Noise is addressed by (seed, canvas, step, position) and each slot's prefix is encoded on
its own, so a sample does not depend on who shares its canvases, or on when they came.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantize.runtime.given import Given
from quantize.runtime.images import Images
from quantize.runtime.sample import Sample, canvas_budgets
from quantize.runtime.sampler import Sampler

# (slot, step from 1, most probable tokens, which of them are accepted), after every denoising step
OnDraft = Callable[[int, int, list[int], list[bool]], None]
# nothing, once in a call of `denoise`
Meanwhile = Callable[[], None]
# (index of the prompt, its sample so far), after every canvas
OnCanvas = Callable[[int, Sample], None]

# (name of a Linear as on disk, rows that enter it, experts of the rows or None): see `watching`
Observer = Callable[[str, Tensor, Tensor | None], None]
PIECE = 1 << 26  # logits looked at together: 268 MB in float32, and a few times that in temporaries


@dataclass(frozen=True)
class Decoded:
    """What a decoder's pass over B canvases of L tokens found.

    Attributes:
        shape: (B, L, V) of the logits.
        experts: int [B, layers, L, k], chosen by the routers, in any order.
        logits: some of the B rows -> their logits [b, L, V] float32, soft-capped, not divided by the
            temperature. All at once they would be 17 GB for 64 canvases of the real vocabulary.
    """

    shape: Sequence[int]
    experts: Tensor
    logits: Callable[[slice], Tensor]

    def pieces(self) -> Iterator[slice]:
        """Yield slices of the B rows, of at most PIECE logits each, or one row."""
        B, L, V = self.shape
        step = max(1, PIECE // (L * V))
        for start in range(0, B, step):
            yield slice(start, min(start + step, B))


class Passes(Protocol):
    """The passes over one batch of sequences, one at a time, told what to read.

    Rows are indices into the batch, in ascending order. A call to `decode` may leave rows out; one that
    `encode` leaves out is gone.
    """

    @property
    def device(self) -> torch.device:
        """Where tensors are taken and given."""
        ...

    @property
    def canvas_length(self) -> int:
        """L, tokens of one canvas."""
        ...

    @property
    def vocabulary(self) -> int:
        """V, tokens there are."""
        ...

    def encode(self, rows: list[int], tokens: Tensor) -> None:
        """Append `tokens` int64 [B, L] to what `rows` have encoded."""
        ...

    def decode(self, rows: list[int], canvas: Tensor, conditioning: Tensor | None) -> Decoded:
        """Decode `canvas` int64 [B, L] behind `rows`; `conditioning` [B, ...] is of `condition`."""
        ...

    def condition(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return what the next step is conditioned on, [b, ...], from this one's logits [b, L, V]."""
        ...


@dataclass(frozen=True)
class Canvas:
    """A finished canvas: its tokens, as committed before any EOS is looked for, and its steps."""

    tokens: list[int]
    steps: int


class Engine(Protocol):
    """A model that denoises one canvas at a time for up to `capacity` samples, each in a slot.

    `admit` puts a prompt into a free slot and refuses, with an InputError, one the model cannot take.
    `denoise` works on the canvases of `slots` (distinct, admitted, in any order, of any age and
    settings) until at least one is finished, and returns them in that order, None for those that are
    not: they go on with the next call. Before a slot's canvas it encodes the one before, so a sample's
    final canvas is never encoded. A canvas depends on (prompt, seed, sampler, canvases so far) alone,
    never on the other slots. `release` forgets a slot, between any two calls, whatever has become of
    it. The caller looks for EOS, counts the budget and calls from one thread. Of `sampler` only the
    denoising settings are read. `on_draft` may be called from other threads; `meanwhile` is called from
    the caller's, at most once, when there is work under way that the host need not wait for: what is
    done there costs no time.
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

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        seed: int,
        sampler: Sampler,
        images: Images | None = None,
        given: Given | None = None,
    ) -> None:
        """Put `prompt` (token ids) into a free slot; `seed` is that of its noise, int64.

        `given` is what is known of the answer.

        Raises:
            InputError: a prompt, images or known tokens that the model cannot take.
        """
        ...

    def denoise(
        self,
        slots: Sequence[int],
        on_draft: OnDraft | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Sequence[Canvas | None]:
        """Denoise until a canvas of at least one of the slots is finished."""
        ...

    def release(self, slot: int) -> None:
        """Free a slot."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        ...

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> Passes:
        """Encode `prompts`, at most `capacity`, as a batch whose passes the caller orders.

        No slot may be taken meanwhile.

        Raises:
            InputError: prompts or images that the model cannot take.
        """
        ...

    def watching(
        self, *observers: Observer, on_encoded: Callable[[], object] = lambda: None
    ) -> AbstractContextManager[None]:
        """Show what enters every Linear of the passes while the block runs; padding is never shown.

        `on_encoded` is called at the end of every pass of the encoder.
        """
        ...

    def warm_up(self, sampler: Sampler) -> None:
        """Do beforehand what the first canvases under `sampler` would wait for."""
        ...


def by_sampler(samplers: Mapping[int, Sampler]) -> dict[Sampler, list[int]]:
    """Group slots by their settings, in the order in which they come."""
    groups: dict[Sampler, list[int]] = {}
    for slot, sampler in samplers.items():
        groups.setdefault(sampler, []).append(slot)
    return groups


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    on_draft: OnDraft | None = None,
    images: Sequence[Images | None] | None = None,
    on_canvas: OnCanvas | None = None,
) -> list[Sample]:
    """Answer any number of prompts, as many at once as the engine has slots.

    What `generate` does, on any engine: the same arguments, the same samples.

    Raises:
        InputError: a prompt or images that the engine cannot take, or nothing fits behind a prompt.
    """
    found = each_completed(
        engine, prompts, seeds, max_new_tokens=max_new_tokens, sampler=sampler, on_draft=on_draft,
        images=images, on_canvas=on_canvas,
    )  # fmt: skip
    samples = dict(found)
    return [samples[index] for index in range(len(prompts))]


def each_completed(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    on_draft: OnDraft | None = None,
    images: Sequence[Images | None] | None = None,
    on_canvas: OnCanvas | None = None,
) -> Iterator[tuple[int, Sample]]:
    """Yield (index, sample) of each prompt as it is finished; its slot is given to the next at once.

    Raises:
        InputError: as `complete`.
    """
    budgets = canvas_budgets(
        prompts, max_new_tokens, sampler, engine.max_length, engine.canvas_length
    )
    given = [None] * len(prompts) if images is None else images
    samples = [Sample() for _ in prompts]
    waiting, running = deque(range(len(prompts))), dict[int, int]()
    while waiting or running:
        for slot in range(engine.capacity):
            if waiting and slot not in running:
                running[slot] = index = waiting.popleft()
                engine.admit(slot, prompts[index], seeds[index], sampler, given[index])
        slots = sorted(running)
        for slot, canvas in zip(slots, engine.denoise(slots, on_draft), strict=True):
            if canvas is None:
                continue
            index = running[slot]
            samples[index].commit(canvas.tokens, canvas.steps, sampler)
            if on_canvas is not None:
                on_canvas(index, samples[index])
            if samples[index].finish == "eos" or samples[index].canvases >= budgets[index]:
                engine.release(slot)
                del running[slot]
                yield index, samples[index]
