"""Where the kernels' tests run: on an NVIDIA GPU, or interpreted with TRITON_INTERPRET=1."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_dequant.launch.targets import is_hopper

ROOT = Path(__file__).parents[3]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.support.kernels_support import interpreter

    interpreter.install()
    gc.freeze()  # what is imported by now stays, and need not be walked again

GPU = not INTERPRETED and torch.cuda.is_available()
HOPPER = GPU and is_hopper(torch.device("cuda"))  # not where another target is forced
DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not GPU, reason="no GPU, not interpreting"),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(DEVICE)


def in_the_interpreter(*words: str) -> str:
    """Run GPU tests, named as pytest takes them, interpreted; return its line for each of them.

    In a process of their own: TRITON_INTERPRET acts when triton is imported.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-v", "-p", "no:cacheprovider"]
    command += ["-m", "gpu", "-W", "ignore::RuntimeWarning", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
