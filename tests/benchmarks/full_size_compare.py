"""Compares the results of runs of one recipe that must not depend on how they were made.

Files that are the same byte for byte are said to be; of others it is said how far they are apart.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import load_file

SCALES, FIDELITY = "calibration/input_scales.safetensors", "fidelity.json"


def compare_runs(recipe: str, runs: Mapping[str, Path]) -> Iterator[str]:
    """Yield one line a result file: the same in all runs that have it, or how far apart they are."""
    files = {name: dict(_results(run)) for name, run in runs.items()}
    for file in sorted({file for own in files.values() for file in own}):
        there = {name: own[file] for name, own in files.items() if file in own}
        kinds = {hashlib.sha256(path.read_bytes()).hexdigest() for path in there.values()}
        if len(kinds) == 1:
            yield f"{recipe}, {file}: the same at {len(there)} budgets"
            continue
        first, *others = there.items()
        for name, path in others:
            apart = _distance(file)(first[1], path)
            yield f"{recipe}, {file}: {name} DIFFERS from {first[0]}: {apart}"


def _results(run: Path) -> Iterator[tuple[str, Path]]:
    for path in (run / SCALES, run / FIDELITY, *sorted(run.glob("evaluation/*/*.jsonl"))):
        if path.exists() and ".partial" not in path.name:
            yield str(path.relative_to(run)), path


def _distance(file: str) -> Callable[[Path, Path], str]:
    return {SCALES: _of_scales, FIDELITY: _of_fidelity}.get(file, _of_rows)


def _of_scales(a: Path, b: Path) -> str:
    ours, theirs = load_file(a), load_file(b)
    apart = [abs(theirs[name].item() / scale.item() - 1) for name, scale in ours.items()]
    return f"{sum(map(bool, apart))} of {len(apart)} scales, by {max(apart):.2%} at most"


def _of_fidelity(a: Path, b: Path) -> str:
    ours, theirs = (json.loads(path.read_text())["activations"] for path in (a, b))
    return ", ".join(
        f"mean KL {mode} {own['kl_nats']['mean']} and {theirs[mode]['kl_nats']['mean']}"
        for mode, own in ours.items()
    )


def _of_rows(a: Path, b: Path) -> str:
    ours, theirs = (
        {(row["doc_id"], row["repeat"]): row for row in map(json.loads, path.open())}
        for path in (a, b)
    )
    other = sum(row != theirs.get(key) for key, row in ours.items())
    return f"{other} of {len(ours)} samples"
