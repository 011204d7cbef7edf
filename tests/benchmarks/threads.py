"""Are the artifacts of a recipe the same bytes for 1, 2 and 4 threads? On the bundled model, by a CPU.

python -m tests.benchmarks.threads [RECIPE ...]: each recipe up to its checkpoint, in a process for each
number of threads, with few prompts; it prints the files that differ and exits with 1 if any does.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from quantize.pipeline.run import advance, started
from quantize.recipe.reading import load_recipe, shipped_recipes

THREADS, PROMPTS = (1, 2, 4), 4


def make(recipe_name: str, out: Path) -> None:
    """Run a recipe up to its checkpoint, with PROMPTS prompts of a canvas each."""
    recipe = load_recipe(recipe_name).for_bundled_model()
    if recipe.calibration is not None:
        few = {"prompts": PROMPTS, "canvases": 1}
        calibration = recipe.calibration.model_copy(update=few)
        recipe = recipe.model_copy(update={"calibration": calibration})
    with started(recipe, None, out, resume=False) as run:
        advance(run, "convert")


def digests(folder: Path) -> dict[str, str]:
    """Return path -> sha256 of what calibrate, round and convert wrote."""
    files = (
        p
        for name in ("calibration", "rounding", "checkpoint")
        for p in folder.glob(f"*/{name}/**/*")
    )
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.is_file()
    }


def made_with(recipe: str, threads: int, out: Path) -> dict[str, str]:
    """Make a recipe's artifacts in a process of so many threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(threads))
    words = [sys.executable, "-m", "tests.benchmarks.threads", "--make", recipe, str(out)]
    subprocess.run(words, env=environment, check=True, stderr=subprocess.DEVNULL)
    return digests(out)


def main() -> int:
    """Compare; return the exit code."""
    if sys.argv[1:2] == ["--make"]:
        make(sys.argv[2], Path(sys.argv[3]))
        return 0
    faults = 0
    for recipe in sys.argv[1:] or shipped_recipes():
        with tempfile.TemporaryDirectory() as folder:
            found = [made_with(recipe, n, Path(folder) / str(n)) for n in THREADS]
        names = sorted({name for each in found for name in each})
        differ = [name for name in names if len({each.get(name) for each in found}) > 1]
        print(f"{recipe}: {len(names)} files, {len(differ)} differ {differ[:6]}", flush=True)
        faults += len(differ)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
