"""The bundled model's held-out problems: BF16's trajectories on them, and the KL of models there."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.runtime import open
from quantize.runtime.engine.interface import BatchEngine
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.record.trajectory import Prompt, Trajectory, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.schemes.modes import ActivationMode
from quantize.stages.fidelity.fidelity import by_trajectory
from quantize.stages.fidelity.replay import Compared, StepDistance, replay

FIRST, BATCH, CANVASES = 1000, 64, 2  # of the held-out problems; prompts at once; canvases a prompt

tokenizer_of = cache(load_tokenizer)


def prompt_of(row: dict[str, Any], thinking: bool, checkpoint: Path = CHECKPOINT) -> list[int]:
    """Tokenize a problem as a chat."""
    chat = [{"role": "user", "content": row["question"]}]
    return encode_chat(tokenizer_of(checkpoint), chat, thinking=thinking)


def heldout(count: int, seed: int = 0, checkpoint: Path = CHECKPOINT) -> list[Prompt]:
    """Return `count` held-out problems, others for another seed; every second one turns thinking on.

    Raises:
        click.ClickException: there are too few for this seed.
    """
    first = FIRST + seed * count
    lines = HELDOUT.read_text("utf-8").splitlines()[first : first + count]
    if len(lines) < count:
        raise click.ClickException(
            f"seed {seed}: {len(lines)} of {count} held-out problems are there"
        )
    rows = [(json.loads(line), index % 2 == 1) for index, line in enumerate(lines)]
    return [Prompt(tuple(prompt_of(row, odd, checkpoint)), odd) for row, odd in rows]


def recorded(
    reference: BatchEngine, count: int, seed: int = 0, checkpoint: Path = CHECKPOINT, *,
    batch: int = BATCH, sampler: Sampler | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Return BF16's trajectories on `count` held-out problems, which no recipe is calibrated on."""
    prompts, sampler = (
        heldout(count, seed, checkpoint),
        sampler or Sampler.from_checkpoint(checkpoint),
    )
    made: list[Trajectory] = []
    for start in range(0, count, batch):
        some = prompts[start : start + batch]
        seeds = [(seed << 32) + start + row for row in range(len(some))]
        made += record(reference, some, seeds, sampler=sampler, canvases=CANVASES, held_out=True)
    return made


def kl_of(
    models: Sequence[tuple[Path, ActivationMode]], count: int, device: str
) -> list[list[float]]:
    """Return each model's mean KL from BF16 on each of `count` held-out trajectories, in nats."""
    reference, *engines = (
        open(folder, device=device, activations=mode, capacity=BATCH)
        for folder, mode in ((CHECKPOINT, "none"), *models)
    )
    compared, sampler = list(map(Compared, engines)), Sampler.from_checkpoint(CHECKPOINT)
    measured = replay(reference, compared, recorded(reference, count), sampler, batch_size=BATCH)
    return list(map(kl_by_trajectory, measured))


def kl_by_trajectory(distances: Sequence[StepDistance]) -> list[float]:
    """Return each trajectory's mean KL, in nats."""
    return list(by_trajectory(distances, lambda step: step.kl.mean().item()).values())
