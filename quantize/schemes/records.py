"""Records of the quantization schemes: each one's name, its layouts on disk, and its arithmetic.

All code that needs to know something about a scheme asks its record. A new scheme needs a record in
`SCHEMES`, a kernel, and code in `rounding` for any arithmetic that is new.

  scheme        codes  scales                                  activations while serving
  FP8_DYNAMIC   e4m3   BF16 per row                            e4m3, one scale per token
  INT8_DYNAMIC  int8   BF16 per row                            int8, one scale per token
  NVFP4         e2m1   e4m3 per 16 inputs, FP32 per matrix     e2m1 under a calibrated FP32 scale
  NVFP4A16      e2m1   e4m3 per 16 inputs, FP32 per matrix     BF16
  MXFP4A16      e2m1   e8m0 per 32 inputs                      BF16

ModelOpt's scales of NVFP4 are SMALL numbers that multiply. `weight_scale_2` = amax / (6 * 448) is the
inverse of compressed-tensors' `weight_global_scale`, `input_scale` that of `input_global_scale`. Codes,
nibble order and block scales are the same in both. ModelOpt's FP8 has one scale per weight matrix and
one fixed scale (amax / 448) for a Linear's activations; here activations get one scale per token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from quantize.schemes import rounding
from quantize.schemes.rounding import (
    E2M1_GROUPS,
    E4M3_ROWS,
    GROUP,
    INT8_ROWS,
    MX_GROUP,
    MX_GROUPS,
    Codes,
    Observer,
)

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # suffix -> safetensors dtype and shape
SCALE_DTYPES = {"F8_E4M3": "torch.float8_e4m3fn", "U8": "torch.uint8", "BF16": None}  # in a config
GPTQ_ERRS = 1.5  # limit on GPTQ's error, as a multiple of the limit for rounding to nearest


@dataclass(frozen=True)
class OnDisk:
    """How one library stores a scheme; `name` is the config's `format`, or ModelOpt's `quant_algo`.

    `tensors(out, in)` returns suffix -> (dtype, shape) of a Linear's tensors on disk, codes first.
    """

    name: str
    tensors: Callable[[int, int], Tensors]


@dataclass(frozen=True)
class Scheme:
    """One quantization scheme: its name, its layouts on disk and in memory, and its arithmetic."""

    name: str  # the scheme's name in recipes and in everything we write
    compressed: OnDisk  # the layout of compressed-tensors, which we write
    config_weights: tuple[str, int, str]  # type, num_bits and strategy of weights in a config group
    codes: Codes  # the number format of the weights
    # (weight [..., out, in], ranges, shared global scale or None, `out` or None) -> tensors by suffix.
    quantize: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], dict[str, Tensor]]
    # Tensors by suffix, in either library's layout -> BF16 weight [..., out, in].
    dequantize: Callable[[Mapping[str, Tensor]], Tensor]
    kernel: Literal["fp8", "int8", "nvfp4", "mxfp4"]  # the kernels' name for this format of weights
    max_relative_error: float  # limit on |W - W'| / |W| of a matrix rounded to nearest
    modelopt: OnDisk | None = None  # the layout of ModelOpt; None if ModelOpt lacks the scheme
    # `dynamic` of the activations in a config group; None if activations stay BF16.
    config_activations: Literal[True, "local"] | None = None
    calibrated: bool = False  # whether every Linear has an `input_global_scale` from calibration

    def __str__(self) -> str:
        return self.name

    @property
    def group_size(self) -> int:
        """How many inputs share a scale, a divisor of in-features; 1 if each row has one scale."""
        return self.codes.group or 1

    @property
    def shares_global_scale(self) -> bool:
        """Whether weights have a global scale, which Linears that a server fuses must share."""
        return "weight_global_scale" in self.compressed.tensors(1, GROUP)

    def largest_error(self, rounding: str) -> float:
        """Return the limit on |W - W'| / |W| for `rounding`: `nearest`, or `gptq` with a larger limit.

        GPTQ's largest error on the bundled model with 64 prompts was 0.113 in NVFP4 and 0.044 in FP8.
        """
        return self.max_relative_error * (GPTQ_ERRS if rounding == "gptq" else 1)

    def config_group(self, targets: Sequence[str], observer: Observer) -> dict[str, Any]:
        """Return the compressed-tensors config group that gives this scheme to the modules `targets`.

        The group equals the preset in compressed-tensors, a library that takes seconds to import.
        """
        kind, bits, strategy = self.config_weights
        group = self.codes.group
        shared = {
            "num_bits": bits,
            "type": kind,
            "symmetric": True,
            "group_size": group,
            "block_structure": None,
            "actorder": None,
            "scale_dtype": SCALE_DTYPES[self.compressed.tensors(1, GROUP)["weight_scale"][0]],
            "zp_dtype": None,
            "observer_kwargs": {},
        }
        weights = {"strategy": strategy, "dynamic": False, "observer": observer}
        activations = {
            "strategy": strategy if group else "token",
            "dynamic": self.config_activations,
            "observer": "static_minmax" if group else None,
        }
        return {
            "targets": list(targets),
            "weights": shared | weights,
            "input_activations": shared | activations if self.config_activations else None,
            "output_activations": None,
            "format": self.compressed.name,
        }

    def observe(self, weight: Tensor, observer: Observer) -> Tensor:
        """Return the range of each group of a weight [..., out, in]: BF16 [..., out, groups]."""
        return rounding.observe(weight, self.codes, observer)


def _rows(dtype: str, out: int, inputs: int) -> Tensors:
    return {"weight": (dtype, (out, inputs)), "weight_scale": ("BF16", (out, 1))}


def _groups(
    codes: str, number: tuple[int, ...], shared: Sequence[str], out: int, inputs: int
) -> Tensors:
    """Return the tensors of e2m1 `codes`, block scales, and `shared` scales of shape `number`."""
    scale = ("F8_E4M3", (out, inputs // GROUP))
    tensors: Tensors = {codes: ("U8", (out, inputs // 2)), "weight_scale": scale}
    return tensors | dict.fromkeys(shared, ("F32", number))


def _mx_groups(out: int, inputs: int) -> Tensors:
    scale = ("U8", (out, inputs // MX_GROUP))
    return {"weight_packed": ("U8", (out, inputs // 2)), "weight_scale": scale}


def _modelopt_rows(out: int, inputs: int) -> Tensors:
    number = ("F32", ())
    return {"weight": ("F8_E4M3", (out, inputs)), "weight_scale": number, "input_scale": number}


_CALIBRATED = ("weight_global_scale", "input_global_scale")
_OURS, _MODELOPT = partial(_groups, "weight_packed", (1,)), partial(_groups, "weight", ())
_E4M3_ROWS = OnDisk("float-quantized", partial(_rows, "F8_E4M3"))
_INT8_ROWS = OnDisk("int-quantized", partial(_rows, "I8"))
_E2M1_GROUPS = OnDisk("nvfp4-pack-quantized", partial(_OURS, ["weight_global_scale"]))
_MX_GROUPS = OnDisk("mxfp4-pack-quantized", _mx_groups)
_NVFP4 = Scheme(
    name="NVFP4",
    compressed=OnDisk("nvfp4-pack-quantized", partial(_OURS, _CALIBRATED)),
    modelopt=OnDisk("NVFP4", partial(_MODELOPT, ["weight_scale_2", "input_scale"])),
    config_weights=("float", 4, "tensor_group"),
    config_activations="local",
    codes=E2M1_GROUPS,
    quantize=rounding.quantize_groups,
    dequantize=rounding.dequantize_groups,
    calibrated=True,
    kernel="nvfp4",
    max_relative_error=0.13,
)
_ALL = (
    Scheme(
        name="FP8_DYNAMIC",
        compressed=_E4M3_ROWS,
        modelopt=OnDisk("FP8", _modelopt_rows),
        config_weights=("float", 8, "channel"),
        config_activations=True,
        codes=E4M3_ROWS,
        quantize=partial(rounding.quantize_rows, E4M3_ROWS),
        dequantize=rounding.dequantize_rows,
        kernel="fp8",
        max_relative_error=0.04,
    ),
    _NVFP4,
    # The same weights with BF16 activations: nothing to calibrate.
    replace(
        _NVFP4,
        name="NVFP4A16",
        compressed=_E2M1_GROUPS,
        modelopt=OnDisk("W4A16_NVFP4", partial(_MODELOPT, ["weight_scale_2"])),
        config_activations=None,
        calibrated=False,
    ),
    replace(
        _NVFP4,
        name="MXFP4A16",
        compressed=_MX_GROUPS,
        modelopt=None,
        config_weights=("float", 4, "group"),
        config_activations=None,
        codes=MX_GROUPS,
        quantize=rounding.quantize_mx,
        calibrated=False,
        kernel="mxfp4",
        max_relative_error=0.16,
    ),
    Scheme(
        name="INT8_DYNAMIC",
        compressed=_INT8_ROWS,
        config_weights=("int", 8, "channel"),
        config_activations=True,
        codes=INT8_ROWS,
        quantize=partial(rounding.quantize_rows, INT8_ROWS),
        dequantize=rounding.dequantize_rows,
        kernel="int8",
        max_relative_error=0.03,
    ),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _ALL}
# (what a library calls the scheme, how that library stores it)
LAYOUTS = (
    *((scheme.name, scheme.compressed) for scheme in _ALL),
    *((scheme.modelopt.name, scheme.modelopt) for scheme in _ALL if scheme.modelopt),
)
# Suffixes of a quantized Linear's tensors, after the module's name.
SUFFIXES = tuple(
    dict.fromkeys(suffix for _, layout in LAYOUTS for suffix in layout.tensors(1, GROUP))
)
GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")
INPUT_SCALES = ("input_global_scale", "input_scale")
TENSOR_SCALES = (*GLOBAL_SCALES, *INPUT_SCALES)  # one number for a whole matrix, above 0
CODES = ("weight_packed", "weight")  # a quantized Linear has one of them


def sound_each(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return bool [n]: whether each of n Linears is finite with global and input scales above 0."""
    checks = [rounding.finite_each(t, scale=s == "weight_scale") for s, t in tensors.items()]
    checks += [(t > 0).flatten(1).all(1) for s, t in tensors.items() if s in TENSOR_SCALES]
    return torch.stack(checks).all(0)


def refusal(mode: str, kernels: Iterable[str]) -> str | None:
    """Return why `mode` does not suit weights of these `kernels` (`Scheme.kernel`); None if it does."""
    if mode != "fp8" or "nvfp4" in kernels:
        return None
    return "activations fp8 are for NVFP4 weights, of which there are none: leave `fp8` out"


def scheme_of_group(group: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a compressed-tensors config group; None if no record in SCHEMES fits."""
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    key = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    dynamic = activations.get("dynamic", False) if activations else None
    for scheme in SCHEMES.values():
        same_groups = scheme.codes.group in (None, weights.get("group_size"))
        if (key, dynamic) == (scheme.config_weights, scheme.config_activations) and same_groups:
            return scheme
    return None
