"""Computes which tensors a checkpoint must hold by its config.json, and checks that it holds them.

The BF16 layout is that of transformers' own class, under on-disk names: 1,047 tensors for the 26B
model. transformers takes seconds to import, so the layouts that it has for the models of KNOWN are kept
in a file, by what their shapes depend on. The quantized layout follows from the BF16 layout and
`quantization_config`: if a config group targets a Linear that `ignore` does not name, the tensors of
the group's scheme replace the Linear's weight. Each projection of an expert is one Linear.
"""

import hashlib
import importlib.resources
import json
import math
import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

import torch

from quantize.checkpoints.config_form import SIZES
from quantize.checkpoints.modelopt import ModelOptSchemes
from quantize.checkpoints.reader import FIX, Checkpoint, TensorSpec, check_total_size
from quantize.checkpoints.targets import (
    DROPPED,
    linear_modules,
    linear_shape,
    named_by,
    specs,
)
from quantize.checkpoints.ties import check_ties, tied_to
from quantize.errors import InputError
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import SUFFIXES, OnDisk, Scheme, refusal, scheme_of_group

VISION = re.compile(r"model\.encoder\.(vision_tower|embed_vision)\.")
# Names and shapes of published models and of the bundled one; tests/support/layouts.py writes the file.
KNOWN = importlib.resources.files("quantize.checkpoints").joinpath("known_models", "layouts.json")
SHAPING = {  # section of a config -> the keys that decide names and shapes
    "text_config": (*SIZES["text_config"], "layer_types"),
    "vision_config": (*SIZES["vision_config"], "standardize", "use_clipped_linears"),
}
ADAPTER = re.compile(r"\.(lora|ia3|hada|lokr|oft|boft|vera)_\w")
WIDER = ("F16", "F32", "F64")  # dtypes that a BF16 model may have been saved in
SCHEME_FIX = "this tool reads what it writes and the same schemes of llm-compressor"


def model_config(config: dict[str, Any]) -> Any:
    """Return transformers' configuration object for a config.json, without quantization_config.

    Raise InputError, with transformers' reason, if it refuses a value.
    """
    from quantize.checkpoints.from_transformers import DiffusionGemmaConfig

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    # `check_layout` has looked whether the weights are tied.
    try:
        return DiffusionGemmaConfig(**plain | {"tie_word_embeddings": True})
    except Exception as error:  # whatever it makes of a wrong value
        raise _refused_by_transformers(error) from error


def _refused_by_transformers(error: Exception) -> InputError:
    reason = textwrap.shorten(str(error), 200, placeholder=" ...")
    return InputError(
        f"config.json: transformers cannot build this model ({type(error).__name__}: {reason}); {FIX}"
    )


def bf16_layout(config: dict[str, Any]) -> dict[str, TensorSpec]:
    """Return on-disk name -> spec of each tensor of the BF16 model that `config` describes.

    Raise InputError if transformers cannot build the model.
    """
    known: Any = _known().get(shape_key(config))
    if known is None:
        return built(config)
    return {name: TensorSpec("BF16", tuple(shape)) for name, shape in known.items()}


def shape_key(config: dict[str, Any]) -> str:
    """Return 16 hex digits of a hash over all that names and shapes of a model's tensors depend on."""
    sizes = [[config[section][key] for key in keys] for section, keys in SHAPING.items()]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]


@cache
def _known() -> dict[str, dict[str, list[int]]]:
    return json.loads(KNOWN.read_text("utf-8"))


