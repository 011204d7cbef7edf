"""The frontier of the bundled model: accuracy and speed of nine points, one factor at a time.

    python -m tests.benchmarks.frontier run OUT            # a GPU, or a CPU with --problems 20
    python -m tests.benchmarks.frontier best OUT t5 t10    # these points with thinking too, x 4
    python -m tests.benchmarks.frontier choose OUT         # the choice by hand: rows and numpy alone
    python -m tests.benchmarks.frontier draw OUT FILE.svg  # the report's chart as a file

`run` calls `quantize run RECIPE --operating-points --all`. Of nvfp4 it judges the model's own settings,
fixed steps (T = 5, 10, 20, 48) and entropy bounds (0.05, 0.2, 0.4; the model's own is 0.1), of
fp8_dynamic its own settings and one bound, all beside the same BF16 answers to 2,000 held-out problems.
OUT/RECIPE gets report.json, report.html and rows.tar.gz: everything under evaluation/. The runs
themselves lie under --scratch.

`choose` knows nothing of the product's statistics: it resamples problems (10,000 times), asks of each
point how often its loss or a sign of ill health reaches its limit, corrects by Holm, and names the
fastest point that is left.
"""

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

TASK, MARGIN, LEVEL = "word_problems", 5.0, 0.05
FIXED, BOUNDS = (5, 10, 20, 48), (0.05, 0.2, 0.4)
STEPS = {f"t{t}": {"max_denoising_steps": t, "fixed": True} for t in FIXED}
ENTROPY = {f"e{bound:g}": {"entropy_bound": bound} for bound in BOUNDS}
POINTS: dict[str, dict[str, Any]] = {
    "nvfp4": STEPS | ENTROPY,
    "fp8_dynamic": {"e0.2": ENTROPY["e0.2"]},
}
SIGNS = ("empty", "open_thought", "stutter", "no_value", "cut")


@click.group()
def main() -> None:
    """Measure the frontier of the bundled model, and choose from it by hand."""


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--problems", default=2000, show_default=True)
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("/tmp/frontier-runs"))
def run(out: Path, problems: int, scratch: Path) -> None:
    """Judge all points, and leave reports and rows in OUT."""
    for recipe, points in POINTS.items():
        _judge(out / recipe, recipe, {"operating_points": points}, problems, scratch)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("points", nargs=-1, required=True)
@click.option("--problems", default=500, show_default=True)
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("/tmp/frontier-runs"))
def best(out: Path, points: tuple[str, ...], problems: int, scratch: Path) -> None:
    """Judge some points of nvfp4 with thinking and without, four answers a problem."""
    tasks = [TASK, f"{TASK}_thinking"]
    chosen = {name: POINTS["nvfp4"][name] for name in points}
    settings = {"tasks": tasks, "repeats": dict.fromkeys(tasks, 4), "operating_points": chosen}
    _judge(out / "best", "nvfp4", settings, problems, scratch)


def _judge(out: Path, shipped: str, settings: dict[str, Any], problems: int, scratch: Path) -> None:
    """Run a shipped recipe with other settings of evaluation; keep its report and rows."""
    from quantize.recipe.reading import shipped_recipes

    began, runs = time.monotonic(), scratch / out.name
    runs.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    fields = yaml.safe_load(shipped_recipes()[shipped])
    fields["bundled"]["evaluation"] |= settings
    file = runs / "recipe.yaml"
    file.write_text(yaml.safe_dump(fields))
    options = ["--limit", str(problems), "--operating-points", "--all", "--resume"]
    command = ["run", "--recipe", str(file), "--out", str(runs), *options, "--batch-size", "64"]
    code = subprocess.run([sys.executable, "-m", "quantize", *command], check=False).returncode
    print(f"{out.name}: exit {code} after {time.monotonic() - began:.0f} s", flush=True)
    (folder,) = runs.glob(f"{shipped}-*")
    for name in ("report.json", "report.html"):
        if (folder / name).exists():
            (out / name).write_bytes((folder / name).read_bytes())
    with tarfile.open(out / "rows.tar.gz", "w:gz") as archive:
        archive.add(folder / "evaluation", "evaluation", filter=_small)


