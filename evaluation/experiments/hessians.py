"""What else could lower `nvfp4`'s damage at equal bytes, tried on the bundled model (rounding-log.md).

    PYTHONPATH=evaluation python -m experiments.hessians OUT [--skip N] [--only ARM]

Every arm is the recipe `nvfp4` with the same input scales; it differs in how its weights are rounded:

    plain     as the recipe does it: H of BF16 inputs, 256 prompts
    rounded   H of the inputs as W4A4 rounds them, a scale a layer: x' for x
    aimed     that H, and a target that makes up for x': W' = W E[x x'^T] E[x' x'^T]^-1
    tenth     a tenth of the damping
    hundredth a hundredth of it
    swept     four times the sweeps of coordinate descent

`nearest` (attention alone in BF16) and `w4a4` stand for comparison. One file a measurement: a killed
run goes on.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import torch
from modules_oracle.simulated import rounding
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.rounding import VARIANTS, differing, recipe_of, recorded
from experiments.routing import BATCH
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, plan_targets
from quantize.host.files import read_json, write_json
from quantize.runtime import open
from quantize.runtime.record.trajectory import record_all
from quantize.runtime.sampler.sampler import Sampler
from quantize.schemes import gptq
from quantize.schemes.gptq import shrunk
from quantize.schemes.modes import ActivationMode
from quantize.stages.calibrate.calibrate import INPUT_SCALE, SCALES, calibrate
from quantize.stages.convert.convert import convert
from quantize.stages.fidelity.fidelity import by_trajectory
from quantize.stages.fidelity.replay import Compared, replay
from quantize.stages.prompts import load_prompts
from quantize.stages.round_weights.round_weights import (
    Unit,
    round_unit,
    units_of,
    write_layer,
)

ARMS = ("w4a4", "nearest", "plain", "rounded", "aimed", "tenth", "hundredth", "swept")
MODES: dict[ActivationMode, tuple[str, ...]] = {
    "per_layer": ARMS,
    "none": ("plain", "rounded", "aimed", "tenth"),
}
NEAREST = {"w4a4", "nearest"}
Pair = tuple[str, ActivationMode]
NVFP4 = VARIANTS["a16-gptq"]
PROMPTS = 256
SOURCE = Checkpoint.open(CHECKPOINT)
CHANGED = {
    "tenth": ("DAMPING", gptq.DAMPING / 10),
    "hundredth": ("DAMPING", gptq.DAMPING / 100),
    "swept": ("SWEEPS", gptq.SWEEPS * 4),
}


class BothInputs:
    """Sums of [x, x'] [x, x']^T, x' being x as W4A4 rounds it: [E, 2 in, 2 in] by name of the input.

    Args:
        units: the units that are rounded.
        experts: how many experts a layer has; E is 1 for inputs of dense Linears.
        scales: input scale by name of the input.
    """

    def __init__(self, units: Sequence[Unit], experts: int, scales: Mapping[str, float]) -> None:
        self._roundings = {u.reads: rounding(u.scheme, scales[u.reads]) for u in units}
        self._experts = experts
        self.sums: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor] = {}

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Add the rows of one input, plain and rounded, to its sums."""
        if name not in self._roundings:
            return
        x, round_input = rows.flatten(0, -2).float(), self._roundings[name]
        both = torch.cat([x, round_input(x) if round_input else x], -1)
        if name not in self.sums:
            count = 1 if experts is None else self._experts
            self.sums[name] = x.new_zeros(count, both.shape[1], both.shape[1])
            self.tokens[name] = torch.zeros(count, dtype=torch.int64)
        of = torch.zeros(len(x), 1, dtype=torch.int64) if experts is None else experts
        for expert in of.unique().tolist():
            own = both[(of == expert).any(-1)]
            self.sums[name][expert].addmm_(own.T, own)
            self.tokens[name][expert] += len(own)

    def mean(self, name: str, row: int, column: int, at: slice = slice(None)) -> Tensor:
        """Return shrunk means [E', in, in] of a b^T; `row` picks a, `column` b: 0 is x, 1 is x'."""
        found = self.sums[name].chunk(2, -2)[row].chunk(2, -1)[column]
        return shrunk(found.contiguous(), self.tokens[name], at)

    def half(self, which: int) -> Any:
        """Return the Hessians of x (`which` 0) or of x' (1), in the form that `round_unit` takes."""
        mean = partial(self.mean, row=which, column=which)
        return SimpleNamespace(tokens=self.tokens, mean=lambda name, at: mean(name, at=at))

    def aimed(self, name: str, weight: Tensor) -> Tensor:
        """Return W' [..., out, in] BF16 that makes W' x' closest to W x, damped as in GPTQ."""
        crossed, own = (self.mean(name, row, 1).double() for row in (0, 1))
        damping = gptq.DAMPING * own.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = damping[:, None, None] * torch.eye(own.shape[-1], dtype=own.dtype)
        wanted = torch.linalg.solve(own + eye, weight.double() @ (crossed + eye), left=False)
        return wanted.reshape(weight.shape).bfloat16()


