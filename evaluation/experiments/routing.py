"""Do a few trajectories carry the damage because a router's choice flips? Replay with BF16's choices.

    PYTHONPATH=evaluation python -m experiments.routing CHECKPOINT ...

Every checkpoint is replayed three times on the same held-out trajectories, beside BF16:

    own       its routers choose experts from its own activations
    chosen    BF16's experts, weighted by its own probabilities of them, normalised
    weighted  BF16's experts and BF16's weights

What falls from `own` to `chosen` is what other experts cost; what falls from there to `weighted`, what
other weights cost. The rest is done by the products. Encoder and decoder are both held. One thread
computes: several would share a pass, and make its choices in any order.
"""

import json
import math
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import click
import fused_dequant
import torch
from torch import Tensor

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.runtime import open
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import BatchEngine
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.record.trajectory import Prompt, Trajectory, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import load_packed
from quantize.schemes.modes import ACTIVATION_MODES, ActivationMode
from quantize.stages.fidelity.fidelity import bootstrap_interval, by_trajectory
from quantize.stages.fidelity.replay import Compared, StepDistance, replay

FIRST, BATCH, CANVASES = 1000, 64, 2  # of the held-out problems; prompts at once; canvases a prompt
HELD = ("own", "chosen", "weighted")
Choice = tuple[Tensor, Tensor]  # a router's experts and their weights, both [M, topk]


@contextmanager
def routers_held(reference: FusedEngine, held: str) -> Generator[None]:
    """Give every other engine's routers the choices of `reference`'s, which takes each pass first.

    Raises:
        RuntimeError: the routers of `reference` and of the other engine did not run equally often.
    """
    choose, waiting = fused_dequant.choose_experts, deque[Choice]()
    routers = {layer.router.data_ptr() for layer in reference.model.weights.layers}

    def held_choose(x: Tensor, router: Tensor, scale: Tensor, topk: int) -> Choice:
        if router.data_ptr() in routers:
            waiting.append(choose(x, router, scale, topk))
            return waiting[-1]
        if not waiting:
            raise RuntimeError("no choice to hold: the engines ran other passes")
        return held_choice(x, router, scale, waiting.popleft(), held)

    with mock.patch.object(
        fused_dequant, "choose_experts", choose if held == "own" else held_choose
    ):
        yield
    if waiting:
        raise RuntimeError(f"{len(waiting)} choices were not read: the engines ran other passes")


def held_choice(x: Tensor, router: Tensor, scale: Tensor, choice: Choice, held: str) -> Choice:
    """Return the experts of `choice`, and its weights too if `held` is `weighted`.

    Else the weights follow from x bf16 [M, H], router bf16 [E, H] and scale bf16 [E], as
    `fused_dequant.choose_experts` computes them.
    """
    experts, weights = choice
    if held == "weighted":
        return choice
    chances = torch.softmax((x @ router.T).float(), -1).gather(1, experts.long())
    weights = chances / chances.sum(-1, keepdim=True) * scale.float()[experts.long()]
    return experts, weights


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


def damage(
    reference: FusedEngine, folder: Path, mode: ActivationMode, held: str,
    trajectories: Sequence[Trajectory],
) -> list[float]:  # fmt: skip
    """Replay `trajectories` with a checkpoint; return each one's mean KL from BF16, in nats."""
    engine = open(folder, device="cpu", activations=mode, capacity=BATCH)
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    with routers_held(reference, held):
        (distances,) = replay(
            reference, [Compared(engine)], trajectories, sampler, batch_size=BATCH
        )
    return kl_by_trajectory(distances)


def row(name: str, mode: str, held: str, kl: list[float], baseline: list[float]) -> str:
    """Return a line of the table; KL in nats x 1000, differences from `own` paired by trajectory."""
    low, high = bootstrap_interval([b - a for a, b in zip(baseline, kl, strict=True)])
    most = sum(sorted(kl)[-6:]) / sum(kl)
    middle = math.exp(mean(math.log(max(nats, 1e-9)) for nats in kl))
    return (
        f"| {name} | {mode} | {held} | {1000 * mean(kl):.2f} [{1000 * low:+.2f}, {1000 * high:+.2f}]"
        f" | {1000 * middle:.2f} | {most:.0%} |"
    )


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--trajectories", "count", default=128, show_default=True)
@click.option(
    "--mode", "modes", multiple=True, type=click.Choice(ACTIVATION_MODES), default=("per_layer",)
)
def main(folders: tuple[Path, ...], count: int, modes: tuple[ActivationMode, ...]) -> None:
    """Print docs/rounding-log.md's table of routing."""
    torch.set_num_threads(1)
    reference = FusedEngine(load_packed(CHECKPOINT, "cpu"), capacity=BATCH)
    trajectories = recorded(reference, count)
    print("| checkpoint | activations | routers | KL [minus own] | geometric | largest six |")
    print("|---|---|---|---:|---:|---:|")
    for folder in folders:
        for mode in modes:
            baseline: list[float] = []
            for held in HELD:
                kl = damage(reference, folder, mode, held, trajectories)
                baseline = baseline or kl
                print(row(folder.parent.name, mode, held, kl, baseline), flush=True)


if __name__ == "__main__":
    main()
