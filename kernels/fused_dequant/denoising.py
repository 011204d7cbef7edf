"""The operations of one denoising step after the logits, dispatched by device.

    sample(logits, seeds, canvas_index, step, schedule)     draws, argmax, entropy of each position
    accept(draw, state, schedule, ...)                      the next canvas and the stop, in place

Together they are one step of the entropy-bound sampler (`sampling` has the rules and the kernels), with
no host synchronisation: the number of the step is in device memory. On CUDA the Triton kernels run,
elsewhere `reference`. Drawing is by inverse CDF over sums of another order there, so a draw whose
random number lies within rounding of a boundary may be the neighbouring token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fused_dequant import reference


class Draw(NamedTuple):
    """What one step drew at each position, all [B, L].

    Attributes:
        sampled: int64, drawn from softmax(logits / T).
        replacement: int64, drawn uniformly: where the sample is not accepted.
        argmax: int64, the most probable token, the lowest of several.
        probability: f32, of `sampled`.
        entropy: f32, nats.
    """

    sampled: torch.Tensor
    replacement: torch.Tensor
    argmax: torch.Tensor
    probability: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class CanvasState:
    """Denoising state of B sequences; `accept` writes into these tensors.

    Attributes:
        seeds: int64 [B], one a sample.
        canvas_index: int64 [B], index of the sequence's canvas, from 0.
        step: int32 [B], the step about to be taken, from 1; stands still once a sequence is finished.
        finished: bool [B], stopped by its own criterion.
        inverse_temperature: f32 [B, L], 1 / T of the last step taken, 0 before the first: for
            `soft_embedding` in the next step.
        canvas: int64 [B, L], what the decoder reads next.
        argmax: int64 [B, L], what would be committed.
        history: int64 [S, B, L], argmax of the last S = stability_threshold steps; -1 before the first.
        accepted: bool [B, L], of the last step.
    """

    seeds: torch.Tensor
    canvas_index: torch.Tensor
    step: torch.Tensor
    finished: torch.Tensor
    inverse_temperature: torch.Tensor
    canvas: torch.Tensor
    argmax: torch.Tensor
    history: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def begin(cls, canvas: torch.Tensor, seeds: torch.Tensor, stability: int) -> "CanvasState":
        """The state before step 1 of canvas 0, whose tokens are `canvas` int64 [B, L]."""
        B, device = len(canvas), canvas.device
        return cls(
            seeds=seeds,
            canvas_index=torch.zeros(B, dtype=torch.int64, device=device),
            step=torch.ones(B, dtype=torch.int32, device=device),
            finished=torch.zeros(B, dtype=torch.bool, device=device),
            inverse_temperature=torch.zeros(canvas.shape, device=device),
            canvas=canvas.clone(),
            argmax=canvas.clone(),
            history=torch.full((stability, *canvas.shape), -1, device=device),
            accepted=torch.zeros(canvas.shape, dtype=torch.bool, device=device),
        )


def sample(logits: torch.Tensor, state: CanvasState, schedule: torch.Tensor) -> Draw:
    """Draw one step.

    Args:
        logits: bf16 or f32 [B, L, V], soft-capped, not divided by the temperature.
        state: of which seeds, canvas_index and step are read.
        schedule: f32 [N], the temperature of each step; step 1 first.
    """
    if logits.dim() != 3 or logits.shape[:2] != state.canvas.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit a canvas {tuple(state.canvas.shape)}"
        )
    seeds, canvas_index, step = state.seeds, state.canvas_index, state.step
    if logits.is_cuda:
        from fused_dequant import sampling

        return Draw(*sampling.sample(logits.contiguous(), seeds, canvas_index, step, schedule))
    u = reference.uniforms(seeds, canvas_index, step, logits.shape[1])
    temperature = schedule[step.clamp(max=len(schedule)).long() - 1]
    return Draw(*reference.sample(logits, temperature, u))


def accept(
    draw: Draw,
    state: CanvasState,
    schedule: torch.Tensor,
    *,
    entropy_bound: float,
    confidence_threshold: float,
) -> None:
    """Write the next state: see `CanvasState`. Finished sequences, and those past step N, are left."""
    if draw.entropy.is_cuda:
        from fused_dequant import sampling

        sampling.accept(
            draw.sampled, draw.replacement, draw.argmax, draw.entropy, schedule,
            state.canvas, state.argmax, state.history, state.accepted, state.step, state.finished,
            state.inverse_temperature, entropy_bound, confidence_threshold,
        )  # fmt: skip
        return
    s = state
    live = ~s.finished & (s.step <= len(schedule))
    row = live[:, None]
    taken = reference.accept(draw.entropy, entropy_bound)
    stable = (s.history == draw.argmax).all(-1).all(0)  # true for an empty history
    stop = stable & (draw.entropy.mean(-1) < confidence_threshold)
    s.accepted.copy_(torch.where(row, taken, s.accepted))
    s.canvas.copy_(torch.where(row, torch.where(taken, draw.sampled, draw.replacement), s.canvas))
    s.argmax.copy_(torch.where(row, draw.argmax, s.argmax))
    s.history.copy_(torch.where(row, torch.cat([s.history, draw.argmax[None]])[1:], s.history))
    s.finished.copy_(s.finished | (live & stop))
    now = schedule[s.step.clamp(max=len(schedule)).long() - 1]
    s.inverse_temperature.copy_(torch.where(row, 1 / now[:, None], s.inverse_temperature))
    s.step.add_(live.to(s.step.dtype))
