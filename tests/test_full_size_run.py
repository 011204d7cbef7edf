"""The script that runs the whole chain at the real size, on the bundled model: it ends and compares."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantize.bundled import CHECKPOINT

PROGRAM = "tests.benchmarks.full_size_run"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_chain_at_two_budgets(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(CHECKPOINT, folder / "bf16")
    command = [sys.executable, "-m", PROGRAM, "run", folder, "--recipe", "nvfp4", "--parallel", "2"]
    command += ["--gpu-memory", "16", "--gpu-memory", "12", "--keep", "nvfp4-12"]
    command += ["--count", "16", "--denoising-steps", "6", "--batch", "8"]
    words = list(map(str, command))
    shown = subprocess.run([*words, "--seconds", "60"], capture_output=True, text=True, check=True)
    if "out of time" in shown.stdout:  # the same command goes on
        shown = subprocess.run(words, capture_output=True, text=True, check=True)
    stages = {"calibrate", "round", "convert", "verify", "fidelity", "evaluate"}
    for gb in (16, 12):
        report = folder / "chains" / f"nvfp4-{gb}" / "report.jsonl"
        lines = [json.loads(line) for line in report.read_text().splitlines()]
        assert {line["stage"] for line in lines if line["done"]} >= stages
        assert re.search(rf"^nvfp4 at {gb} GB: \d+ s, a report$", shown.stdout, re.MULTILINE)
    for file in ("input_scales.safetensors", "fidelity.json", "bf16/word_problems.jsonl"):
        assert f"{file}: the same at 2 budgets" in shown.stdout
    kept = folder.glob("chains/*/*/checkpoint/*.safetensors")
    assert {path.parents[2].name for path in kept} == {"nvfp4-12"}
