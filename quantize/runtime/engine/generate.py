"""Block-diffusion generation of one batch, step by step, so that steps can be recorded and compared.

    encode the prompts
    for each canvas:  noise -> denoise until every row has stopped -> commit the argmax canvases
                      rows that met an EOS or their budget leave; other rows encode their canvas

A row is one prompt of the batch. The loop runs an engine's `passes`, which observers can watch;
`engine.complete` answers the same prompts faster. A row whose canvas has stopped is not computed
while other rows go on, so most steps of a batch compute only its slowest rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from fused_dequant.sampler.canvas import random_tokens
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.engine.interface import BatchEngine, Decoded, DrawingPasses
from quantize.runtime.prompt.images import Images
from quantize.runtime.sampler.sample import Sample, canvas_budgets
from quantize.runtime.sampler.sampler import Sampler


@dataclass(frozen=True)
class StepRecord:
    """What one denoising step did to the canvases of the B rows that took part."""

    canvas: int  # index of the canvas in its sample, from 0
    step: int  # number of the step in its canvas, from 1
    rows: list[int]  # the B rows' indices among all prompts of the batch
    canvas_ids: Tensor  # int64 [B, L], the tokens that the decoder read
    argmax: Tensor  # int64 [B, L], the most probable tokens
    accepted: Tensor  # bool [B, L], whether the step accepted a token at the position
    entropy: Tensor  # float32 [B, L] in nats, of softmax(logits / temperature)
    ends: Tensor  # bool [B], whether the canvas ends: it has stopped, or took all allowed steps
    decoded: Decoded  # the step's pass, until the next one overwrites it

    def stopped(self) -> tuple[list[int], list[list[int]]]:
        """Return the rows whose canvas ends with this step, and for each row the L committed tokens."""
        places = self.ends.nonzero()[:, 0]
        return [self.rows[i] for i in places.tolist()], self.argmax[places].tolist()


OnStep = Callable[[StepRecord], None]


def generate(
    engine: BatchEngine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    on_step: OnStep | None = None,
    images: Sequence[Images | None] | None = None,
) -> list[Sample]:
    """Generate one batch; return one sample per prompt, in order. All slots must be free before.

    `prompts` are token ids of any lengths, `seeds` are int64. A prompt and a seed give the same sample
    in any batch, except for rounding on a GPU. Whole canvases are generated until `max_new_tokens` are
    reached. `on_step` is called after every denoising step. `images` has pictures or None per prompt.
    Raise InputError if prompts or seeds are missing, a prompt is refused, or no token fits after it.
    """
    if not prompts or len(seeds) != len(prompts):
        raise InputError(f"generate: {len(prompts)} prompts and {len(seeds)} seeds")
    budgets = canvas_budgets(
        prompts, max_new_tokens, sampler, engine.max_length, engine.canvas_length
    )
    samples = [Sample() for _ in prompts]
    passes = engine.passes(prompts, images)
    own_seeds = torch.tensor(seeds, dtype=torch.int64, device=passes.device)
    rows = list(range(len(prompts)))
    for canvas in range(max(budgets)):
        for record in _denoise(passes, rows, own_seeds[rows], canvas, sampler):
            for row, tokens in zip(*record.stopped(), strict=True):
                samples[row].commit(tokens, record.step, sampler)
            if on_step is not None:
                on_step(record)
        rows = [r for r in rows if samples[r].finish != "eos" and samples[r].canvases < budgets[r]]
        if not rows:
            break
        committed = torch.tensor([samples[row].committed[-1] for row in rows])
        passes.encode(rows, committed.to(passes.device))
    return samples


def _denoise(
    passes: DrawingPasses, rows: list[int], seeds: Tensor, canvas: int, sampler: Sampler
) -> Iterator[StepRecord]:
    """Take the steps of one canvas per row and yield their records; rows leave when they stop."""
    noise = random_tokens(seeds, canvas, passes.canvas_length, passes.vocabulary)
    state = sampler.begin(noise, seeds, canvas)
    conditioning, schedule = None, sampler.schedule(passes.device)
    for step in range(1, sampler.max_denoising_steps + 1):
        read = state.canvas.clone()
        decoded = passes.decode(rows, read, conditioning)
        draw, conditioning = passes.draw(decoded, state, schedule)
        sampler.decide(draw, state, schedule)
        ends = state.finished | (step == sampler.max_denoising_steps)
        yield StepRecord(
            canvas,
            step,
            rows,
            read,
            draw.argmax,
            state.accepted.clone(),
            draw.entropy,
            ends,
            decoded,
        )
        running = (~ends).nonzero()[:, 0]
        if len(running) == 0:
            break
        if len(running) < len(rows):
            rows = [rows[i] for i in running.tolist()]
            state, conditioning = state.part(running), conditioning[running]
