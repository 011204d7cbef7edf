"""What CI runs by turn is drawn by the commit's hash, so that all is visited over time.

    make test-slow            a fifth of the slow tests, drawn
    make test-slow SHARE=3    that fifth, of 0 to 4
    make test-slow SHARE=all  every slow test

A test's share hangs on its name alone.
"""

import os
import random
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARES = 5
SHARE = "QUANTIZE_TEST_SHARE"


def drawn(choices: Sequence[str], count: int) -> list[str]:
    """Return so many of the choices, the same ones for the same commit."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    return random.Random(head.stdout).sample(choices, count)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of the share that the environment names."""
    if (share := os.environ[SHARE]) != "all":
        items[:] = [
            item for item in items if zlib.crc32(item.nodeid.encode()) % SHARES == int(share)
        ]


def main(share: str = "") -> int:
    """Run a share of the slow tests; return pytest's exit status."""
    share = share or drawn([str(number) for number in range(SHARES)], 1)[0]
    files = [file for file in ROOT.glob("tests/**/test_*.py") if "mark.slow" in file.read_text()]
    files = [file.relative_to(ROOT) for file in sorted(files)]
    print(f"slow tests, share {share} of 0 to {SHARES - 1}", flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "slow and not gpu", "-p", __spec__.name]
    command += ["-n", "auto", "--maxprocesses", "4", "--maxschedchunk", "1", "--durations", "0"]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=os.environ | {SHARE: share}, check=False
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
