"""The tests that compute, on other versions than those of `make test`.

    make test-versions                          every set of versions, every folder
    make test-versions CELLS=newest             one set
    make test-versions CELLS=newest/runtime     one cell: a set and a folder of tests
    make test-versions CELLS=1                  one cell, drawn by the commit's hash
    make test-versions CELLS=core               what CI runs: the newest, laid over what is installed
    python -m tests.support.versions record     write tests/data/newest.txt anew

    oldest     Python 3.12, and of every package the least that pyproject.toml declares
    measured   Python 3.12, torch 2.11 and triton 3.6, on which all figures of speed were measured
    newest     Python 3.13, and tests/data/newest.txt: the newest that pyproject.toml allowed that day

    core       what is installed, and before it, in a folder, the newest of what pyproject.toml bounds
               and constraints.txt has otherwise, but for torch and triton: a minute where an
               environment takes many

llm-compressor pins transformers and compressed-tensors, so only `measured` has it; in the others its
tests are skipped. The newest set is a record, so that a cell's result hangs on the commit alone and
not on what was released today. Red there means: the commit works with the versions of
constraints.txt, and not with the newest. The failed tests are then run again with one package after
the other put back to constraints.txt, and the packages that cure them are named.

A set is an environment in build/versions, which uv makes and later runs reuse. Python is pyenv's, or
what uv finds, or else downloads. Words behind the name of a cell, on the command line of this script,
go to pytest in place of the choice of tests.
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
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.llm_compressor_oracle import WITHOUT
from tests.support.turn import drawn

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("QUANTIZE_TEST_VERSIONS", ROOT / "build" / "versions"))
NEWEST, CONSTRAINTS = ROOT / "tests" / "data" / "newest.txt", ROOT / "constraints.txt"
UV = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv") or "uv"
CORE = ("tests/checkpoints/test_load.py", "tests/runtime/test_generate.py", "tests/test_hf.py")
COMPUTING = ("checkpoints", "fused_dequant", "pipeline", "runtime", "schemes", "stages")
SETS = {  # name -> Python, and what uv is told
    # datasets 4.8 takes no later fsspec; uv, which has chosen the newest by then, would take datasets 5
    "oldest": ("3.12", ("--resolution", "lowest-direct", "fsspec==2026.2.0")),
    "measured": ("3.12", ("torch==2.11.*", "triton==3.6.*")),
    "newest": ("3.13", ("--constraints", str(NEWEST))),
}
WITH_LLM_COMPRESSOR = ("measured",)
NO_LLM_COMPRESSOR = "llmcompressor; python_version < '3'"  # an override, which drops it
SHOWN = """import platform, importlib.metadata as m
print("Python", platform.python_version(), *(f"{n} {m.version(n)}" for n in (
"torch", "triton", "transformers", "compressed-tensors", "huggingface_hub", "numpy")), flush=True)"""


def python_of(version: str) -> str:
    """Return pyenv's interpreter of a version, or the version, for which uv looks elsewhere."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else version


def without_llm_compressor() -> list[str]:
    """Return uv's arguments that leave llm-compressor out."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "overrides.txt").write_text(NO_LLM_COMPRESSOR)
    return ["--overrides", str(FOLDER / "overrides.txt")]


def make(name: str) -> Path:
    """Install a set's packages; return its Python."""
    version, arguments = SETS[name]
    python = FOLDER / name / "bin" / "python"
    quiet = [UV, "--quiet"]
    if not python.exists():
        subprocess.run([*quiet, "venv", "--python", python_of(version), FOLDER / name], check=True)
    target = ["--python", python, "--editable", ".[dev,serve]", *arguments]
    if name not in WITH_LLM_COMPRESSOR:
        target += without_llm_compressor()
    subprocess.run([*quiet, "pip", "install", *target], cwd=ROOT, check=True)
    return python


