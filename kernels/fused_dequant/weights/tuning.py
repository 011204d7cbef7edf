"""Looks up the fastest launch configurations in tables, or returns a default that always fits.

    tuning/NVIDIA_H200.json
    {"device": ..., "capability": "sm_90", "triton": ...,
     "kernels": {"linear/fp8/4096x2816": {"256": {"BM": ...}, "1024": ...}, ...}}

A key is verb/scheme/NxK. It has one configuration for each of several numbers of tokens M. A launch
takes the smallest listed M >= its own, or the largest M if all are smaller. If no key has the
launch's N, the nearest N with the same K is taken. For a key and M in several tables, those of the
device's own name take precedence over others of its compute capability. An H100 has no table, so it
uses the H200's. A table that `quantize tune` wrote (`user_tables`) takes precedence over one that
ships. Nothing is tuned while serving: a launch that no table covers gets `default`, which is untuned
but fits every target. A device without any table causes one warning.
"""

import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fused_dequant.launch.targets import capability, forced, name_of
from fused_dequant.weights.layouts import KERNELS

Config = dict[str, int]
Table = dict[str, dict[str, Config]]  # kernel key -> bucket of M -> config
SHIPPED = Path(__file__).parent / "tuning"
_folders = [SHIPPED]  # later ones take precedence
_log = logging.getLogger(__name__)


def user_tables(folder: Path) -> None:
    """From now on, also read the tables in `folder`; they take precedence over tables that ship."""
    _folders[:] = [SHIPPED, folder]
    forget()


def forget() -> None:
    """Forget all tables that were read, so that changed folders and files are read again."""
    _tables.cache_clear()
    table.cache_clear()
    lookup.cache_clear()


def table_path(device_name: str, folder: Path = SHIPPED) -> Path:
    """Return the path in `folder` of the table for the device named `device_name`."""
    return folder / f"{device_name.replace(' ', '_')}.json"


@cache
def _tables() -> list[dict[str, Any]]:
    """Return all tables, those that ship first; an unreadable one is left out, with a warning."""
    tables: list[dict[str, Any]] = []
    for path in (path for folder in _folders for path in sorted(folder.glob("*.json"))):
        try:
            read = json.loads(path.read_text())
            entry = {key: read[key] for key in ("device", "capability", "kernels")}
            tables.append(entry | {"shipped": path.parent == SHIPPED})
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is no tuning table (%s): left out; remove it", path, error)
    return tables


@cache
def table(device_name: str | None, target: str, *, shipped: bool = False) -> Table:
    """Return all tables of capability `target` merged; for a key and M the device's own table wins.

    If `shipped`, leave out the user's tables.
    """
    tables = [entry for entry in _tables() if entry["shipped"] or not shipped]
    alike = [entry for entry in tables if entry["capability"] == target]
    of_device = [entry for entry in alike if entry["device"] == device_name]
    kernels: Table = {}
    for entry in [entry for entry in alike if entry not in of_device] + of_device:
        for key, buckets in entry["kernels"].items():
            kernels[key] = kernels.get(key, {}) | buckets
    if not kernels and not shipped:
        _log.warning(
            "no tuning table for %s: untuned configurations; make one with `quantize tune`",
            device_name or target,
        )
    return kernels


def choose(verb: str, scheme: str, M: int, N: int, K: int, device: torch.device) -> Config:
    """Return the configuration for a launch on `device`; "meta" means the current GPU.

    On a CPU, return `default`. If QUANTIZE_TARGET forces a target, the device's own tables do not
    take precedence over others.
    """
    if device.type == "cpu":
        return default(verb, scheme, M, N, K)
    return lookup(verb, scheme, M, N, K, *_table_names(device))


def _table_names(device: torch.device) -> tuple[str | None, str]:
    """Return the names by which tables of a device are tables: its own (None if forced), its target."""
    name = None
    if forced() is None:
        name = torch.cuda.get_device_name(device if device.type == "cuda" else None)
    return name, name_of(capability(device))


def of_layout(layout: str, device: torch.device) -> Table:
    """Return the configurations that launches with weights of a layout get on a GPU."""
    tables = table(*_table_names(device))
    return {key: buckets for key, buckets in tables.items() if key.split("/")[1] == layout}


def of_user(layout: str, device: torch.device) -> Iterator[tuple[str, int, Config]]:
    """Yield (key, M, configuration) of those of `of_layout` that are not in the tables that ship."""
    ships = table(*_table_names(device), shipped=True)
    for key, buckets in of_layout(layout, device).items():
        for M, config in buckets.items():
            if ships.get(key, {}).get(M) != config:
                yield key, int(M), config


@cache
def lookup(
    verb: str, scheme: str, M: int, N: int, K: int, device_name: str | None, target: str
) -> Config:
    """Return the configuration that the module's docstring describes; `default` if no table has one."""
    known = table(device_name, target)
    alike = re.compile(rf"{verb}/{scheme}/(\d+)x{K}")
    near = {abs(int(m[1]) - N): name for name in known if (m := alike.fullmatch(name))}
    if not near:
        return default(verb, scheme, M, N, K)
    buckets = known[near[min(near)]]
    sizes = sorted(map(int, buckets))
    return buckets[str(next((size for size in sizes if size >= M), sizes[-1]))]


def block_rows(config: Config) -> int:
    """Return how many rows a block has: BM, plus MORE if the kernel has a second accumulator."""
    return config["BM"] + config.get("MORE", 0)


def default(verb: str, scheme: str, M: int, N: int, K: int) -> Config:
    """Return an untuned configuration that fits every target: <= 99 KiB of shared memory per block."""
    if verb == "soft_embedding":
        return {"SPLITS": 8, "BM": 64, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 3}
    if verb == "lm_head":
        return {"BM": 64, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
    rows = 16 if M <= 16 or verb == "experts" else 64
    narrower = {"NARROWER": 0} if verb == "experts" else {}
    module = KERNELS[scheme].module
    if module == "nvfp4_hopper":
        BK = 128 if K % 128 == 0 else 64
        BN = 128 if N % 128 == 0 else 64
        sizes = {"BM": max(rows, 32), "MORE": 0, "BN": BN, "BK": BK}
        return sizes | narrower | {"PARTS": 1, "STAGES": 3, "num_warps": BN // 16}
    if module == "nvfp4_blackwell":  # experts' rows: about their mean number, M * 8 / 128
        rows = (16 if M <= 256 else 32 if M <= 512 else 64) if verb == "experts" else rows
        return {"BM": rows, "BN": 128, "BK": 128, "num_warps": 4, "num_stages": 4}
    if module == "nvfp4":
        return {"BM": rows, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 3}
    config = {"BM": rows, "MORE": 0, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
    return config | narrower | {"SWAP": int(rows < 64)}
