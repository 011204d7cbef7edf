"""The script that runs the whole chain at the real size, at a small one: it ends and compares."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "benchmarks" / "full_size_run.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_chain_at_two_budgets(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    command = [sys.executable, SCRIPT, tmp_path / "work", report, "--recipe", "nvfp4"]
    command += ["--gpu-memory", "12", "--gpu-memory", "9", "--layers", "2", "--experts", "8"]
    command += ["--vocabulary", "4096", "--count", "4", "--denoising-steps", "2", "--batch", "4"]
    words = list(map(str, command))
    shown = subprocess.run([*words, "--seconds", "60"], capture_output=True, text=True, check=True)
    if "out of time" in shown.stdout:  # the same command goes on
        shown = subprocess.run(
            [*words, "--seconds", "1600"], capture_output=True, text=True, check=True
        )
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    ended = {(line["gb"], line["stage"]) for line in lines if line["code"] is not None}
    stages = {"calibrate", "convert", "verify", "fidelity", "evaluate", "report"}
    assert ended == {(gb, stage) for gb in (12.0, 9.0) for stage in stages}
    for file in ("input_scales.safetensors", "fidelity.json", "bf16/word_problems.jsonl"):
        assert f"{file}: the same at 2 budgets" in shown.stdout
    assert not list((tmp_path / "work").glob("runs-*/*/checkpoint/*.safetensors"))
