"""Makes README's and docs' tables of results from `tests/data/results.json`.

    python -m tests.support.recorded_results      # prints README's tables and those of docs

What was measured is recorded there: how many problems each model solved, lost and won, and times.
Every other figure of the tables follows from it by this code.
"""

import json
from pathlib import Path
from typing import Any

from quantize.checkpoints.targets import plan_targets, sum_bytes
from quantize.recipe.reading import load_recipe
from quantize.recovery.statistics import compare
from quantize.recovery.terms import Comparison, Terms
from quantize.stages.plan.plan import described

RESULTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "results.json").read_text("utf-8")
)
README = {  # row of README -> recorded row, and the recipe whose checkpoint has these bytes
    "BF16 again, other noise": ("BF16 again", None),
    "FP8, W8A8": ("FP8", "fp8_dynamic"),
    "NVFP4, activations not rounded": ("NVFP4 weights", "nvfp4_w4a4"),
    "NVFP4, W4A4, rounded to nearest (`nvfp4_w4a4`)": ("NVFP4 W4A4 per layer", "nvfp4_w4a4"),
}
EVALUATION = {
    "BF16 again, the noise floor": "BF16 again",
    "FP8 dynamic W8A8": "FP8",
    "NVFP4, weights only": "NVFP4 weights",
    "NVFP4 W4A4, one input scale per expert": "NVFP4 W4A4 per expert",
    "NVFP4 W4A4, one input scale per layer": "NVFP4 W4A4 per layer",
}
SPEEDS = {
    "BF16": "BF16",
    "FP8": "FP8",
    "NVFP4": "NVFP4, activations in BF16",
    "NVFP4, W4A8": "NVFP4, activations in FP8",
}


def compared(name: str) -> Comparison:
    """Return the comparison with BF16 of a recorded row of quality."""
    (row,) = (row for row in RESULTS["quality"]["rows"] if row["name"] == name)
    count, right = RESULTS["quality"]["questions"], RESULTS["quality"]["bf16_right"]
    assert row["right"] == right - row["lost"] + row["won"]
    base = [1.0] * right + [0.0] * (count - right)
    other = [0.0] * row["lost"] + [1.0] * (row["right"]) + [0.0] * (count - right - row["won"])
    sides = ({f"q{i:04}": [score] for i, score in enumerate(side)} for side in (base, other))
    return compare(*sides, Terms(estimand="such_questions", margin_pp=5))


def sizes(recipe: str, model: str | None = None) -> tuple[int, int]:
    """Return the bytes of a model before and after a recipe; None is the bundled model."""
    _, tensors = described(model)
    return sum_bytes(plan_targets(tensors, load_recipe(recipe).quantization))


def quality_rows() -> list[str]:
    """Return the rows of README's table of quality."""
    first = compared("FP8")
    low, high = first.base_interval.low, first.base_interval.high
    before = sizes("fp8_dynamic")[0]
    lines = [f"| BF16 | {before:,} | {first.base:.4f} [{low:.3f}, {high:.3f}] | | |"]
    for title, (name, recipe) in README.items():
        nbytes = f"{sizes(recipe)[1]:,} " if recipe else ""
        lines.append(f"| {title} | {nbytes}| {' | '.join(_cells(compared(name), '.4f'))} |")
    return lines


def evaluation_rows() -> list[str]:
    """Return the beginnings of the rows of docs/evaluation.md's first table, up to McNemar's p."""
    lines: list[str] = []
    for title, name in EVALUATION.items():
        found = compared(name)
        lines.append(
            f"| {title} | {' | '.join(_cells(found, '.4f'))} | {found.lost} / {found.won} | "
        )
    return lines


def _cells(found: Comparison, accuracy: str) -> list[str]:
    share, loss, recovery = (
        found.quantized_interval,
        found.difference_interval,
        found.recovery_interval,
    )
    return [
        f"{found.quantized:{accuracy}} [{share.low:.3f}, {share.high:.3f}]",
        f"{found.difference_pp:+.2f} [{loss.low:+.2f}, {loss.high:+.2f}]",
        f"{found.recovery:.1f} [{recovery.low:.1f}, {recovery.high:.1f}]",
    ]


def speed_rows() -> list[str]:
    """Return the rows of README's table of speed: ms per forward (tokens/s), and the quotient."""
    rows = sorted(RESULTS["speed"]["rows"], key=lambda row: row["batch"])
    return [
        f"| {SPEEDS[row['name']]} | {row['batch']} | {_timed(row['vllm'])} | {_timed(row['ours'])} "
        f"| {_times(row['ours'], row['vllm'])} |"
        for row in rows
    ]


def peer_rows() -> list[str]:
    """Return the rows of docs/runtime.md's table beside vLLM, by each of vLLM's kernels."""
    lines: list[str] = []
    for row in RESULTS["speed"]["rows"]:
        marlin, times = row.get("vllm_marlin"), _times(row["ours"], row["vllm"])
        if marlin:
            times += f", {_times(row['ours'], marlin)}"
        cells = [row["name"], str(row["batch"]), _timed(row["vllm"])]
        cells += [_timed(marlin) if marlin else "", _timed(row["ours"]), times]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def _timed(measured: list[str]) -> str:
    return "{} ({})".format(*measured)


def _times(ours: list[str], theirs: list[str]) -> str:
    """Return by how much more tokens/s ours are, of one lease."""
    fast, slow = (float(tokens.replace(",", "")) for _, tokens in (ours, theirs))
    return f"{fast / slow:.2f}"


if __name__ == "__main__":
    print("\n".join([*quality_rows(), "", *speed_rows(), "", *peer_rows(), "", *evaluation_rows()]))
