"""Launch configurations: a table per device, made by `python -m fused_dequant.tune`, shipped as JSON.

    tuning/NVIDIA_H200.json
    {"device": ..., "triton": ...,
     "kernels": {"linear/fp8/4096x2816": {"256": {"BM": ...}, "1024": ...}, ...}}

A key is verb/scheme/NxK; below it, buckets of M (tokens). A call takes the smallest bucket that
holds its M, or the largest there is. A device without a table takes that of its architecture: an H100
runs what was tuned on an H200. Nothing is tuned while serving: a device or shape that no table knows
gets `default`, untuned, which fits every target, and says so once.
"""

import json
import logging
import re
from functools import cache
from pathlib import Path

import torch

from fused_dequant.targets import capability, forced

Config = dict[str, int]
FOLDER = Path(__file__).parent / "tuning"
OF_ARCHITECTURE = {
    (9, 0): "NVIDIA H200"
}  # compute capability -> the device whose table stands for it
_log = logging.getLogger(__name__)


def table_path(device_name: str) -> Path:
    """File of a device's table."""
    return FOLDER / f"{device_name.replace(' ', '_')}.json"


@cache
def table(device_name: str) -> dict[str, dict[str, Config]]:
    """Kernel key -> bucket of M -> config; empty for a device without a table."""
    path = table_path(device_name)
    if not path.exists():
        _log.warning(
            "no tuning table for %s: untuned configurations; make one with "
            "`python -m fused_dequant.tune`", device_name,
        )  # fmt: skip
        return {}
    return json.loads(path.read_text())["kernels"]


def choose(verb: str, scheme: str, M: int, N: int, K: int, device: torch.device) -> Config:
    """The configuration for a launch on `device`."""
    return lookup(verb, scheme, M, N, K, table_name(device))


def table_name(device: torch.device) -> str:
    """The device whose table is taken: this one, or one of its architecture that has a table.

    With a target forced, the device itself is left out.
    """
    if device.type != "cuda":
        return "cpu"
    name, own = torch.cuda.get_device_name(device), capability(device)
    alike = OF_ARCHITECTURE.get(own, name)
    if forced() is not None:
        return alike if own in OF_ARCHITECTURE else f"sm_{own[0]}{own[1]}"
    return name if table_path(name).exists() else alike


@cache
def lookup(verb: str, scheme: str, M: int, N: int, K: int, device_name: str) -> Config:
    """The table's entry, that of the same scheme and K with the nearest N, or `default`."""
    key = f"{verb}/{scheme}/{N}x{K}"
    known = table(device_name) if device_name != "cpu" else {}
    alike = re.compile(rf"{verb}/{scheme}/(\d+)x{K}")
    near = {abs(int(m[1]) - N): name for name in known if (m := alike.fullmatch(name))}
    buckets = known[near[min(near)]] if near else None
    if not buckets:
        if device_name != "cpu":
            _log.warning("%s: %s is not in the tuning table, using a default", device_name, key)
        return default(verb, scheme, M, N, K)
    sizes = sorted(map(int, buckets))
    return buckets[str(next((size for size in sizes if size >= M), sizes[-1]))]


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 where kernels are interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def block_rows(config: Config) -> int:
    """Rows of a block: BM, and the second accumulator's MORE where a kernel has one."""
    return config["BM"] + config.get("MORE", 0)


def default(verb: str, scheme: str, M: int, N: int, K: int) -> Config:
    """A configuration that runs on every supported GPU (48 KB to 100 KB of shared memory)."""
    if verb == "soft_embedding":
        return {"SPLITS": 8, "BM": 64, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 3}
    if verb == "lm_head":
        return {"BM": 64, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
    rows = 16 if M <= 16 or verb == "experts" else 64
    narrower = {"NARROWER": 0} if verb == "experts" else {}
    if scheme == "nvfp4_fragments":
        BK = 128 if K % 128 == 0 else 64
        BN = 128 if N % 128 == 0 else 64
        sizes = {"BM": max(rows, 32), "MORE": 0, "BN": BN, "BK": BK}
        return sizes | narrower | {"PARTS": 1, "STAGES": 3, "num_warps": BN // 16}
    if scheme.startswith("nvfp4"):
        return {"BM": rows, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 3}
    config = {"BM": rows, "MORE": 0, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
    return config | narrower | {"SWAP": int(rows < 64)}