def built(config: dict[str, Any]) -> dict[str, TensorSpec]:
    """Return the `bf16_layout` of the model that transformers builds; InputError if it cannot."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return dict(_built(json.dumps(plain)))


@lru_cache(4)  # a build takes a quarter of a second or more; a run repeats some
def _built(config: str) -> dict[str, TensorSpec]:
    from quantize.checkpoints.from_transformers import DiffusionGemmaForBlockDiffusion

    configuration = model_config(json.loads(config))
    try:
        with torch.device("meta"):
            model = DiffusionGemmaForBlockDiffusion(configuration)
    except Exception as error:  # whatever transformers and torch make of a wrong value
        raise _refused_by_transformers(error) from error
    return {
        name: TensorSpec("BF16", tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if not DROPPED.fullmatch(name)
    }


def quantized_layout(config: dict[str, Any]) -> dict[str, TensorSpec]:
    """Return on-disk name -> spec of each tensor that `config` calls for, quantized or BF16.

    Raise InputError if the config has an unknown scheme, or matches no Linear or only part of a tensor.
    """
    schemes = stated_schemes(config)
    if schemes is None:
        return bf16_layout(config)
    layout: dict[str, TensorSpec] = {}
    plain = bf16_layout(config)
    for name, spec in plain.items():
        modules = linear_modules(name, spec.shape)
        by_module: dict[str, Scheme | None] = {m: schemes.of(m) for m in modules}
        if not any(by_module.values()):
            layout[name] = spec
            continue
        if None in by_module.values():
            raise InputError(f"quantization_config: only a part of {name} is quantized")
        out, inputs = linear_shape(spec.shape, modules)
        for module, scheme in by_module.items():
            if scheme is not None:
                tensors = specs(schemes.on_disk(scheme), out, inputs)
                layout |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
    if all(name in plain for name in layout):
        raise InputError("quantization_config: it matches no Linear of this model")
    return layout


def check_layout(checkpoint: Checkpoint) -> None:
    """Check that a checkpoint has the tensors that its config.json calls for.

    Tied copies in a BF16 checkpoint are compared with their originals (`ties`); scales of ModelOpt's
    KV cache are ignored. Raise InputError if the index's total_size is wrong, a tied copy differs, or a
    tensor is missing, unexpected, or of a wrong dtype or shape. The message names the first missing or
    unexpected tensor and counts all.
    """
    check_total_size(checkpoint)
    schemes, wanted = stated_schemes(checkpoint.config), quantized_layout(checkpoint.config)
    tensors = checkpoint.tensors
    if schemes is None:
        tensors = {name: info for name, info in tensors.items() if tied_to(name) not in wanted}
    elif schemes.passed_over is not None:
        tensors = {n: info for n, info in tensors.items() if not schemes.passed_over.fullmatch(n)}
    if adapter := sorted(filter(ADAPTER.search, tensors)):
        raise InputError(
            f"{tensors[adapter[0]].file}: tensor {adapter[0]!r} ({len(adapter)} in all) is an "
            f"adapter's; merge the adapter into the weights, and save the model again"
        )
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise InputError(
            f"{checkpoint.folder}: tensor {missing[0]!r} is missing ({len(missing)} in all); "
            f"{_remedy(missing, checkpoint.tensors)}"
        )
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise InputError(
            f"{tensors[extra[0]].file}: unexpected tensor {extra[0]!r} ({len(extra)} in all): "
            f"config.json calls for no such tensor; {FIX}"
        )
    for name, spec in wanted.items():
        info = tensors[name]
        row_scale = name.endswith(".weight_scale") and spec.dtype == "BF16"
        dtypes = (spec.dtype, "F32") if row_scale else (spec.dtype,)  # other tools write FP32
        if info.shape == spec.shape and info.dtype in dtypes:
            continue
        if info.shape == spec.shape and (info.dtype in WIDER and spec.dtype == "BF16"):
            raise InputError(
                f"{info.file}: tensor {name!r} is {info.dtype}; only BF16 weights are read: cast the "
                f"model to bfloat16, and save it again"
            )
        raise InputError(
            f"{info.file}: tensor {name!r} is {info.dtype} {list(info.shape)} and config.json "
            f"calls for {spec.dtype} {list(spec.shape)}; {FIX}"
        )
    check_ties(checkpoint, bf16_layout(checkpoint.config))


def _remedy(missing: Sequence[str], there: Collection[str]) -> str:
    """Return what to do about missing tensors, which may be `there` under another name."""
    if all(map(VISION.match, missing)):
        return "a text-only export? Export the whole model, vision tower too"
    if missing[0].removeprefix("model.") in there:
        return "they are there without `model.`: save the whole model, not its attribute `model`"
    if missing[0].replace("model.decoder.", "model.encoder.language_model.", 1) in there:
        return "it is there under the encoder's name: let transformers load the model and save it again"
    ours = {part for name in missing for part in name.split(".")}
    bare = {".".join(part for part in name.split(".") if part in ours): name for name in there}
    if bare.keys() >= set(missing):
        return f"it is there as {bare[missing[0]]!r}: save the model itself, not its wrapper"
    return FIX


def module_tensors(checkpoint: Checkpoint, module: str) -> list[str]:
    """Return the names of a quantized Linear's tensors in a checkpoint that passed `check_layout`."""
    names = (f"{module}.{suffix}" for suffix in SUFFIXES)
    return [name for name in names if name in checkpoint.tensors]


