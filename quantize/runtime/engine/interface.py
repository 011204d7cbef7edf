"""The interface of an engine: samples join and leave between canvases while other samples run.

    admit a prompt to a free slot -> denoise a canvas for any set of slots -> ... -> release the slot

`generate` runs one batch from its prompts to its end. An `Engine` returns control whenever a canvas is
finished. Noise is addressed by (seed, canvas, step, position), and no slot reads the text of another
slot. So other samples and timing change a sample only by rounding; with `batch_invariant`, not at all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from fused_dequant import CanvasState, Draw
from torch import Tensor

from quantize.runtime.model.choices import Choices, RoutingLog
from quantize.runtime.model.watching import Observer
from quantize.runtime.prompt.images import Images
from quantize.runtime.prompt.prefixes import PrefixCache
from quantize.runtime.sampler.known_tokens import Given
from quantize.runtime.sampler.sample import Sample, canvas_budgets
from quantize.runtime.sampler.sampler import Sampler

T = TypeVar("T")
# called after every denoising step: (slot, step from 1, most probable tokens, accepted or not)
OnDraft = Callable[[int, int, list[int], list[bool]], None]
# called without arguments, at most once in each call of `denoise`
Meanwhile = Callable[[], None]
# called after every canvas: (index of the prompt, its sample so far)
OnCanvas = Callable[[int, Sample], object]
PIECE = 1 << 26  # logits made at once: 268 MB in float32, and temporaries a few times as large


@dataclass(frozen=True)
class Decoded:
    """The result of one decoder pass over B canvases of L tokens."""

    shape: Sequence[int]  # (B, L, V) of the logits
    choices: Choices  # what the layers' routers chose, of L tokens a sequence
    rows: Tensor  # [B, ...], from which `head` computes the logits
    # Returns the logits float32 [b, L, V] of some `rows`, soft-capped, not divided by the
    # temperature. It holds no weights of the model except the vocabulary's.
    head: Callable[[Tensor], Tensor]

    def logits(self, piece: slice) -> Tensor:
        """Return the logits float32 [b, L, V] of the b canvases in `piece`; 64 canvases take 17 GB."""
        return self.head(self.rows[piece])

    def to(self, device: torch.device | str) -> "Decoded":
        """Return a copy with its tensors on `device`; `head` still needs rows on the model's device."""
        choices = self.choices.on_host if device == "cpu" else self.choices.to(device)
        return replace(self, choices=choices, rows=self.rows.to(device))

    def pieces(self) -> Iterator[slice]:
        """Yield slices of the B canvases, each of one canvas or of several with up to PIECE logits."""
        B, L, V = self.shape
        step = max(1, PIECE // (L * V))
        for start in range(0, B, step):
            yield slice(start, min(start + step, B))


class Passes(Protocol):
    """Encoder and decoder passes over one batch of sequences; the caller chooses their order.

    A row is one sequence; `rows` are ascending indices into the batch. `decode` may leave rows out. A
    row left out of `encode` takes no part in later passes. L is `canvas_length`, V is `vocabulary`.
    """

    canvas_length: int
    vocabulary: int

    @property
    def device(self) -> torch.device:
        """The device of all tensors that the methods take and return."""

    def encode(self, rows: list[int], tokens: Tensor) -> None:
        """Encode `tokens` int64 [B, L] and append them to the sequences of `rows`."""

    def decode(self, rows: list[int], canvas: Tensor, conditioning: Tensor | None) -> Decoded:
        """Decode `canvas` int64 [B, L] after the text of `rows`; `conditioning` is None at step 1."""

    def condition(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return the next step's conditioning [b, ...] from logits [b, L, V] and one `temperature`."""


class DrawingPasses(Passes, Protocol):
    """Passes that also draw tokens, by the same rules as `Engine.denoise`."""

    def draw(self, decoded: Decoded, state: CanvasState, schedule: Tensor) -> tuple[Draw, Tensor]:
        """Return a step's draw from `decoded`, and the next step's conditioning [B, ...].

        `state` has each canvas' step number and is not changed. `schedule` float32 [N] has the
        temperatures of all steps.
        """


@dataclass(frozen=True)
class Canvas:
    """A finished canvas: all its tokens, including those after an EOS, and its number of steps."""

    tokens: list[int]
    steps: int


class BatchEngine(Protocol):
    """Generates batches of up to `capacity` prompts; a sample takes up to `max_length` positions."""

    capacity: int
    canvas_length: int
    max_length: int

    @property
    def device(self) -> torch.device:
        """The device of a batch's tensors."""

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> DrawingPasses:
        """Encode prompts in free slots and return their passes; raise InputError as `admit` does."""

    def watching(
        self, *observers: Observer, on_pass: Callable[[Any], object] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which `observers` see the input rows of every Linear, without padding.

        `on_pass` is called with every `passes.Pass` as it entered the first layer. On a CPU, several
        threads make these calls.
        """


class Engine(BatchEngine, Protocol):
    """A model that denoises canvases of up to `slots` samples, at most `capacity` samples per pass.

    Each sample has a slot, and one canvas at a time. `denoise` takes distinct, admitted slots, whose
    settings and canvas indices may differ. It returns, in the same order, each slot's finished canvas,
    or None if the next call will continue the canvas. A canvas is encoded just before the slot's next
    canvas, so a sample's last canvas is never encoded. Except for rounding, a canvas depends only on
    `admit`'s arguments and the sample's earlier canvases. An engine reads only a `sampler`'s denoising
    settings. Slots may be released between calls. `prefixes`, if not None, caches prompts' beginnings.
    The caller looks for EOS and counts tokens. It makes all calls on one thread; `meanwhile` runs on
    this thread, at most once, while the device works. `on_draft` may run on another thread.
    """

    prefixes: PrefixCache[Any] | None
    slots: int

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        seed: int,
        sampler: Sampler,
        images: Images | None = None,
        given: Given | None = None,
    ) -> None:
        """Put `prompt` (token ids) into a free slot; `seed` (int64) keys the sample's random numbers.

        `images` are the prompt's pictures, `given` the answer's known tokens; None if there are none.
        Raise InputError if the model cannot take the prompt, the images or the known tokens.
        """

    def denoise(
        self,
        slots: Sequence[int],
        on_draft: OnDraft | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Sequence[Canvas | None]:
        """Denoise until at least one slot's canvas is finished; return each slot's canvas or None.

        All are None if guides have what was finished denoised again: between two tries others may come.
        """

    def release(self, slot: int) -> None:
        """Free a slot."""

    def each(self, works: Sequence[Callable[[BatchEngine], T]]) -> list[T]:
        """Call every function of `works` with an engine; return their results in the same order.

        If weights are streamed, several functions can run side by side and share each copied layer.
        """

    def routing(
        self, *, noted: RoutingLog | None = None, given: RoutingLog | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which encoder passes add to `noted`, or all passes take from `given`."""

    def close(self) -> None:
        """Wait for streamed layers that are being copied; memory is freed with the engine object."""

    def warm_up(self, sampler: Sampler) -> None:
        """Compile the kernels and capture the CUDA graphs that canvases under `sampler` need."""


def each_completed(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int | Sequence[int],
    sampler: Sampler,
    on_draft: OnDraft | None = None,
    images: Sequence[Images | None] | None = None,
    on_canvas: OnCanvas | None = None,
    order: Iterable[int] | None = None,
) -> Iterator[tuple[int, Sample]]:
    """Yield (index, sample) of each prompt when its sample is finished; prompts may outnumber slots.

    Samples and other arguments are as in `generate`. `on_draft` is called after every step,
    `on_canvas` after every canvas. A slot that becomes free goes to the next prompt at once. `order`
    gives the indices of the prompts to answer, each asked for when it has a slot; None means all.
    Raise InputError if the engine cannot take a prompt or its images, or no token fits after a prompt.
    """
    budgets = canvas_budgets(
        prompts, max_new_tokens, sampler, engine.max_length, engine.canvas_length
    )
    given = [None] * len(prompts) if images is None else images
    samples = [Sample() for _ in prompts]
    waiting = iter(range(len(prompts)) if order is None else order)
    running = dict[int, int]()
    try:
        while True:
            free = (slot for slot in range(engine.slots) if slot not in running)
            for slot, index in zip(list(free), waiting, strict=False):
                engine.admit(slot, prompts[index], seeds[index], sampler, given[index])
                running[slot] = index
            if not (slots := sorted(running)):
                break
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
    finally:
        for slot in running:  # after an error, or when the caller has enough
            engine.release(slot)


def complete(*args: Any, **settings: Any) -> list[Sample]:
    """Return the samples of `each_completed` in the order of the prompts."""
    samples = dict(each_completed(*args, **settings))
    return [samples[index] for index in range(len(samples))]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return `parts` joined along dimension 0; a single tensor is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
