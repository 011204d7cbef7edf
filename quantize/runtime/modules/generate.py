"""Block-diffusion generation: one batch of ragged prompts to finished samples.

    encode the prompts
    for each canvas:  noise -> denoise until every row has stopped -> commit the argmax canvases
                      rows that met an EOS or their budget leave; the rest encode what they committed

Rows leave the computation as soon as they stop, within a canvas too: most of a batch's steps are run
by its slowest rows. This needs noise with addresses (`noise="counter"`). With `noise="reference"` no
row leaves before the last one stops, because transformers draws for all of them.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.errors import InputError
from quantize.runtime.images import Images
from quantize.runtime.modules.passes import (
    Prefix,
    canvas_length,
    decode_canvas,
    encode_prompts,
    encode_tokens,
    text_config,
)
from quantize.runtime.noise import CounterNoise, Noise, ReferenceNoise
from quantize.runtime.sample import Sample, canvas_budgets
from quantize.runtime.sampler import CanvasState, Sampler, StepRecord, denoise_step

OnStep = Callable[[StepRecord], None]


def generate(
    model: DiffusionGemmaForBlockDiffusion,
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
        model: BF16, float32 or simulated-quantized; on any device.
        prompts: token ids, of any lengths.
        seeds: one int64 seed a prompt; equal (prompt, seed) give equal samples in any batch.
        max_new_tokens: budget; as in transformers whole canvases are generated until it is reached.
        sampler: settings; its `max_new_tokens` is not read here.
        on_step: called after every denoising step.
        noise: "counter" (addressed, see `noise.py`) or "reference" (transformers' stream, for parity
            tests; the seeds are then ignored, torch's global generator counts).
        images: of each prompt, where its image placeholders are.

    Raises:
        InputError: no prompts, or prompts that `encode_prompts` refuses or `max_length` leaves no
            room behind.
    """
    if not prompts or len(seeds) != len(prompts):
        raise InputError(f"generate: {len(prompts)} prompts and {len(seeds)} seeds")
    limit = text_config(model).max_position_embeddings
    canvases = canvas_budgets(prompts, max_new_tokens, sampler, limit, canvas_length(model))
    stream: Noise = (
        ReferenceNoise()
        if noise == "reference"
        else CounterNoise(torch.tensor(seeds, dtype=torch.int64, device=model.device))
    )
    samples = [Sample() for _ in prompts]
    prefix = encode_prompts(model, prompts, images)
    rows = torch.arange(len(prompts), device=model.device)
    for canvas in range(max(canvases)):
        argmax, steps = denoise_canvas(model, prefix, rows, canvas, sampler, stream, on_step)
        committed = argmax.clone()
        for i, row in enumerate(rows.tolist()):
            sample = samples[row]
            if not _is_done(sample, canvases[row]):
                sample.commit(argmax[i].tolist(), int(steps[i]), sampler)
                committed[i] = argmax.new_tensor(sample.committed[-1])
            elif sampler.pad_token_id is not None:  # with reference noise finished rows go on
                committed[i] = sampler.pad_token_id
        running = [
            i for i, row in enumerate(rows.tolist()) if not _is_done(samples[row], canvases[row])
        ]
        if not running:
            break
        if stream.rows_may_leave and len(running) < len(rows):
            keep = torch.tensor(running, device=rows.device)
            rows, committed, prefix = rows[keep], committed[keep], prefix.select(keep)
        prefix = encode_tokens(model, prefix, committed)
    return samples


def _is_done(sample: Sample, budget: int) -> bool:
    return sample.finish == "eos" or sample.canvases >= budget


def denoise_canvas(
    model: DiffusionGemmaForBlockDiffusion,
    prefix: Prefix,
    rows: Tensor,
    canvas: int,
    sampler: Sampler,
    noise: Noise,
    on_step: OnStep | None = None,
) -> tuple[Tensor, Tensor]:
    """Denoise one canvas of each row until all have stopped.

    Args:
        model: transformers' module.
        prefix: what the rows have encoded so far.
        rows: [B] index of each row in the batch as it was given.
        canvas: index of the canvas, from 0.
        sampler: settings.
        noise: random numbers.
        on_step: called after every step.

    Returns:
        Committed canvases [B, L] and the number of steps each row took [B].
    """
    length, vocab = canvas_length(model), text_config(model).vocab_size
    start = noise.initial_canvas(canvas, rows, length, vocab)
    state = CanvasState.begin(start, rows, sampler)
    committed = start.new_zeros(int(rows.max()) + 1, length)  # by index in the batch
    steps = start.new_zeros(len(committed))
    for step in range(1, sampler.max_denoising_steps + 1):
        logits = decode_canvas(model, prefix, state.canvas, state.self_conditioning)
        running = ~state.finished
        state, record = denoise_step(state, logits, canvas, step, sampler, noise)
        committed[state.rows[running]] = state.argmax[running]
        steps[state.rows[running]] = step
        if on_step is not None:
            on_step(record)
        if state.finished.all():
            break
        if noise.rows_may_leave and state.finished.any():
            keep = (~state.finished).nonzero()[:, 0]
            state, prefix = state.select(keep), prefix.select(keep)
    return committed[rows], steps[rows]