def parameters(config: dict[str, Any]) -> int:
    """Return the number of parameters of the model that a config.json describes."""
    return sum(math.prod(spec.shape) for spec in bf16_layout(config).values())


def stated_schemes(config: dict[str, Any]) -> "ConfigSchemes | ModelOptSchemes | None":
    """Return an object whose `of(module)` returns a Linear's scheme; None for a BF16 config.

    Raise InputError if the quantization is of a method or a scheme that this package does not read.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    modelopt = stated.get("quant_method") == "modelopt"
    return ModelOptSchemes(stated) if modelopt else ConfigSchemes(stated)


def check_mode(checkpoint: Checkpoint, activations: ActivationMode) -> None:
    """Raise InputError if the activation mode is `fp8` and the checkpoint has no NVFP4 weight."""
    schemes = stated_schemes(checkpoint.config)
    used = schemes.used if schemes else ()
    if why := refusal(activations, [scheme.kernel for scheme in used]):
        raise InputError(f"{checkpoint.folder}: {why}")


class ConfigSchemes:
    """Finds modules' schemes in a compressed-tensors config; `used` is the set of its schemes."""

    passed_over: re.Pattern[str] | None = None
    on_disk: Callable[[Scheme], OnDisk] = attrgetter("compressed")

    def __init__(self, quantization_config: dict[str, Any]) -> None:
        method = quantization_config.get("quant_method")
        if method != "compressed-tensors":
            raise InputError(
                f"quantization_config: quant_method is {method!r}, not 'compressed-tensors' or "
                f"'modelopt'; {SCHEME_FIX}"
            )
        self._ignored = named_by(quantization_config.get("ignore") or [])
        groups = quantization_config.get("config_groups") or {}
        if not groups:
            raise InputError(
                "quantization_config: it has no config_groups, so nothing is quantized"
            )
        self._schemes = {name: _group_scheme(name, group) for name, group in groups.items()}
        self._rules = {name: named_by(group["targets"]) for name, group in groups.items()}
        self.used = set(self._schemes.values())

    def of(self, module: str) -> Scheme | None:
        """Return the scheme of the Linear `module`, or None if it stays BF16."""
        name = self.group_of(module)
        return None if name is None else self._schemes[name]

    def group_of(self, module: str) -> str | None:
        """Return the name of the first config group that targets `module`; None if it stays BF16."""
        if self._ignored(module):
            return None
        return next((name for name, fits in self._rules.items() if fits(module)), None)


def _group_scheme(name: str, group: dict[str, Any]) -> Scheme:
    scheme = scheme_of_group(group)
    if scheme is None:
        weights = group.get("weights") or {}
        key = tuple(weights.get(field) for field in ("type", "num_bits", "strategy"))
        raise InputError(
            f"quantization_config: group {name!r} has weights of type, bits, strategy {key}, "
            f"which no known scheme has; {SCHEME_FIX}"
        )
    return scheme


def schemes_by_module(config: dict[str, Any]) -> dict[str, Scheme]:
    """Return on-disk module name -> scheme of every quantized Linear; {} for a BF16 config."""
    schemes = stated_schemes(config)
    if schemes is None:
        return {}
    return {
        module: scheme
        for name, spec in bf16_layout(config).items()
        for module in linear_modules(name, spec.shape)
        if (scheme := schemes.of(module)) is not None
    }
