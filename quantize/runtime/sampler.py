"""The entropy-bound sampler: its settings and one denoising step's decisions, on logits alone.

At step s = 1..N of a canvas, with n = N - s + 1 steps remaining (transformers counts down):

    l = logits / T,   T = t_min + (t_max - t_min) * n / N
    y ~ softmax(l),   a = argmax(l),   H = entropy(l) in nats, all per position
    accept the positions of lowest H while the sum of all LOWER entropies is <= entropy_bound
    next canvas = y where accepted, uniformly random tokens elsewhere (the current canvas cancels out)

The row stops when a is unchanged over `stability_threshold` steps and mean(H) < confidence_threshold,
and commits a, not y. The next step's self-conditioning is l: divided by the temperature.
Entropy-bound acceptance: arXiv 2505.24857; the algorithm is that of transformers 5.17
`generation_diffusion_gemma.py`. Every engine, calibration and fidelity share it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fused_dequant import Draw
from fused_dequant.canvas import accepted, stopped, token_entropy
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.known_tokens import FREE, certain, put
from quantize.runtime.noise import Noise

# Fields of generation_config.json that cannot change what this runtime returns.
WITHOUT_EFFECT = frozenset(
    {
        "bos_token_id",  # the chat template writes it
        "disable_compile",  # nothing is compiled
        "return_dict_in_generate",  # one result type
        "transformers_version",
        "_commit_hash",
        "_from_model_config",
    }
)


@dataclass(frozen=True)
class Sampler:
    """Settings of block-diffusion generation; the defaults are transformers'.

    Attributes:
        max_new_tokens: default budget; whole canvases are generated until it is reached.
        max_length: limit on prompt plus new tokens, None for none.
        max_denoising_steps: N, steps of a canvas at most.
        entropy_bound: largest sum of lower entropies (nats) at which a token is still accepted.
        t_min, t_max: temperature after the last and at the first step.
        stability_threshold: steps over which the argmax canvas must not change.
        confidence_threshold: mean entropy (nats) below which a stable canvas is finished.
        eos_token_ids: any of these ends the sample.
        pad_token_id: fills a canvas after its end; None leaves the tokens there.
    """

    max_new_tokens: int = 256
    max_length: int | None = None
    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for field in ("max_new_tokens", "max_denoising_steps", "max_length"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise InputError(f"generation config: {field} must be above 0, not {value}")
        for field in ("entropy_bound", "confidence_threshold"):
            if getattr(self, field) <= 0:
                raise InputError(
                    f"generation config: {field} must be above 0, not {getattr(self, field)}"
                )
        if not self.t_max > self.t_min >= 0 or self.stability_threshold < 0:
            raise InputError(
                f"generation config: needs t_max > t_min >= 0 and stability_threshold >= 0, has "
                f"{self.t_max}, {self.t_min} and {self.stability_threshold}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Sampler":
        """Build from the fields of generation_config.json; a field that is null takes its default.

        Raises:
            InputError: a field is unknown or not honoured here; the message names it.
        """
        fields = {key: value for key, value in config.items() if value is not None}
        for key in WITHOUT_EFFECT:
            fields.pop(key, None)
        if fields.pop("cache_implementation", "dynamic") != "dynamic":
            raise InputError(
                f"generation config: cache_implementation {config['cache_implementation']!r} is not "
                f"supported (transformers' static cache is wrong past the sliding window); remove it"
            )
        eos = fields.pop("eos_token_id", ())
        fields["eos_token_ids"] = (eos,) if isinstance(eos, int) else tuple(eos)
        fields |= _entropy_bound(fields.pop("sampler_config", None))
        unknown = fields.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise InputError(f"generation config: {sorted(unknown)[0]!r} is not supported here")
        return cls(**fields)

    @classmethod
    def from_checkpoint(cls, folder: Path) -> "Sampler":
        """Build from `folder`/generation_config.json; without that file, transformers' defaults."""
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise InputError(f"{path}: not valid JSON ({error})") from error
        return cls.from_config(config)

    def temperature(self, step: int | Tensor) -> Tensor:
        """Return the temperature of `step` (from 1), float32 of its shape, as transformers has it."""
        remaining = self.max_denoising_steps - torch.as_tensor(step, dtype=torch.int32) + 1
        return self.t_min + (self.t_max - self.t_min) * (remaining / self.max_denoising_steps)


