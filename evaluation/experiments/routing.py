"""Do a few trajectories carry the damage because a router's choice flips? Replay with BF16's choices.

    PYTHONPATH=evaluation:tests/support python -m experiments.routing CHECKPOINT ...

Every checkpoint is replayed three times on the same held-out trajectories, beside BF16:

    own       its routers choose experts from its own activations
    chosen    BF16's experts, weighted by its own probabilities of them, normalised
    weighted  BF16's experts and BF16's weights

What falls from `own` to `chosen` is what other experts cost; what falls from there to `weighted`, what
other weights cost. The rest is done by the products. Encoder and decoder are both held.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
from modules_oracle.engine import ModelEngine
from modules_oracle.simulated import load_rounding
from torch import Tensor, nn

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.load import load
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.record.trajectory import Prompt, Trajectory, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.schemes.modes import ACTIVATION_MODES, ActivationMode
from quantize.stages.fidelity.fidelity import bootstrap_interval, by_trajectory
from quantize.stages.fidelity.replay import Compared, replay

FIRST, BATCH, CANVASES = 1000, 64, 2  # of the held-out problems; prompts at once; canvases a prompt
HELD = ("own", "chosen", "weighted")
Choice = tuple[Tensor, Tensor, Tensor]  # a router's probabilities, weights and experts


@contextmanager
def routers_held(reference: nn.Module, model: nn.Module, held: str) -> Generator[None]:
    """Give `model`'s routers the choices of `reference`'s in the same pass; `reference` must run first.

    Raises:
        RuntimeError: a router of `reference` ran more often than that of `model`.
    """
    waiting: dict[str, deque[Choice]] = {}
    hooks: list[Any] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, output: waiting[name].append(output)

    def hold(name: str) -> Callable[..., Choice]:
        return lambda module, args, output: held_choice(
            output, waiting[name].popleft(), module.per_expert_scale, held
        )

    for whose, hook in ((reference, note), (model, hold)):
        for name, module in whose.named_modules():
            if name.endswith(".router") and held != "own":
                waiting.setdefault(name, deque())
                hooks.append(module.register_forward_hook(hook(name)))
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
    if odd := [name for name, left in waiting.items() if left]:
        raise RuntimeError(f"{odd[0]}: the two models did not run the same passes")


def held_choice(own: Choice, theirs: Choice, scale: Tensor, held: str) -> Choice:
    """Return `own` with the experts of `theirs`, and with `theirs`' weights if `held` is `weighted`."""
    probabilities, experts = own[0], theirs[2]
    if held == "weighted":
        return probabilities, theirs[1], experts
    weights = probabilities.gather(-1, experts)
    weights = weights / weights.sum(-1, keepdim=True) * scale[experts]
    return probabilities, weights, experts


def heldout(count: int) -> list[Prompt]:
    """Return `count` held-out problems as prompts; every second prompt turns thinking on."""
    tokenizer = load_tokenizer(CHECKPOINT)
    lines = HELDOUT.read_text("utf-8").splitlines()[FIRST : FIRST + count]
    return [
        Prompt(
            tuple(
                encode_chat(
                    tokenizer,
                    [{"role": "user", "content": json.loads(line)["question"]}],
                    thinking=index % 2 == 1,
                )
            ),
            index % 2 == 1,
        )
        for index, line in enumerate(lines)
    ]


def damage(
    reference: ModelEngine,
    folder: Path,
    mode: ActivationMode,
    held: str,
    trajectories: Sequence[Trajectory],
) -> list[float]:
    """Replay `trajectories` with a checkpoint; return each one's mean KL from BF16, in nats."""
    model = load_rounding(folder, mode, dtype=torch.float32)
    engine = ModelEngine(model, BATCH)
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    with routers_held(reference.model, model, held):
        (found,) = replay(reference, [Compared(engine)], trajectories, sampler, batch_size=BATCH)
    return list(by_trajectory(found, lambda step: step.kl.mean().item()).values())


def row(name: str, mode: str, held: str, found: list[float], own: list[float]) -> str:
    """Return a line of the table; KL in nats x 1000, differences from `own` paired by trajectory."""
    low, high = bootstrap_interval([b - a for a, b in zip(own, found, strict=True)])
    most = sum(sorted(found)[-6:]) / sum(found)
    middle = math.exp(mean(math.log(max(each, 1e-9)) for each in found))
    return (
        f"| {name} | {mode} | {held} | {1000 * mean(found):.2f} [{1000 * low:+.2f}, {1000 * high:+.2f}]"
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
    reference = ModelEngine(load(CHECKPOINT, dtype=torch.float32), BATCH)
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    prompts, trajectories = heldout(count), list[Trajectory]()
    for start in range(0, count, BATCH):
        batch = prompts[start : start + BATCH]
        seeds = list(range(start, start + len(batch)))
        trajectories += record(
            reference, batch, seeds, sampler=sampler, canvases=CANVASES, held_out=True
        )
    print("| checkpoint | activations | routers | KL [minus own] | geometric | largest six |")
    print("|---|---|---|---:|---:|---:|")
    for folder in folders:
        for mode in modes:
            own: list[float] = []
            for held in HELD:
                found = damage(reference, folder, mode, held, trajectories)
                own = own or found
                print(row(folder.parent.name, mode, held, found, own), flush=True)


if __name__ == "__main__":
    main()
