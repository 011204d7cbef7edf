"""How often verdicts err in worlds drawn at random: the table of docs/evaluation.md.

    python -m tests.benchmarks.verdict_errors [--worlds 500] [--rounds 2000] [--budget 0.8] --out FILE

Appends a JSON line to FILE for every world as soon as it is simulated (a second run goes on behind the
last), then prints the table. `tests/support/random_worlds.py` says what a world is; its seed is its
number. Each rate is beside what is stated, 5 %. Some of many rates are above it by chance: with z
standard deviations as the distance, the largest of n is expected near sqrt(2 log n) of them, and the
table says how many are above 3, and how many of so many would be by chance alone.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import bdtrc, ndtri

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from tests.support.random_worlds import ALPHA, RandomWorld, many_verdicts  # noqa: E402

BLOCK = 250
KINDS = (
    "run PASS", "run FAIL", "point adopted", "accuracy PASS", "accuracy FAIL", "sign PASS", "sign FAIL",
    "steps FAIL",
)  # fmt: skip


def rates(world: RandomWorld, rounds: int, budget: float) -> list[tuple[str, int]]:
    """Return (kind, number of rounds that err) of everything that a world judges."""
    events: dict[tuple[str, str], int] = {}

    def count(kind: str, which: object, errs: np.ndarray) -> None:
        events[kind, str(which)] = events.get((kind, str(which)), 0) + int(errs.sum())

    for block in range(rounds // BLOCK):
        seen = many_verdicts(world, BLOCK, block, budget=budget)
        count("run PASS", "", seen["PASS"])
        count("run FAIL", "", seen["FAIL"])
        if len(seen["adopted"]):
            count("point adopted", "", seen["adopted"].any(0))
        for key, (passes, fails) in seen["quantities"].items():
            what = "accuracy" if key[2] == "accuracy" else "sign"
            count(f"{what} PASS", key, passes)
            count(f"{what} FAIL", key, fails)
        for number, errs in enumerate(seen["steps"]):
            count("steps FAIL", number, errs)
    return [(kind, number) for (kind, _), number in events.items()]


def deviations(events: int, rounds: int) -> float:
    """Return by how many standard deviations a rate is above the stated one, from its exact tail."""
    return float(-ndtri(bdtrc(events - 1, rounds, ALPHA))) if events else -math.inf


def table(lines: list[dict[str, Any]]) -> str:
    """Return the table in Markdown, and the worlds with the largest rate of each kind."""
    text = (
        "| error | judged | mean % | largest % | its world | above 3 sigma | expected by chance |\n"
    )
    text += "|---|---:|---:|---:|---:|---:|---:|\n"
    for kind in KINDS:
        of_kind = [
            (events / line["rounds"], line["seed"], deviations(events, line["rounds"]))
            for line in lines
            for name, events in line["errors"]
            if name == kind
        ]
        if of_kind:
            share, seed, _ = max(of_kind)
            above = sum(z > 3 for _, _, z in of_kind)
            mean = sum(each[0] for each in of_kind) / len(of_kind)
            text += f"| {kind} | {len(of_kind)} | {100 * mean:.2f} | {100 * share:.2f} | {seed} | {above} | {len(of_kind) * 0.00135:.1f} |\n"  # noqa: E501
    return text


def main() -> None:
    """Simulate the worlds that FILE lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--budget", type=float, default=math.inf, help="in answers of a whole task")
    parser.add_argument("--largest", type=int, default=1500)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = []
    if options.out.exists():
        lines = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = {line["seed"] for line in lines}
    for seed in range(options.first, options.first + options.worlds):
        if seed in done:
            continue
        world = RandomWorld.drawn(seed, options.largest)
        errors = rates(world, options.rounds, options.budget)
        lines.append({"seed": seed, "rounds": options.rounds, "errors": errors})
        worst = max(errors, key=lambda pair: pair[1])
        with options.out.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(f"world {seed}: {worst[0]} {100 * worst[1] / options.rounds:.2f} %", flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
