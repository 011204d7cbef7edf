"""Block-diffusion generation of one batch, step by step, so that steps can be recorded and compared.

    encode the prompts
    for each canvas:  noise -> denoise until every row has stopped -> commit the argmax canvases
                      rows that met an EOS or their budget leave; the rest encode what they committed

It drives an engine's `passes`, so every engine can be watched while it runs. `engine.complete` answers
the same requests faster and shows less. Rows leave the computation as soon as they stop, within a
canvas too: most of a batch's steps are run by its slowest rows. This needs noise with addresses
(`noise="counter"`). With `noise="reference"` no row leaves before the last one stops, because
transformers draws for all of them.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from fused_dequant import Draw
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.engine import BatchEngine, DrawingPasses, Passes, joined
from quantize.runtime.images import Images
from quantize.runtime.noise import CounterNoise, Noise, ReferenceNoise
from quantize.runtime.sample import Sample, canvas_budgets
from quantize.runtime.sampler import CanvasState, Sampler, StepRecord, denoise_step, look

OnStep = Callable[[StepRecord], None]


def generate(
    engine: BatchEngine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    on_step: OnStep | None = None,
    noise: Literal["counter", "reference"] = "counter",
    images: Sequence[Images | None] | None = None,
) -> list[Sample]:
    """Generate one sample for each prompt, as one batch.

    Args:
        engine: none of its slots may be taken.
        prompts: token ids, of any lengths.
        seeds: one int64 seed a prompt; equal (prompt, seed) give equal samples in any batch.
        max_new_tokens: budget; as in transformers whole canvases are generated until it is reached.
        sampler: settings; its `max_new_tokens` is not read here.
        on_step: called after every denoising step.
        noise: "counter" (addressed, see `noise.py`) or "reference" (transformers' stream, for parity
            tests; the seeds are then ignored, torch's global generator counts).
        images: each prompt's images, which its image placeholders stand for; None for none.

    Raises:
        InputError: there are no prompts, or the engine refuses one, or one leaves no room for tokens.
    """
    if not prompts or len(seeds) != len(prompts):
        raise InputError(f"generate: {len(prompts)} prompts and {len(seeds)} seeds")
    budgets = canvas_budgets(
        prompts, max_new_tokens, sampler, engine.max_length, engine.canvas_length
    )
    stream: Noise = (
        ReferenceNoise()
        if noise == "reference"
        else CounterNoise(torch.tensor(seeds, dtype=torch.int64, device=engine.device))
    )
    samples = [Sample() for _ in prompts]
    passes = engine.passes(prompts, images)
    rows = list(range(len(prompts)))
    for canvas in range(max(budgets)):
        argmax, steps = denoise_canvas(passes, rows, canvas, sampler, stream, on_step)
        committed = argmax.clone()
        for i, row in enumerate(rows):
            sample = samples[row]
            if not _is_done(sample, budgets[row]):
                sample.commit(argmax[i].tolist(), int(steps[i]), sampler)
                committed[i] = argmax.new_tensor(sample.committed[-1])
            elif sampler.pad_token_id is not None:  # with reference noise finished rows go on
                committed[i] = sampler.pad_token_id
        running = [i for i, row in enumerate(rows) if not _is_done(samples[row], budgets[row])]
        if not running:
            break
        if stream.rows_may_leave:
            rows, committed = [rows[i] for i in running], committed[running]
        passes.encode(rows, committed)
    return samples


def ended(record: StepRecord, sampler: Sampler) -> list[tuple[int, bool]]:
    """Return, of each canvas that ends with a step, its tokens up to an EOS and whether it has one."""
    last = record.step == sampler.max_denoising_steps
    found: list[tuple[int, bool]] = []
    for ids, finished in zip(record.argmax.tolist(), record.finished.tolist(), strict=True):
        if finished or last:
            end = next((i for i, token in enumerate(ids) if token in sampler.eos_token_ids), None)
            found.append((len(ids) if end is None else end + 1, end is not None))
    return found


def _is_done(sample: Sample, budget: int) -> bool:
    return sample.finish == "eos" or sample.canvases >= budget


def denoise_canvas(
    passes: Passes,
    rows: list[int],
    canvas: int,
    sampler: Sampler,
    noise: Noise,
    on_step: OnStep | None = None,
) -> tuple[Tensor, Tensor]:
    """Denoise one canvas of each row until all have stopped.

    Args:
        passes: the passes, which hold what the rows have encoded so far.
        rows: [B] index of each row in the batch as it was given.
        canvas: index of the canvas, from 0.
        sampler: settings.
        noise: random numbers.
        on_step: called after every step.

    Returns:
        Committed canvases [B, L] and the number of steps each row took [B].
    """
    index = torch.tensor(rows, device=passes.device)
    start = noise.initial_canvas(canvas, index, passes.canvas_length, passes.vocabulary)
    state = CanvasState.begin(start, index, sampler)
    committed = start.new_zeros(max(rows) + 1, passes.canvas_length)  # by index in the batch
    steps = start.new_zeros(len(committed))
    for step in range(1, sampler.max_denoising_steps + 1):
        seen, conditioning = _see(passes, state, canvas, step, sampler, noise)
        running = ~state.finished
        state, record = denoise_step(state, seen, conditioning, canvas, step, sampler)
        committed[state.rows[running]] = state.argmax[running]
        steps[state.rows[running]] = step
        if on_step is not None:
            on_step(record)
        if state.finished.all():
            break
        if noise.rows_may_leave and state.finished.any():
            state = state.select((~state.finished).nonzero()[:, 0])
    return committed[index], steps[index]


def _see(
    passes: Passes, state: CanvasState, canvas: int, step: int, sampler: Sampler, noise: Noise
) -> tuple[Draw, Tensor]:
    """Decode, and draw piece by piece; return what was drawn, and the next conditioning."""
    decoded = passes.decode(state.rows.tolist(), state.canvas, state.self_conditioning)
    if isinstance(passes, DrawingPasses) and isinstance(noise, CounterNoise):
        seeds, behind = noise.seeds[state.rows], noise.first[state.rows] + canvas
        return passes.draw(decoded, seeds, behind, step, sampler)
    temperature = sampler.temperature(step).to(passes.device)
    looks: list[Draw] = []
    conditioning: list[Tensor] = []
    for piece in decoded.pieces():
        logits = decoded.logits(piece)
        looks.append(look(logits / temperature, canvas, step, state.rows[piece], noise))
        conditioning.append(passes.condition(logits, temperature))
    return Draw.join(looks), joined(conditioning)
