"""The tests that compute, as other processors would run them.

    make test-cpus                                 every cell of the matrix
    make test-cpus CELLS=2                         two of them, drawn by the commit's hash
    make test-cpus CELLS=OPENBLAS_CORETYPE=Zen     that one; commas join the variables of a cell
    make test-cpus CELLS=list                      what cells there are

A cell is an environment. It tells numpy (OpenBLAS), torch's own loops (ATEN), oneDNN and MKL which
instructions they may use, and how many threads. Each variable is changed alone, and all together in
six cells: machines that people have, and two that mix old and new. Cells that this processor cannot
run are named as skipped. An AMD one heeds MKL_CBWR, but not MKL_ENABLE_INSTRUCTIONS.
"""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.support.numeric import CHOSEN
from tests.support.turn import drawn

ROOT = Path(__file__).parents[2]
CORES = os.cpu_count() or 1
FACTS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
TESTS = "numeric and not slow and not gpu"

ALONE = {
    "OPENBLAS_CORETYPE": ("Prescott", "Sandybridge", "Haswell", "Zen", "SkylakeX"),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX512_CORE", "DEFAULT"),
    "MKL_CBWR": ("COMPATIBLE", "AUTO"),
    "OMP_NUM_THREADS": ("1", "2"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2", "AVX512"),
}
TOGETHER = (  # in the order of ALONE
    ("Prescott", "default", "SSE41", "COMPATIBLE", "1", "SSE4_2"),
    ("Haswell", "avx2", "AVX2", "AUTO", "2", "AVX2"),
    ("Zen", "avx2", "AVX2", "COMPATIBLE", "1", "AVX2"),
    ("SkylakeX", "avx512", "AVX512_CORE", "AUTO", "2", "AVX512"),
    ("Haswell", "avx512", "SSE41", "AUTO", "1", "AVX512"),
    ("Prescott", "avx2", "AVX512_CORE", "COMPATIBLE", "2", "SSE4_2"),
)
NEEDS = {  # the value of a variable -> what Linux calls the instructions
    "Sandybridge": "avx", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512vl", "avx2": "avx2",
    "avx512": "avx512vl", "AVX2": "avx2", "AVX512_CORE": "avx512vl", "AVX512": "avx512vl",
}  # fmt: skip


def cells() -> list[str]:
    """Return all names: VARIABLE=VALUE, several joined by commas."""
    alone = [f"{name}={value}" for name, values in ALONE.items() for value in values]
    rows = (zip(ALONE, values, strict=True) for values in TOGETHER)
    return alone + [",".join(f"{name}={value}" for name, value in row) for row in rows]


def environment(cell: str) -> dict[str, str]:
    """Return the variables that a cell sets; one thread where it says nothing of them.

    No processor has AMX and lacks AVX-512: where torch's own loops do without AVX-512, oneDNN does
    without AMX. Else torch 2.13 packs BF16 attention for AMX and ends with "pack_vnni2 is only ...".
    """
    variables = {"OMP_NUM_THREADS": "1"} | dict(pair.split("=") for pair in cell.split(","))
    narrow = variables.get("ATEN_CPU_CAPABILITY") in ("default", "avx2")
    if narrow and variables.get("ONEDNN_MAX_CPU_ISA", "DEFAULT") == "DEFAULT":
        variables["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    return variables


def lacking(cell: str) -> list[str]:
    """Return what a cell needs and this processor does not have."""
    needed = {NEEDS[value] for value in environment(cell).values() if value in NEEDS}
    if cell.startswith("MKL_ENABLE_INSTRUCTIONS"):
        needed.add("GenuineIntel")
    return sorted(needed - set(FACTS.split()))


def chosen(word: str) -> list[str]:
    """Return the cells that the command line asks for: all, so many of those that can run, or one."""
    if not word.isdigit():
        return [word] if word else cells()
    return drawn([cell for cell in cells() if not lacking(cell)], int(word))


def run(cell: str) -> tuple[bool, str]:
    """Run the tests in a cell; return whether all is well, and the line that pytest closes with."""
    if lacking(cell):
        return True, f"skipped, this processor lacks {', '.join(lacking(cell))}"
    variables = environment(cell)
    workers = max(1, min(4, CORES // int(variables["OMP_NUM_THREADS"])))
    command = [sys.executable, "-m", "pytest", "-q", "-m", TESTS, "-n", str(workers)]
    command += [
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        *(f"tests/{file}" for file in CHOSEN),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0, done.stdout.strip().rpartition("\n")[2]


def closing(lines: list[str], seconds: float) -> str:
    """Return the line that pytest would close with, had it run all cells at once."""
    sums: Counter[str] = Counter()
    for count, kind in re.findall(r"\b(\d+) ([a-z]+)", "\n".join(lines)):
        sums[kind] += int(count)
    said = ", ".join(f"{count} {kind}" for kind, count in sums.items())
    return f" {said} in {seconds:.2f}s ".center(100, "=")


def main(word: str = "") -> int:
    """Run the cells that are asked for; return 1 where one is red."""
    if word == "list":
        print(*cells(), sep="\n")
        return 0
    started, rows = time.monotonic(), list[tuple[str, bool, str]]()
    for cell in chosen(word):
        print(f"{cell} ...", flush=True)
        rows.append((cell, *run(cell)))
    model = re.search(r"model name\s*: (.*)", FACTS)
    print(f"\n{model[1] if model else 'an unknown processor'}, {CORES} cores")
    for cell, well, line in rows:
        print(f"{'' if well else 'RED '}{line:56} {cell}")
    print(closing([line for *_, line in rows], time.monotonic() - started))
    return not all(well for _, well, _ in rows)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