def _entropy_bound(config: Any) -> dict[str, Any]:
    """Read `sampler_config`, which transformers stores with the name of its class."""
    if config is None:
        return {}
    known = {"_cls_name", "entropy_bound"}
    name = config.get("_cls_name", "EntropyBoundSamplerConfig")
    if name != "EntropyBoundSamplerConfig" or not config.keys() <= known:
        raise InputError(
            f"generation config: sampler_config {name!r} with {sorted(config.keys() - known)} is not "
            f"supported; only EntropyBoundSamplerConfig with entropy_bound is"
        )
    return {"entropy_bound": config["entropy_bound"]} if "entropy_bound" in config else {}


@dataclass
class CanvasState:
    """Denoising state of the rows that still run on one canvas.

    Attributes:
        rows: [B] index of each row in the batch as it was given.
        canvas: [B, L] token ids the decoder reads next.
        argmax: [B, L] most probable tokens of the last step: what would be committed.
        history: [stability_threshold, B, L] argmax of the steps before; -1 where there was none.
        self_conditioning: [B, ...] what the next step is conditioned on, None at the first: the
            temperature-divided logits [B, L, V], or what an engine's `condition` makes of them.
        finished: [B] bool.
        pinned: [B, L] token ids that stand whatever the model says, FREE elsewhere; None for none.
    """

    rows: Tensor
    canvas: Tensor
    argmax: Tensor
    history: Tensor
    self_conditioning: Tensor | None
    finished: Tensor
    pinned: Tensor | None = None

    @classmethod
    def begin(
        cls, canvas: Tensor, rows: Tensor, sampler: Sampler, pinned: Tensor | None = None
    ) -> "CanvasState":
        """Return the state before the first step on `canvas` [B, L], which holds the pinned tokens."""
        history = torch.full((sampler.stability_threshold, *canvas.shape), -1, device=canvas.device)
        finished = torch.zeros(len(rows), dtype=torch.bool, device=canvas.device)
        return cls(rows, canvas, canvas, history, None, finished, pinned)

    @classmethod
    def join(cls, states: Sequence["CanvasState"]) -> "CanvasState":
        """Concatenate states that share settings, and renumber the rows.

        A state without self-conditioning gets zeros for it.
        """
        given = [state.self_conditioning for state in states]
        like = next((logits for logits in given if logits is not None), None)
        filled = [
            logits if logits is not None else like.new_zeros(len(state.rows), *like.shape[1:])
            for logits, state in zip(given, states, strict=True)
            if like is not None
        ]
        canvas = torch.cat([state.canvas for state in states])
        return cls(
            torch.arange(len(canvas), device=canvas.device),
            canvas,
            torch.cat([state.argmax for state in states]),
            torch.cat([state.history for state in states], dim=1),
            torch.cat(filled) if filled else None,
            torch.cat([state.finished for state in states]),
            cls._join_pinned(states),
        )

    @staticmethod
    def _join_pinned(states: Sequence["CanvasState"]) -> Tensor | None:
        if all(state.pinned is None for state in states):
            return None
        return torch.cat(
            [
                torch.full_like(state.canvas, FREE) if state.pinned is None else state.pinned
                for state in states
            ]
        )

    def select(self, keep: Tensor) -> "CanvasState":
        """Return the state of the rows `keep` (indices into this state)."""
        conditioning = None if self.self_conditioning is None else self.self_conditioning[keep]
        return CanvasState(
            self.rows[keep],
            self.canvas[keep],
            self.argmax[keep],
            self.history[:, keep],
            conditioning,
            self.finished[keep],
            None if self.pinned is None else self.pinned[keep],
        )