def _small(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "canvases" in member.name or ".partial" in member.name else member


@main.command()
@click.argument("out", type=click.Path(path_type=Path, exists=True))
def choose(out: Path) -> None:
    """Choose the fastest point of nvfp4 that fits, from its rows alone."""
    files = dict(_rows(out / "nvfp4" / "rows.tar.gz"))
    rates = files.pop("speeds", {}).get("tokens_a_second", {})
    base = files.pop("bf16")
    p_values: dict[str, float] = {}
    for name, rows in sorted(files.items()):
        loss, p, tokens = _compared(base, rows)
        print(
            f"{name:22} {100 * loss:+6.2f} points lost, p {p:.4f}, "
            f"{rates.get(name, tokens):9.1f} {'tokens/s' if rates else 'tokens a forward'}"
        )
        files[name] = rates.get(name, tokens)
        if "-at-" in name:
            p_values[name] = p
    left, fits = len(p_values), []
    for name, p in sorted(p_values.items(), key=lambda item: item[1]):
        if left * p > LEVEL:
            break
        fits.append(name)
        left -= 1
    print("fits:", ", ".join(fits) or "none")
    print("fastest that fits:", max(fits, key=lambda name: files[name], default="none"))


def _rows(archive: Path) -> Iterator[tuple[str, Any]]:
    """Yield model -> its rows by question, and "speeds" where they were measured."""
    with tarfile.open(archive) as found:
        for member in found.getmembers():
            if member.name.endswith(f"/{TASK}.jsonl") or member.name.endswith("speeds.json"):
                file = found.extractfile(member)
                assert file is not None
                text = file.read().decode()
                if member.name.endswith("speeds.json"):
                    yield "speeds", json.loads(text)
                    continue
                rows = [json.loads(line) for line in text.split("\n") if line]
                yield Path(member.name).parent.name, {row["doc_id"]: row for row in rows}


def _compared(base: dict[int, Any], rows: dict[int, Any]) -> tuple[float, float, float]:
    """Return the share lost, the largest p of its limits, and tokens a forward."""
    both = [(base[i], rows[i]) for i in sorted(base)]
    right = np.array([[next(iter(r["scores"].values())) for r in pair] for pair in both])
    losses = [(right[:, 0] - right[:, 1], MARGIN / 100)]
    for sign in SIGNS:
        shown = np.array([[sign in _signs(row) for row in pair] for pair in both], float)
        often = shown[:, 0].mean() / 2 > MARGIN / 200  # half as often again is more than the limit
        ratio, limit = (1.5, 0.0) if often else (1.0, MARGIN / 200)
        losses.append((shown[:, 1] - ratio * shown[:, 0], limit))
    drawn = np.random.default_rng(0).multinomial(len(both), [1 / len(both)] * len(both), 10_000)
    p = max(float((drawn @ each / len(both) >= limit).mean()) for each, limit in losses)
    forwards = sum(sum(row["denoising_steps"]) for _, row in both)
    return float(losses[0][0].mean()), p, sum(row["tokens"] for _, row in both) / forwards


def _signs(row: dict[str, Any]) -> set[str]:
    found = {*row["signs"], *(["cut"] if row["truncated"] else [])}
    return found | ({"no_value"} if row["answer"] == "[invalid]" else set())


STYLE = (
    "<style>svg{background:#fff}text{font:11px sans-serif;fill:#333}.middle{text-anchor:middle}"
    ".end{text-anchor:end}.grid{stroke:#ddd}.hollow{fill:#fff;stroke:#2563eb}.a{fill:#2563eb}"
    ".tick{font-size:10px}.margin{stroke:#b91c1c;stroke-width:2}"
    ".interval{stroke:#2563eb;stroke-width:2}</style>"
)


@main.command()
@click.argument("out", type=click.Path(path_type=Path, exists=True))
@click.argument("file", type=click.Path(path_type=Path))
def draw(out: Path, file: Path) -> None:
    """Draw the points of both formats as the report does."""
    from quantize.reports.charts import operating_points

    contents = [json.loads((out / name / "report.json").read_text()) for name in POINTS]
    content = contents[0]
    other = contents[1]["tasks"][0]
    rates = contents[1]["speeds"]
    if rates and content["speeds"]:
        named = {"quantized-at-fp8": rates["tokens_a_second"]["quantized"]}
        content["speeds"]["tokens_a_second"] |= named
    content["tasks"].append(other | {"gated": False, "activations": "at fp8"})
    as_file = f' xmlns="http://www.w3.org/2000/svg">{STYLE}'
    file.write_text(operating_points(content).replace(">", as_file, 1), "utf-8")


if __name__ == "__main__":
    main()
