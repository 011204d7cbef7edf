"""Both engines on the bundled model: input scales, KL and accuracy, kernels against float32 modules.

    python tests/benchmarks/engines.py [--device cuda] [--problems 2000] [--prompts 64] [--json FILE]

One NVFP4 recipe through each engine: calibration on 64 prompts, replay KL of 16 held-out trajectories,
and the held-out problems. Prints

    scales      share of input scales within 1e-4 and within BF16's 2^-8, median and largest difference
    kl          mean and 95 % interval of each engine, by activation mode, on the same trajectories
    accuracy    of each engine, BF16 and quantized, and the paired difference with its 95 % interval

and exits 1 where an interval of KL does not hold the other's mean, or one of accuracy leaves out zero.
Scales of the modules in float32 are no multiple of BF16's steps, so 1e-4 is what equal arithmetic alone
could reach; their difference is printed, and judged by BF16's own step in the median.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from recovery.samples import Request
from safetensors.torch import load_file

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.host.files import read_json
from quantize.recipe.sections import load_recipe
from quantize.runtime import Placement, Sampler, open
from quantize.runtime.opening import Kind
from quantize.schemes.modes import ActivationMode
from quantize.stages.calibrate import calibrate as calibration
from quantize.stages.convert.convert import convert
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.fidelity import fidelity as comparison

SETTINGS: dict[Kind, dict[str, Any]] = {
    "modules": {"kind": "modules", "dtype": torch.float32},
    "fused": {"kind": "fused"},
}
MODE: ActivationMode = "per_layer"


def scales(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how far the input scales of the engines are apart, and coverage of both."""
    ours, theirs = (load_file(folder / kind / "input_scales.safetensors") for kind in SETTINGS)
    assert ours.keys() == theirs.keys()
    apart = torch.tensor([abs(ours[n].item() / theirs[n].item() - 1) for n in ours])
    found = {
        "modules": len(apart),
        "within_1e-4": (apart < 1e-4).double().mean().item(),
        "within_bf16": (apart < 2**-8).double().mean().item(),
        "median": apart.median().item(),
        "largest": apart.max().item(),
    }
    counts = [read_json(folder / kind / "coverage.json")["tokens_per_expert"] for kind in SETTINGS]
    tokens = [sum(map(sum, each.values())) for each in counts]
    return found, dict(zip(SETTINGS, tokens, strict=True))


def accuracy(folder: Path, kind: Kind, mode: ActivationMode, device: str, count: int) -> list[bool]:
    """Return which of the held-out problems an engine gets right."""
    rows = [json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()[:count]]
    dtype = "float32" if kind == "modules" else None
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    place = Placement(device, activations=mode)
    model = Answerer(folder, "", sampler, place, dtype, capacity=64, kind=kind)
    requests = [Request(row["question"], index, 128) for index, row in enumerate(rows)]
    batches = [requests[start : start + 64] for start in range(0, len(requests), 64)]
    texts = {r: done.text for batch, all_ in model(batches) for r, done in zip(batch, all_)}  # noqa: B905
    return [
        texts[r].rsplit("####", 1)[-1].split("<")[0].strip().replace(",", "")
        == str(row["answer_number"])
        for r, row in zip(requests, rows, strict=True)
    ]


def paired(a: Sequence[bool], b: Sequence[bool]) -> dict[str, float]:
    """Return the mean of a - b in points with its 95 % interval."""
    differences = [float(x) - float(y) for x, y in zip(a, b, strict=True)]
    mean = statistics.mean(differences)
    half = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    flips = sum(d != 0 for d in differences)
    low, high = 100 * (mean - half), 100 * (mean + half)
    return {"points": 100 * mean, "low": low, "high": high, "flips": flips}


def overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether each mean lies within the other's interval."""
    pairs = ((a, b), (b, a))
    return all(y["interval"][0] <= x["mean"] <= y["interval"][1] for x, y in pairs)


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--problems", default=2000, show_default=True)
@click.option("--prompts", default=64, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path))
def main(device: str, problems: int, prompts: int, out: Path | None) -> None:
    """Measure, print, judge."""
    recipe = load_recipe("nvfp4_w4a4").for_bundled_model()
    assert recipe.calibration is not None
    changes = {"prompts": prompts, "min_tokens_per_expert": prompts}
    calibrated = recipe.calibration.model_copy(update=changes)
    recipe = recipe.model_copy(update={"calibration": calibrated})
    result: dict[str, Any] = {"device": device, "seconds": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, settings in SETTINGS.items():
            started = time.monotonic()
            calibration.open = partial(open, **settings)  # type: ignore[attr-defined]
            calibration.calibrate(CHECKPOINT, recipe, folder / kind, Placement(device))
            result["seconds"][f"calibrate {kind}"] = time.monotonic() - started
        result["scales"], result["tokens"] = scales(folder)
        source = Checkpoint.open(CHECKPOINT)
        targets = plan_targets(source.tensors, recipe.quantization)
        found = folder / "modules" / "input_scales.safetensors"
        convert(source, targets, folder / "checkpoint", recipe=recipe, input_scales=found)
        result["kl"] = {}
        for kind, settings in SETTINGS.items():
            started = time.monotonic()
            comparison.open = partial(open, **settings)  # type: ignore[attr-defined]
            comparison.fidelity(
                CHECKPOINT, folder / "checkpoint", folder / "modules", folder / f"{kind}.json",
                activations=MODE, limits={}, place=Placement(device),
            )  # fmt: skip
            result["seconds"][f"fidelity {kind}"] = time.monotonic() - started
            modes = read_json(folder / f"{kind}.json")["activations"]
            result["kl"][kind] = {mode: each["kl_nats"] for mode, each in modes.items()}
        result["accuracy"] = {}
        for side, path in (("bf16", CHECKPOINT), ("nvfp4", folder / "checkpoint")):
            mode: ActivationMode = "none" if side == "bf16" else MODE
            right: dict[str, list[bool]] = {}
            for kind in SETTINGS:
                started = time.monotonic()
                right[kind] = accuracy(path, kind, mode, device, problems)
                result["seconds"][f"{side} {kind}"] = time.monotonic() - started
            result["accuracy"][side] = {kind: statistics.mean(r) for kind, r in right.items()}
            result["accuracy"][side] |= paired(right["fused"], right["modules"])
    faults = [
        f"KL, {mode}: {result['kl']}"
        for mode in result["kl"]["fused"]
        if not overlap(result["kl"]["fused"][mode], result["kl"]["modules"][mode])
    ]
    for side, each in result["accuracy"].items():
        if not each["low"] <= 0 <= each["high"]:
            faults.append(f"accuracy, {side}: {each}")
    if result["scales"]["median"] > 2**-8:
        faults.append(f"scales: {result['scales']}")
    text = json.dumps(result | {"faults": faults}, indent=1)
    print(text)
    if out is not None:
        out.write_text(text)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
