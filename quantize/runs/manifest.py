"""The manifest of a run records what made it: versions, hardware, model, then facts per stage."""

import hashlib
import importlib.resources
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import psutil

from quantize import __version__
from quantize.checkpoints.reader import (
    GENERATION,
    SETTINGS,
    TOKENIZER_FILES,
    Checkpoint,
    hub_commit,
)
from quantize.host.resources import now
from quantize.runs.digests import hashed, remember, sampled, sha256_of
from quantize.runs.folder import is_card

PACKAGES = (
    "diffusiongemma-quantize", "torch", "transformers", "compressed-tensors", "safetensors", "lm-eval",
    "triton",
)  # fmt: skip


def new_manifest(source: Checkpoint, digest: str, recipe: str, model: str | None) -> dict[str, Any]:
    """Return a new run's manifest; `digest` is `source`'s fingerprint, `model` None if bundled."""
    return {
        "recipe": recipe,
        "began": now(),
        "tool": tool(),
        "source": {
            "model": model or "bundled",
            "bundled": model is None,
            "commit": hub_commit(source.folder),
            "folder": str(source.folder.resolve()),
            "fingerprint": digest,
            "bytes": source.nbytes,
        },
        "versions": {"python": platform.python_version()} | package_versions(),
        "hardware": hardware(),
        "stages": {},
    }


def tool() -> dict[str, Any]:
    """Return this code's `version`, its git `commit`, whether it is `modified`; None if unknown."""
    facts = {"version": __version__, "commit": None, "modified": None}
    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists():
        words = ("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")
        state = [_git(checkout, *arguments) for arguments in words]
        if None not in state:
            facts |= {"commit": state[0], "modified": bool(state[1])}
        return facts
    with suppress(PackageNotFoundError):  # copied, not installed
        if (text := distribution(PACKAGES[0]).read_text("direct_url.json")) is not None:
            facts |= {"commit": json.loads(text).get("vcs_info", {}).get("commit_id")}
    return facts


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints about a checkout, None if git is missing or refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def package_versions() -> dict[str, str]:
    """Return name -> version of the packages whose behaviour a run depends on."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def code_digest() -> str:
    """Return a sha256 over this code and the versions of the packages that it computes with."""
    parts = [json.dumps(package_versions())]
    for package in ("quantize", "fused_dequant"):
        root = Path(str(importlib.resources.files(package)))
        parts.append(hashed({str(f.relative_to(root)): f for f in sorted(root.rglob("*.py"))}))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def hardware() -> dict[str, Any]:
    """Return the processor's name, its usable cores, the memory in bytes and the GPUs' names."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory, cores = psutil.virtual_memory().total, len(os.sched_getaffinity(0))
    return {"cpu": _cpu_name(), "cores": cores, "memory_bytes": memory, "gpus": gpus}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def fingerprint(checkpoint: Checkpoint, settings_of: Path | None = None) -> str:
    """Return a sha256 that tells whether a checkpoint would still give the same answers.

    It covers every byte of config.json, tokenizer, chat template, processor, generation settings and
    shards. The folder `settings_of`, if given, supplies the generation settings under which answers
    were scored.
    """
    return hashed(_fingerprinted(checkpoint, settings_of))


def is_sampled_fingerprint(digest: str, checkpoint: Checkpoint) -> bool:
    """Return whether `digest` is what versions up to 268631d took for a large model's fingerprint.

    They read samples of files above 2 GB in all, so it does not tell whether the model has changed.
    """
    files = _fingerprinted(checkpoint)
    return digest != hashed(files) and digest == sampled(files)


def _fingerprinted(checkpoint: Checkpoint, settings_of: Path | None = None) -> dict[str, Path]:
    files = [*_matching(checkpoint.folder, ("config.json", *SETTINGS)), *checkpoint.shards]
    by_name = {file.name: file for file in files}
    if settings_of and GENERATION in by_name:
        by_name[GENERATION] = settings_of / GENERATION
    return {name: file for name, file in by_name.items() if file.is_file()}


def tokenizer_digest(folder: Path) -> str:
    """Return a sha256 over the files of a checkpoint's tokenizer and chat template."""
    return hashed({file.name: file for file in _matching(folder, TOKENIZER_FILES)})


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    matching = {file for pattern in patterns for file in folder.glob(pattern)}
    return sorted(file for file in matching if file.is_file())


def checksums(checkpoint: Checkpoint, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return relative path -> sha256 for every file of a checkpoint but the card and its scores.

    A sha256 covers all bytes, like the Hub's. Checksums in `known` are kept without reading files.
    """
    sums = dict(known or {})
    files = sorted(file for file in checkpoint.folder.rglob("*") if file.is_file())
    names = {file.relative_to(checkpoint.folder).as_posix(): file for file in files}
    asked = {name: file for name, file in names.items() if name not in sums and not is_card(name)}
    with ThreadPoolExecutor() as pool:
        read = dict(zip(asked, pool.map(sha256_of, asked.values()), strict=True))
    remember({names[name]: digest for name, digest in read.items()})  # and no digest of `known`
    return sums | read
