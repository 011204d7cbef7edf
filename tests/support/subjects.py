"""The lint of commits: a subject is at most 72 characters long, so that every list shows it whole.

    python -m tests.support.subjects     lists subjects that are longer; ends with 1 if any is

Commits up to FIRST are let be. A shallow clone may lack FIRST: then all that it has are later. Without
git, or where the folder is no repository of its own, there are no commits to look at.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST, LONGEST = "a8f1ec1a2c542782e7562e6700be238cf46296e2", 72


def git(root: Path, *words: str) -> str | None:
    """Return what git prints in a folder; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def too_long(root: Path, first: str = FIRST) -> list[str]:
    """Return "HASH SUBJECT" of each commit after `first` whose subject is too long."""
    top = git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top) != root.resolve():
        return []
    commits = f"{first}..HEAD" if git(root, "cat-file", "-e", first) is not None else "HEAD"
    if commits == "HEAD" and git(root, "rev-parse", "--is-shallow-repository") != "true":
        return []  # a copy with a history of its own
    lines = (git(root, "log", "--format=%h %s", commits) or "").splitlines()
    return [line for line in lines if len(line.partition(" ")[2]) > LONGEST]


if __name__ == "__main__":
    refused = too_long(ROOT)
    print("\n".join(refused) or f"commits: no later subject has more than {LONGEST} characters")
    sys.exit(bool(refused))
