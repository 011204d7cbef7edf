"""The release checklist as one command; it stops before the upload: python -m tests.support.release.

Version, changelog and tag must agree and nothing may be uncommitted. Wheel and source distribution
are built from the committed files alone, and must state that version; their sha256 sums go beside
them. With QUANTIZE_SIGNING_KEY (a PEM file) dist/ is signed. What is left is printed, for a person.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def faults(version: str, changelog: str, changed: str, tagged: str, head: str) -> list[str]:
    """What stands in the way, from texts: the changelog, `git status`, the tag's and HEAD's commits."""
    found = [f"uncommitted: {line.strip()}" for line in changed.splitlines()]
    heads = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    first = heads[0] if heads else "nothing"
    if not re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", first):
        found.append(f"CHANGELOG.md begins with {first!r}, not with {version} and a date: write it")
    if tagged and tagged != head:
        found.append(
            f"the tag v{version} stands for {tagged[:12]}, not for HEAD: raise the version"
        )
    return found


def build(out: Path) -> list[Path]:
    """Wheel and source distribution of HEAD."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "head.tar")
        git("archive", "HEAD", "-o", str(archive))
        with tarfile.open(archive) as tar:
            tar.extractall(Path(folder, "tree"), filter="data")
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), "."]
        subprocess.run(command, cwd=Path(folder, "tree"), check=True, stdout=subprocess.DEVNULL)
    return sorted(file for file in out.iterdir() if file.suffix in (".whl", ".gz"))


def stated(file: Path) -> str:
    """The version that a distribution's metadata states."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            text = wheel.read(name).decode()
    else:
        with tarfile.open(file) as tar:
            name = next(n for n in tar.getnames() if n.count("/") == 1 and n.endswith("/PKG-INFO"))
            member = tar.extractfile(name)
            assert member is not None
            text = member.read().decode()
    return re.findall(r"^Version: (.+)$", text, re.MULTILINE)[0]


def main() -> int:
    version = VERSION.findall((ROOT / "quantize" / "__init__.py").read_text("utf-8"))[0]
    tagged = git("rev-list", "-n", "1", f"v{version}") if git("tag", "-l", f"v{version}") else ""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    found = faults(
        version, changelog, git("status", "--porcelain"), tagged, git("rev-parse", "HEAD")
    )
    for fault in found:
        print(f"not ready: {fault}")
    if found:
        return 1
    out = ROOT / "dist"
    if out.exists() and any(out.iterdir()):
        print("not ready: dist/ holds files; move them away")
        return 1
    files = build(out)
    if {stated(file) for file in files} != {version} or len(files) != 2:
        print(
            f"not ready: {[(file.name, stated(file)) for file in files]} should be {version}, twice"
        )
        return 1
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("\n".join(sums))
    if key := os.environ.get("QUANTIZE_SIGNING_KEY"):
        from quantize.hub.signing import sign

        print(f"signed: {sign(out, Path(key))}")
    print(f"\nready. What is left:\n  git tag v{version} && git push origin v{version}")
    print("  twine upload dist/*.whl dist/*.tar.gz    # pip install diffusiongemma-quantize")
    return 0


if __name__ == "__main__":
    sys.exit(main())
