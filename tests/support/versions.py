"""The tests that compute, on other versions than those of `make test`.

    make test-versions                  every cell
    make test-versions CELLS=oldest     that one

    oldest     Python 3.12, and of every package the least that pyproject.toml declares
    measured   Python 3.12, torch 2.11 and triton 3.6, on which all figures of speed were measured
    newest     Python 3.13, and the versions of constraints.txt

A cell is an environment in build/versions, which uv makes and later runs reuse. Python is pyenv's,
or what uv finds, or else downloads. Words behind the name of a cell, on the command line of this
script, go to pytest in place of the choice of tests.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("QUANTIZE_TEST_VERSIONS", ROOT / "build" / "versions"))
UV = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv") or "uv"
COMPUTING = ("checkpoints", "fused_dequant", "pipeline", "runtime", "schemes", "stages")
TESTS = ("-m", "not slow and not gpu", *(f"tests/{folder}" for folder in COMPUTING))
CELLS = {  # name -> Python, and what uv is told
    "oldest": ("3.12", ("--resolution", "lowest-direct")),
    "measured": ("3.12", ("torch==2.11.*", "triton==3.6.*")),
    "newest": ("3.13", ("--constraints", "constraints.txt")),
}
SHOWN = """import platform, importlib.metadata as m
print("Python", platform.python_version(), *(f"{n} {m.version(n)}" for n in (
"torch", "triton", "transformers", "numpy")), flush=True)"""


def python_of(version: str) -> str:
    """Return pyenv's interpreter of a version, or the version, for which uv looks elsewhere."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else version


def make(cell: str) -> Path:
    """Install a cell's packages; return its Python."""
    version, told = CELLS[cell]
    python = FOLDER / cell / "bin" / "python"
    quiet = [UV, "--quiet"]
    if not python.exists():
        subprocess.run([*quiet, "venv", "--python", python_of(version), FOLDER / cell], check=True)
    target = ["--python", python, "--editable", ".[dev,serve]"]
    subprocess.run([*quiet, "pip", "install", *target, *told], cwd=ROOT, check=True)
    return python


def unreal(python: Path) -> list[str]:
    """Return the lower bounds of pyproject.toml that no set of packages can have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    listed = [UV, "pip", "list", "--python", python, "--format", "json"]
    rows = json.loads(subprocess.run(listed, capture_output=True, check=True).stdout)
    installed = {row["name"]: f"{row['version']}." for row in rows}
    bounds = [re.match(r"([\w-]+).*?[>=]=([\d.]+)", line) for line in lines]
    return [
        f"{bound[0]}: {found}"
        for bound in bounds
        if bound and not (found := installed[bound[1].replace("_", "-")]).startswith(f"{bound[2]}.")
    ]


def run(cell: str, arguments: tuple[str, ...]) -> bool:
    """Make a cell and run the tests in it; return whether they pass."""
    began = time.monotonic()
    python = make(cell)
    print(f"{cell}: ready after {time.monotonic() - began:.0f} s", flush=True)
    if cell == "oldest" and (wrong := unreal(python)):
        print("bounds that nothing satisfies, and what was installed:", *wrong, sep="\n  ")
        return False
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([python, "-c", SHOWN], check=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or TESTS)]
    if not arguments:
        command += ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
        command += ["--no-loadscope-reorder"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main(cell: str = "", *arguments: str) -> int:
    """Run one cell, or all; return 1 where one is red."""
    red = [name for name in ([cell] if cell else CELLS) if not run(name, arguments)]
    print(f"red: {', '.join(red)}" if red else "green")
    return bool(red)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
