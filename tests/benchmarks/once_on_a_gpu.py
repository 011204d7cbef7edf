"""What only a GPU can answer, in one unattended run: each check a process with a time limit of its own.

    python tests/benchmarks/once_on_a_gpu.py OUT [--part results] [--source BF16] [--price 3]

Checks of results run beside each other, those of times one after the other, behind them. OUT gets the
output of each check, and a line of JSON on stdout says how it ended, after how many seconds, and
its last line. BF16 is a checkpoint folder of the 26B shape (`quantize.checkpoints.synthetic`); without
it what needs one is left out.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON, TESTS = (
    sys.executable,
    (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
)


@dataclass(frozen=True)
class Check:
    """A command with the seconds that it may take."""

    name: str
    seconds: int
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict[str, str])


def of_results() -> Iterator[Check]:
    """Yield what is right or wrong, however fast."""
    for target in ("sm_89", "sm_120"):
        forced = {"QUANTIZE_TARGET": target}
        yield Check(f"kernels as {target}", 240, (*TESTS, "tests/fused_dequant"), forced)
    tokens = (*TESTS, "-s", "tests/runtime/test_fused_gpu.py", "-k", "another_target or one_token")
    yield Check("tokens of another target, one token a pass", 240, tokens)
    yield Check("a form and log-probabilities", 120, (*TESTS, "tests/serve/test_serve_gpu.py"))
    many = (PYTHON, "tests/benchmarks/temperature.py", "--problems", "400")
    yield Check("temperature", 240, many)
    documented = (*TESTS, "--durations=0", "tests/test_docs_gpu.py", "-k", "not README.md:161")
    yield Check("documented commands", 280, documented)


def of_times(source: Path | None, out: Path, price: float) -> Iterator[Check]:
    """Yield what is timed; `quantize tune` writes into a cache folder under `out`."""
    cache = {"XDG_CACHE_HOME": str(out / "cache")}
    bench = (PYTHON, "-m", "quantize", "bench", "--json")
    fixed = [word for steps in (16, 26, 48) for word in ("--steps", str(steps))]
    batches = [word for batch in (1, 4, 16) for word in ("--batch", str(batch))]
    own = ("--autoregressive", *fixed, *batches, "--canvases", "2", "--hourly-price", str(price))
    mix = ("--random-weights", "nvfp4_fp8")
    yield Check("bench one token a forward", 200, (*bench, *mix, *own), cache)
    if source is not None:
        prefix = (PYTHON, "tests/benchmarks/prefix_cache.py", str(source), "--tokens", "8000")
        yield Check("prefix of 8,000 tokens", 150, prefix, cache)
    short = (*bench, *mix, "--batch", "1", "--batch", "4")
    yield Check("bench before tuning", 90, short, cache)
    yield Check("tune", 200, (PYTHON, "-m", "quantize", "tune"), cache)
    yield Check("bench after tuning", 90, short, cache)


def ran(check: Check, out: Path) -> bool:
    """Run a check, keep its output, print how it ended; return whether it ended well and in time."""
    log = out / f"{check.name.replace(' ', '_').replace(',', '')}.log"
    paths = [str(ROOT / each) for each in ("", "kernels", "evaluation", "tests/support")]
    given = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *([given] if given else [])])
    }
    began = time.monotonic()
    with (
        log.open("w") as file,
        subprocess.Popen(
            check.command, cwd=ROOT, env=environment | check.environment, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            code: int | str = process.wait(check.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its servers too
            code = "out of time"
    lines = log.read_text(errors="replace").splitlines() or [""]
    facts = {"check": check.name, "ended": code, "seconds": round(time.monotonic() - began)}
    print(json.dumps(facts | {"said": lines[-1][-300:], "log": str(log)}), flush=True)
    return code == 0


def main() -> None:
    """Run the checks; exit 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--part", choices=("results", "times"), help="of the checks; both without")
    parser.add_argument("--price", type=float, default=3.0, help="of an hour of the machine")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)

    ended: list[bool] = []
    if asked.part != "times":
        with ThreadPoolExecutor(8) as pool:
            ended += pool.map(lambda check: ran(check, asked.out), of_results())
    if asked.part != "results":
        times = of_times(asked.source, asked.out.resolve(), asked.price)
        ended += [ran(check, asked.out) for check in times]
    sys.exit(0 if all(ended) else 1)


if __name__ == "__main__":
    main()