def scale_of_layers(scales: Path, units: Sequence[Unit]) -> dict[str, float]:
    """Return input -> its scale, the smallest of a layer's experts; 0 if it is not calibrated."""
    found = load_file(scales)
    layers: dict[str, float] = {}
    for unit in units:
        modules = [module for target in unit.targets for module in target.modules]
        own = [found[f"{m}.{INPUT_SCALE}"].item() for m in modules if unit.scheme.calibrated]
        layers[unit.reads] = min(own, default=0.0)
    return layers


def hessians_of(units: Sequence[Unit], scales: Mapping[str, float]) -> BothInputs:
    """Return the sums of the inputs that Linears read while BF16 denoises the calibration prompts."""
    settings = recipe_of(NVFP4, PROMPTS).calibration
    assert settings is not None
    hessians = BothInputs(units, SOURCE.config["text_config"]["num_experts"], scales)
    engine = open(CHECKPOINT, device="cpu", capacity=settings.batch_size)
    with engine.watching(hessians.see):
        record_all(
            engine, load_prompts(CHECKPOINT, settings, PROMPTS), settings,
            Sampler.from_checkpoint(CHECKPOINT), title=f"{PROMPTS} prompts",
        )  # fmt: skip
    return hessians


@contextmanager
def settings_of(arm: str) -> Generator[None]:
    """Within the `with` block, give GPTQ the damping or the sweeps of an arm."""
    if arm not in CHANGED:
        yield
        return
    with patch.object(gptq, *CHANGED[arm]):
        yield


def made(out: Path, arm: str, both: BothInputs | None) -> None:
    """Write an arm's checkpoint to OUT/ARM/checkpoint, rounded to nearest if `both` is None."""
    variant = {"w4a4": VARIANTS["w4a4"], "nearest": VARIANTS["a16"]}.get(arm, NVFP4)
    recipe = recipe_of(variant, PROMPTS)
    targets = plan_targets(SOURCE.tensors, recipe.quantization)
    folder = out / arm
    folder.mkdir(exist_ok=True)
    if both is not None:
        hessians = both.half(int(arm in ("rounded", "aimed")))
        with settings_of(arm):
            units = units_of(targets)
            for number in sorted({unit.layer for unit in units}):
                layer = [unit for unit in units if unit.layer == number]
                done = [
                    round_unit(unit, weights_of(unit, both if arm == "aimed" else None), hessians)
                    for unit in layer
                ]
                write_layer(folder, layer, done)
    convert(
        SOURCE, targets, folder / "checkpoint", recipe=recipe,
        input_scales=own_scales(out / "calibration" / SCALES, folder, targets),
        rounded=None if both is None else folder,
    )  # fmt: skip


