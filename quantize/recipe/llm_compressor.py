"""Reads llm-compressor's recipe files with its own classes, and converts them to recipes of ours.

    quant_stage:
      quant_modifiers:
        QuantizationModifier:               # or GPTQModifier
          targets: [Linear]
          scheme: NVFP4                     # or config_groups
          ignore: [lm_head, "re:.*router.*", "re:.*self_conditioning.*", "re:.*vision.*"]

Such a file says what is quantized and how weights are rounded. Calibration, tasks and gate come from
the recipe that ships for the file's scheme. Limits on errors come from the scheme's record. A setting
that this project applies differently is refused by name. Written for llm-compressor 0.14, an extra:
it pins transformers 5.17 and compressed-tensors 0.19, so no other code of ours needs it.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from quantize.errors import InputError, ResourceError
from quantize.schemes.records import Scheme, scheme_of_group

MODIFIERS = ("QuantizationModifier", "GPTQModifier")
# llm-compressor's weight observers -> ours. A weight is constant and observed once, so running and
# static observers find the same ranges as memoryless ones.
OBSERVERS = {
    "minmax": "memoryless_minmax", "static_minmax": "memoryless_minmax",
    "memoryless_minmax": "memoryless_minmax", "mse": "memoryless_mse",
    "memoryless_mse": "memoryless_mse",
}  # fmt: skip
MAXIMUM = ("minmax", "static_minmax", None)  # observers of activations that record their maximum
DAMPING = 0.01  # share of the Hessian's mean diagonal, in llm-compressor's GPTQ and in ours


def is_llm_compressor(fields: Mapping[Any, Any]) -> bool:
    """Return whether a YAML mapping is an llm-compressor recipe: some key ends with `_stage`."""
    return any(str(key).endswith("_stage") for key in fields)


def quantization_of(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an llm-compressor recipe as our `quantization` section: field -> value.

    Raises:
        InputError: the recipe does not have exactly one of MODIFIERS, or a setting is refused here.
        ResourceError: llm-compressor is not installed.
    """
    name, arguments = _only_modifier(fields)
    modifier = _built(name, arguments)
    _check_gptq(modifier, arguments)  # resolving writes an order into every group
    config = modifier.resolve_quantization_config()
    if config.kv_cache_scheme is not None:
        raise InputError("kv_cache_scheme: keys and values stay BF16 here; remove it")
    schemes: dict[str, list[str]] = {}
    observers: set[str] = set()
    for group in config.config_groups.values():
        scheme = _scheme(group)
        schemes.setdefault(scheme.name, []).extend(_targets(group.targets))
        observers.add(_observer(name, group))
    if len(observers) != 1:
        raise InputError("observer: all groups must have the same weight observer here")
    return {
        "scheme": schemes,
        "ignore": list(config.ignore or []),
        "observer": observers.pop(),
        "rounding": "gptq" if name == "GPTQModifier" else "nearest",
    }


def _only_modifier(fields: Mapping[Any, Any]) -> tuple[str, dict[str, Any]]:
    listed: list[tuple[str, Any]] = []
    for stage, groups in fields.items():
        if not str(stage).endswith("_stage") or not isinstance(groups, dict):
            raise InputError(f"{stage}: not a stage with groups of modifiers")
        for group, modifiers in groups.items():
            if not str(group).endswith("_modifiers") or not isinstance(modifiers, dict):
                raise InputError(f"{stage}.{group}: not a group of modifiers")
            listed += modifiers.items()
    for name, _ in listed:
        if name not in MODIFIERS:
            raise InputError(f"{name}: only {' and '.join(MODIFIERS)} are run here; remove it")
    if len(listed) != 1:
        raise InputError(f"it has {len(listed)} modifiers; give exactly one")
    return listed[0][0], listed[0][1] or {}


def _built(name: str, arguments: dict[str, Any]) -> Any:
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    from pydantic import ValidationError

    try:
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier
    except ImportError as error:
        raise ResourceError(
            f"a recipe file of llm-compressor needs llmcompressor ({error}): "
            "pip install 'diffusiongemma-quantize[llmcompressor]'"
        ) from error
    kind: Any = {"GPTQModifier": GPTQModifier, "QuantizationModifier": QuantizationModifier}[name]
    try:
        return kind(**arguments)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *map(str, first["loc"])])
        raise InputError(f"{key}: llm-compressor says: {first['msg']}") from error


def _check_gptq(modifier: Any, arguments: Mapping[str, Any]) -> None:
    """Raise InputError for any order of inputs, or any damping but ours: both are fixed here."""
    groups = (modifier.config_groups or {}).values()
    orders = [group.weights.actorder for group in groups if group.weights is not None]
    if any(order is not None for order in (arguments.get("actorder"), *orders)):
        raise InputError("actorder: inputs are rounded in the order on disk; remove it")
    if arguments.get("dampening_frac", DAMPING) != DAMPING:
        raise InputError(f"dampening_frac: it is {DAMPING} here; remove it")


def _scheme(group: Any) -> Scheme:
    stated = group.model_dump(mode="json")
    if stated.get("output_activations") is not None:
        raise InputError("output_activations: outputs stay BF16 here; remove them")
    scheme = scheme_of_group(stated)
    weights = stated.get("weights") or {}
    if scheme is None or not weights.get("symmetric", True):
        kind = [weights.get(key) for key in ("type", "num_bits", "strategy", "group_size")]
        raise InputError(f"scheme: weights of {kind} are not written here")
    return scheme


def _targets(targets: list[str]) -> list[str]:
    for target in targets:
        if re.fullmatch(r"[A-Z]\w*", target) and target != "Linear":
            raise InputError(f"targets: of module classes only Linear, not {target!r}")
    return list(targets)


def _observer(modifier: str, group: Any) -> str:
    """Return our name of the weights' observer; InputError: activations need a maximum."""
    activations = group.input_activations
    if any(part is not None and part.observer_kwargs for part in (group.weights, activations)):
        raise InputError("observer_kwargs: observers have no settings here; remove them")
    if activations is not None and activations.observer not in MAXIMUM:
        raise InputError(f"input_observer: {activations.observer}: calibration records maxima here")
    name = group.weights.observer or "memoryless_minmax"
    if name not in OBSERVERS:
        raise InputError(f"weight_observer: no {name!r} here, only {', '.join(OBSERVERS)}")
    if modifier == "GPTQModifier" and OBSERVERS[name] != "memoryless_minmax":
        raise InputError(f"weight_observer: GPTQ chooses scales itself, not by {name}; remove it")
    return OBSERVERS[name]
