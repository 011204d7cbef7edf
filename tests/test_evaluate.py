"""Scoring on several processes gives the scores of one; servers and noise floor through evaluate."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from quantize.errors import InputError
from quantize.evaluate import evaluate, quantized_sides
from quantize.recipe import Evaluation, shipped_recipes
from quantize.run_dir import RunDir

PROBLEMS, BATCH = 20, 4


def test_sides_have_names_of_their_own() -> None:
    assert quantized_sides("per_layer", ["none", "per_layer", "per_expert"]) == [
        ("quantized", "per_layer"),
        ("quantized-none", "none"),
        ("quantized-per-expert", "per_expert"),
    ]


@pytest.mark.parametrize("one", ["server", "base_server"])
def test_both_models_are_served_or_neither(one: str, tmp_path: Path) -> None:
    settings = Evaluation(tasks=["word_problems"])
    served = {one: "http://127.0.0.1:9"}
    with pytest.raises(InputError, match="go together"):
        evaluate(RunDir(tmp_path), tmp_path, "", settings, **served)


def run(command: Sequence[str]) -> str:
    """Run with one thread a process: sums in another order would be other float32 numbers."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("WORLD_SIZE", None)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def converted(recipe: Path, out: Path) -> Path:
    run([sys.executable, "-m", "quantize", "run", "--recipe", str(recipe), "--until", "convert",
         "--out", str(out)])  # fmt: skip
    (folder,) = out.glob("small-*")
    return folder


@pytest.mark.slow
def test_two_processes_give_the_scores_of_one(tmp_path: Path) -> None:
    fields = yaml.safe_load(shipped_recipes()["fp8_dynamic"]) | {"name": "small"}
    fields["bundled"]["evaluation"] |= {
        "limit": {"word_problems": PROBLEMS},
        "repeats": {"word_problems": 2},
        "batch_size": BATCH,
    }
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(fields))
    one, two = converted(recipe, tmp_path / "one"), converted(recipe, tmp_path / "two")
    run([sys.executable, "-m", "quantize", "evaluate", str(one)])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    run([*launch, "2", "-m", "quantize", "evaluate", str(two)])
    for side in ("bf16", "quantized"):
        name = f"evaluation/{side}/word_problems.jsonl"
        rows = [json.loads(line) for line in (one / name).read_text().splitlines()]
        assert len(rows) == PROBLEMS * 2
        assert 0 < sum(row["scores"]["final_number"] for row in rows) < len(rows)
        assert (one / name).read_bytes() == (two / name).read_bytes()
    shared = sorted((tmp_path / "two" / ".bf16").iterdir())
    assert [len(file.read_bytes().splitlines()) - 1 for file in shared] == [5, 5]  # of 10 batches