def weights_of(unit: Unit, both: BothInputs | None) -> list[Tensor]:
    """Return a unit's weights W, or W' (`aimed`) if `both` is given and the unit rounds its input."""
    weights = [SOURCE.read(target.name) for target in unit.targets]
    if both is None or unit.scheme.round_activations is None:
        return weights
    return [both.aimed(unit.reads, weight) for weight in weights]


def own_scales(scales: Path, folder: Path, targets: Sequence[Target]) -> Path:
    """Write a file to `folder` with the input scales of calibrated modules in `targets`; return it."""
    wanted = {m for t in targets if t.scheme and t.scheme.calibrated for m in t.modules}
    kept = {k: v for k, v in load_file(scales).items() if k.rpartition(".")[0] in wanted}
    save_file(kept, folder / SCALES)
    return folder / SCALES


def make_all(out: Path, arms: Sequence[str]) -> None:
    """Write the checkpoints that are not there yet."""
    left = [arm for arm in arms if not (out / arm / "checkpoint").exists()]
    if not (out / "calibration").exists():
        calibrate(CHECKPOINT, recipe_of(VARIANTS["w4a4"], PROMPTS), out / "calibration")
    both = None
    if {*left} - NEAREST:
        units = units_of(plan_targets(SOURCE.tensors, NVFP4.quantization()))
        both = hessians_of(units, scale_of_layers(out / "calibration" / SCALES, units))
    for arm in left:
        made(out, arm, None if arm in NEAREST else both)


def replay_all(out: Path, pairs: Sequence[Pair], count: int, skip: int) -> None:
    """Replay (arm, mode) pairs that have no file yet, all at once; write their KL by trajectory."""
    left = [pair for pair in pairs if not file_of(out, pair, skip).exists()]
    if not left:
        return

    def engine(folder: Path, mode: Any) -> Any:
        return open(folder, device="cpu", activations=mode, capacity=BATCH)

    reference, sampler = engine(CHECKPOINT, "none"), Sampler.from_checkpoint(CHECKPOINT)
    own = recorded(reference, skip + count)[skip:]
    compared = [Compared(engine(out / arm / "checkpoint", mode)) for arm, mode in left]
    found = replay(reference, compared, own, sampler, batch_size=BATCH)
    for pair, distances in zip(left, found, strict=True):
        kl = by_trajectory(distances, lambda step: step.kl.mean().item())
        write_json(file_of(out, pair, skip), {"kl": list(kl.values())})


def file_of(out: Path, pair: Pair, skip: int) -> Path:
    """Return where the KL of an arm under a mode lies."""
    arm, mode = pair
    return out / arm / (f"{mode}-behind-{skip}.json" if skip else f"{mode}.json")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--trajectories", default=128, show_default=True)
@click.option("--skip", default=0, show_default=True, help="Held-out problems before the first.")
@click.option("--only", multiple=True, type=click.Choice(ARMS), help="Arms; else all.")
def main(out: Path, trajectories: int, skip: int, only: tuple[str, ...]) -> None:
    """Make, replay, print a Markdown table."""
    out.mkdir(parents=True, exist_ok=True)
    make_all(out, only or ARMS)
    pairs: list[Pair] = [
        (arm, mode) for mode in MODES for arm in MODES[mode] if not only or arm in only
    ]
    replay_all(out, pairs, trajectories, skip)
    print("| arm | activations | KL x 1000 | of w4a4 | minus plain |\n|---|---|---:|---:|---|")
    found = {pair: read_json(file_of(out, pair, skip))["kl"] for pair in pairs}
    for (arm, mode), kl in found.items():
        base = found.get(("w4a4", mode))
        share = "" if base is None else f"{mean(kl) / mean(base):.3f}"
        less = differing(kl, found["plain", mode], 1000) if ("plain", mode) in found else ""
        print(f"| {arm} | {mode} | {1000 * mean(kl):.2f} | {share} | {less} |")


if __name__ == "__main__":
    main()