@dataclass(frozen=True)
class StepRecord:
    """What one denoising step did, for the rows that took part.

    Attributes:
        canvas: index of the canvas, from 0.
        step: denoising step, from 1.
        rows: [B] indices into the batch as it was given.
        canvas_ids: [B, L] tokens the decoder read.
        argmax: [B, L] most probable tokens.
        accepted: [B, L] bool.
        entropy: [B, L] nats, of the temperature-divided logits.
        finished: [B] whether the row stops with this step by its own criterion.
    """

    canvas: int
    step: int
    rows: Tensor
    canvas_ids: Tensor
    argmax: Tensor
    accepted: Tensor
    entropy: Tensor
    finished: Tensor

    @property
    def mean_entropy(self) -> Tensor:
        """Mean entropy of each row, [B] nats."""
        return self.entropy.mean(-1)


def holding(draw: Draw, pinned: Tensor) -> Draw:
    """Return the draw with the tokens of `pinned` [B, L] put in, at entropy 0."""
    return Draw(
        put(pinned, draw.sampled), draw.replacement, put(pinned, draw.argmax),
        certain(pinned, draw.entropy),
    )  # fmt: skip


def look(scaled: Tensor, canvas: int, step: int | Tensor, rows: Tensor, noise: Noise) -> Draw:
    """Draw from `scaled` = logits / T, [B, L, V] float32, of the batch's `rows`."""
    sampled, replacement = noise.draw(scaled.softmax(-1), canvas, step, rows)
    return Draw(sampled, replacement, scaled.argmax(-1), token_entropy(scaled))


def denoise_step(
    state: CanvasState,
    seen: Draw,
    conditioning: Tensor,
    canvas: int,
    step: int,
    sampler: Sampler,
) -> tuple[CanvasState, StepRecord]:
    """Decide denoising step `step` of all rows; return the state after it, and its record."""
    after, taken = advance(state, seen, conditioning, sampler)
    entropy = seen.entropy
    finished = after.finished & ~state.finished
    record = StepRecord(
        canvas, step, state.rows, state.canvas, after.argmax, taken, entropy, finished
    )
    return after, record


def decide(
    state: CanvasState,
    logits: Tensor,
    canvas: int,
    step: int | Tensor,
    sampler: Sampler,
    noise: Noise,
) -> tuple[CanvasState, Tensor, Tensor]:
    """Decide one denoising step.

    Args:
        state: the state whose `canvas` the decoder has just read.
        logits: [B, L, V] float32, soft-capped, not divided by the temperature.
        canvas: index of the canvas, from 0.
        step: denoising step, from 1; [B] when each row is at its own.
        sampler: settings.
        noise: source of the random numbers.

    Returns:
        The state after the step, what was accepted [B, L] bool, and the entropy [B, L] in nats.
    """
    scaled = logits / sampler.temperature(step).to(logits.device).view(-1, 1, 1)
    seen = look(scaled, canvas, step, state.rows, noise)
    after, taken = advance(state, seen, scaled, sampler)
    return after, taken, seen.entropy


def advance(
    state: CanvasState, seen: Draw, conditioning: Tensor, sampler: Sampler
) -> tuple[CanvasState, Tensor]:
    """Return the state after a step, and what was accepted [B, L] bool.

    `conditioning` [B, ...] is what the next step is conditioned on: the state carries it.
    """
    if state.pinned is not None:
        seen = holding(seen, state.pinned)
    taken = accepted(seen.entropy, sampler.entropy_bound)
    finished = stopped(state.history, seen.argmax, seen.entropy, sampler.confidence_threshold)
    after = CanvasState(
        state.rows,
        torch.where(taken, seen.sampled, seen.replacement),
        seen.argmax,
        torch.cat([state.history, seen.argmax[None]])[1:],
        conditioning,
        state.finished | finished,
        state.pinned,
    )
    return after, taken