def record() -> None:
    """Write tests/data/newest.txt: what uv installs today, without llm-compressor."""
    command = [
        UV,
        "--quiet",
        "pip",
        "compile",
        "--python",
        python_of(SETS["newest"][0]),
        "--upgrade",
    ]
    command += ["--extra", "dev", "--extra", "serve", "--no-annotate", "--no-header"]
    command += ["--no-emit-package", "setuptools", *without_llm_compressor(), "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    NEWEST.write_text(done.stdout)


def pins(file: Path) -> dict[str, str]:
    """Return package -> version of a file of exact versions."""
    lines = map(Requirement, file.read_text().split("\n")[:-1])
    return {canonicalize_name(line.name): str(line.specifier)[2:] for line in lines}


def unreal(python: Path) -> list[str]:
    """Return the lower bounds of pyproject.toml that no set of packages can have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = (project["optional-dependencies"][extra] for extra in ("dev", "serve"))
    lines = [*project["dependencies"], *itertools.chain(*optional)]
    listed = [UV, "pip", "list", "--python", python, "--format", "json"]
    rows = json.loads(subprocess.run(listed, capture_output=True, check=True).stdout)
    installed = {row["name"]: f"{row['version']}." for row in rows}
    bounds = [re.match(r"([\w-]+).*?[>=]=([\d.]+)", line) for line in lines]
    return [
        f"{bound[0]}: {installed[bound[1].replace('_', '-')]}"
        for bound in bounds
        if bound
        and bound[1] != "llmcompressor"
        and not installed[bound[1].replace("_", "-")].startswith(f"{bound[2]}.")
    ]


def tested(python: Path, name: str, arguments: tuple[str, ...]) -> list[str]:
    """Run pytest in a set; return the tests that failed, or the word for another bad end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if name not in WITH_LLM_COMPRESSOR:
        environment[WITHOUT] = "1"
    if name == "core":
        environment["PYTHONPATH"] = str(FOLDER / name)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    lines = list[str]()
    for line in process.stdout or ():
        print(line, end="", flush=True)
        lines.append(line)
    if not process.wait():
        return []
    rows = (re.match(r"(?:FAILED|ERROR) (\S+)", line) for line in lines)
    return sorted({row[1] for row in rows if row}) or ["pytest itself"]


def culprits(python: Path, failed: list[str]) -> list[str]:
    """Return the packages of the newest set that, put back to constraints.txt, cure `failed`.

    What a package's older version cannot stand beside is resolved anew, and so goes back with it.
    """
    now, before = pins(NEWEST), pins(CONSTRAINTS)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    direct = [str(canonicalize_name(Requirement(line).name)) for line in declared]
    named = list[str]()
    for package in (name for name in direct if before.get(name, now.get(name)) != now.get(name)):
        back = [f"{package}=={before[package]}"]
        install = [
            UV,
            "--quiet",
            "pip",
            "install",
            "--python",
            python,
            "--editable",
            ".[dev,serve]",
        ]
        done = subprocess.run([*install, *back, *without_llm_compressor()], cwd=ROOT, check=False)
        if done.returncode == 0 and not tested(python, "newest", tuple(failed)):
            named.append(f"{package} {now[package]} (green with {before[package]})")
        make("newest")
    return named


def lay_over(packages: Iterable[str]) -> None:
    """Install the newest versions of packages into the folder of `core`, and nothing else."""
    shutil.rmtree(FOLDER / "core", ignore_errors=True)
    newest = pins(NEWEST)
    wanted = [f"{package}=={newest[package]}" for package in packages]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", FOLDER / "core", *wanted], check=True)


def run_core(arguments: tuple[str, ...]) -> bool:
    """Run CORE on the newest packages; where it fails, name those without which it passes."""
    newest, before = pins(NEWEST), pins(CONSTRAINTS)
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounded = [Requirement(line) for line in lines if "<" in line]
    names = [str(canonicalize_name(line.name)) for line in bounded]
    names = [name for name in names if name not in ("torch", "triton")]  # of several GB, with CUDA
    moved = {name for name in names if before.get(name, newest[name]) != newest[name]}
    print("core:", *(f"{name} {newest[name]}" for name in sorted(moved)), flush=True)
    lay_over(sorted(moved))
    failed = tested(Path(sys.executable), "core", arguments or CORE)
    for size in range(1, len(moved) + 1) if failed else ():
        blamed = list[str]()
        for out in itertools.combinations(sorted(moved), size):
            lay_over(sorted(moved - set(out)))
            if not tested(Path(sys.executable), "core", tuple(failed)):
                blamed.append(" with ".join(f"{name} {newest[name]}" for name in out))
        if blamed:
            print("core is red because of:", *blamed, sep="\n  ")
            break
    return not failed


def run(cell: str, arguments: tuple[str, ...]) -> bool:
    """Make a cell's set and run its tests; return whether they pass."""
    name, _, folder = cell.partition("/")
    if name == "core":
        return run_core(arguments)
    began = time.monotonic()
    python = make(name)
    print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
    if name == "oldest" and (wrong := unreal(python)):
        print("bounds that nothing satisfies, and what was installed:", *wrong, sep="\n  ")
        return False
    subprocess.run([python, "-c", SHOWN], check=True)
    tests = [f"tests/{part}" for part in ([folder] if folder else COMPUTING)]
    parallel = (
        "-m|not slow and not gpu|-n|auto|--maxprocesses|4|--dist|loadfile|--no-loadscope-reorder"
    )
    failed = tested(python, name, arguments or (*parallel.split("|"), *tests))
    if failed and name == "newest":
        blamed = culprits(python, failed)
        print("the newest set is red because of:", *blamed or ["no package alone"], sep="\n  ")
    return not failed


def cells() -> list[str]:
    """Return the names of all cells: SET/FOLDER."""
    return [f"{name}/{folder}" for name in SETS for folder in COMPUTING]


def chosen(word: str) -> list[str]:
    """Return the sets or cells that the command line asks for: all, one, or so many drawn ones."""
    if not word.isdigit():
        return [word] if word else [*SETS]
    return drawn(cells(), int(word))


def main(word: str = "", *arguments: str) -> int:
    """Run the cells that are asked for; return 1 where one is red."""
    if word == "record":
        record()
        return 0
    red = [cell for cell in chosen(word) if not run(cell, arguments)]
    print(f"red: {', '.join(red)}" if red else "green")
    return bool(red)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
