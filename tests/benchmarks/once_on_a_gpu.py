"""What only a GPU can answer, in one unattended run: each check a process with a time limit of its own.

    python -m tests.benchmarks.once_on_a_gpu OUT [--part results] [--only REGEX] [--price 3]

Checks of results run beside each other, those of times one after the other, behind them. OUT gets the
output of each check, and a line of JSON on stdout says how it ended, after how many seconds, and
its figures. Weights of the real size are random and made on the GPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON, TESTS = (
    sys.executable,
    (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
)
TOLD = 1500  # characters of figures, at most


def matching(pattern: str) -> Callable[[str], str]:
    """Return what joins the lines of an output in which a pattern is found."""
    return lambda log: "; ".join(line for line in log.splitlines() if re.search(pattern, line))


def of_pytest(log: str) -> str:
    """Return pytest's own figures, what tests print, and the first words of failures."""
    kept = r"^\d+\.\d+s (call|setup)|^(E  |FAILED|form:)|^\[gw.* PASSED|\d (passed|failed|error)"
    return matching(kept)(log)


def of_bench(log: str) -> str:
    """Return ms a forward and tokens/s of the rows of `bench --json`, or the last line."""
    start = re.search(r"^\{", log, re.M)
    try:
        rows = json.JSONDecoder().raw_decode(log, start.start() if start else 0)[0]["rows"]
    except (json.JSONDecodeError, KeyError):
        return log.strip().rpartition("\n")[2]
    return "; ".join(
        f"batch {row['batch']}, {row['steps']} steps: {row['ms_a_forward']:.2f} ms, "
        f"{row['tokens_a_second']:.0f} tokens/s"
        for row in rows
    )


@dataclass(frozen=True)
class Check:
    """A command with the seconds that it may take, and what tells its figures from its output."""

    name: str
    seconds: int
    command: tuple[str, ...]
    tells: Callable[[str], str] = of_pytest
    environment: dict[str, str] = field(default_factory=dict[str, str])


def of_results() -> Iterator[Check]:
    """Yield what is right or wrong, however fast."""
    documented = (
        *TESTS, "-vv", "--durations=0", "-n", "4", "tests/test_docs_gpu.py", "-k", "not tune",
    )  # fmt: skip
    yield Check("documented commands", 400, documented)
    form = (*TESTS, "-s", "tests/serve/test_serve_gpu.py")
    yield Check("a form and log-probabilities", 150, form)
    forms = (PYTHON, "tests/benchmarks/structured_output.py", "--problems", "100")
    yield Check("forms", 300, forms, matching("thinking"))
    tokens = (*TESTS, "-s", "tests/runtime/test_fused_gpu.py", "-k", "another_target or one_token")
    yield Check("tokens of another target, one token a pass", 300, tokens)
    many = (PYTHON, "tests/benchmarks/temperature.py", "--problems", "400")
    yield Check("temperature", 300, many, matching("factor|like"))
    for target in ("sm_89", "sm_120"):
        forced = {"QUANTIZE_TARGET": target}
        command = (*TESTS, "tests/fused_dequant")
        yield Check(f"kernels as {target}", 300, command, environment=forced)


def of_times(out: Path, price: float) -> Iterator[Check]:
    """Yield what is timed; `quantize tune` writes into a cache folder under `out`."""
    cache = {"XDG_CACHE_HOME": str(out / "cache")}
    bench = (PYTHON, "-m", "quantize", "bench", "--json", "--random-weights", "nvfp4_fp8")
    prefix = (PYTHON, "tests/benchmarks/prefix_cache.py", "--tokens", "8000")
    yield Check("prefix of 8,000 tokens", 180, prefix, matching("cold|warm|reused|same"), cache)
    fixed = [word for steps in (16, 26, 48) for word in ("--steps", str(steps))]
    batches = [word for batch in (1, 4, 16) for word in ("--batch", str(batch))]
    own = ("--autoregressive", *fixed, *batches, "--canvases", "2", "--hourly-price", str(price))
    yield Check("bench one token a forward", 240, (*bench, *own), of_bench, cache)
    short = (*bench, "--batch", "1", "--batch", "4")
    yield Check("bench before tuning", 120, short, of_bench, cache)
    tune = (PYTHON, "-m", "quantize", "tune", "--only", " M=(256|1024)$")
    yield Check("tune", 240, tune, matching("%"), cache)
    yield Check("bench after tuning", 120, short, of_bench, cache)


def ran(check: Check, out: Path) -> bool:
    """Run a check, keep its output, print how it ended; return whether it ended well and in time."""
    log = out / f"{re.sub(r'[^a-z0-9]+', '_', check.name)}.log"
    paths = [str(ROOT / each) for each in ("", "kernels", "evaluation", "tests/support")]
    given = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *([given] if given else [])]),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "160",
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
    said = check.tells(log.read_text(errors="replace"))
    facts = {"check": check.name, "ended": code, "seconds": round(time.monotonic() - began)}
    print(json.dumps(facts | {"said": said[-TOLD:], "log": str(log)}), flush=True)
    return code == 0


def main() -> None:
    """Run the checks; exit 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", choices=("results", "times"), help="of the checks; both without")
    parser.add_argument("--only", default="", help="checks whose name this regex finds")
    parser.add_argument("--price", type=float, default=3.0, help="of an hour of the machine")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)

    def chosen(checks: Iterator[Check]) -> list[Check]:
        return [check for check in checks if re.search(asked.only, check.name)]

    ended: list[bool] = []
    if asked.part != "times":
        with ThreadPoolExecutor(8) as pool:
            ended += pool.map(lambda check: ran(check, asked.out), chosen(of_results()))
    if asked.part != "results":
        times = chosen(of_times(asked.out.resolve(), asked.price))
        ended += [ran(check, asked.out) for check in times]
    if not ended:
        raise SystemExit(f"--only {asked.only}: finds no check")
    sys.exit(0 if all(ended) else 1)


if __name__ == "__main__":
    main()
