"""Reads from NVIDIA ModelOpt's configs which scheme each Linear has.

`quantize.schemes.records` says which tensors a Linear of each quant_algo has.

config.json has `quantization_config` {quant_method: "modelopt", quant_algo, ignore}. Older exports have
only hf_quant_config.json, which calls `ignore` `exclude_modules`. If quant_algo is MIXED_PRECISION,
`quantized_layers` gives each module its own quant_algo. An entry names a Linear or a module above it;
in `ignore`, `*` and `?` are wildcards. Entries may name modules of the encoder or the tied decoder.

Source: ModelOpt's export code and vLLM's loader, which were read and not run. No published checkpoint
was at hand; tests write files from this description. So this reader is UNVERIFIED against NVIDIA's
real checkpoints. Block-128 and per-channel FP8, MX formats, AWQ and SVD variants are refused by name.
Scales of an FP8 KV cache are ignored, since the cache here is BF16.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from quantize.errors import InputError
from quantize.schemes.records import SCHEMES, OnDisk, Scheme

ALGORITHMS = {s.modelopt.name: s for s in SCHEMES.values() if s.modelopt}
KV_SCALES = re.compile(r".+\.self_attn\.[kv]_proj\.[kv]_scale")


class ModelOptSchemes:
    """Finds modules' schemes in ModelOpt's quantization_config; `used` is the set of its schemes."""

    on_disk: Callable[[Scheme], OnDisk] = attrgetter("modelopt")  # never None for what `of` returns

    def __init__(self, quantization_config: dict[str, Any]) -> None:
        stated = quantization_config
        self._ignore: list[str] = stated.get("ignore") or stated.get("exclude_modules") or []
        entries = {"": stated}  # the module above all modules
        if str(stated.get("quant_algo")).upper() == "MIXED_PRECISION":
            entries = stated.get("quantized_layers") or {}
        self._schemes: dict[str, Scheme] = {name: _scheme(e) for name, e in entries.items()}
        cached = stated.get("kv_cache_scheme") or stated.get("kv_cache_quant_algo")
        self.passed_over = KV_SCALES if cached else None
        self.used = set(self._schemes.values())

    def of(self, module: str) -> Scheme | None:
        """Return the scheme of the Linear `module`, or None if it stays BF16."""
        names = {module, module.replace("model.decoder.", "model.encoder.language_model.", 1)}
        if any(_covers(entry, name) for entry in self._ignore for name in names):
            return None
        above = [prefix for name in names for prefix in _prefixes(name)]
        nearest = max((p for p in above if p in self._schemes), key=len, default=None)
        return None if nearest is None else self._schemes[nearest]


def _scheme(entry: dict[str, Any]) -> Scheme:
    algorithm = str(entry.get("quant_algo")).upper()
    if algorithm not in ALGORITHMS:
        raise InputError(
            f"quantization_config: ModelOpt's quant_algo {entry.get('quant_algo')!r} is not read here, "
            f"only {', '.join(ALGORITHMS)} and MIXED_PRECISION of them"
        )
    return ALGORITHMS[algorithm]


def _covers(entry: str, name: str) -> bool:
    """Return whether `entry` is `name`, a module above it, or a pattern that matches `name`."""
    return name == entry or name.startswith(f"{entry}.") or fnmatchcase(name, entry)


def _prefixes(name: str) -> list[str]:
    """Return "a.b.c", "a.b", "a" and "" for the name "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
