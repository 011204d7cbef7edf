"""Decides which scheme each tensor of a DiffusionGemma gets, and why other tensors stay BF16.

On disk the BF16 model has one set of text weights, under `model.decoder.*`; the 128 experts of a layer
are fused into two 3-D tensors. Under `model.encoder.*` are the vision tower and the encoder's
`layer_scalar`s. The encoder's other text weights are tied to the decoder's, and `lm_head` is tied to
the embedding. A name that neither CLASSES nor DROPPED matches is an error: the model has changed.

A recipe is refused if it would quantize a tensor that vLLM reads only in BF16: vLLM builds the router
and self-conditioning without a quantization config, and its embedding takes neither FP8 nor NVFP4.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from quantize.checkpoints.reader import TensorInfo, TensorSpec
from quantize.errors import InputError
from quantize.recipe.sections import Quantization
from quantize.schemes.records import SCHEMES, OnDisk, Scheme

DECODER_LAYER = r"model\.decoder\.layers\.\d+\."

# (class, pattern of the on-disk tensor name); the first match counts.
CLASSES: tuple[tuple[str, str], ...] = (
    ("experts", DECODER_LAYER + r"experts\.(gate_up|down)_proj"),
    ("attention", DECODER_LAYER + r"self_attn\.[qkvo]_proj\.weight"),
    ("mlp", DECODER_LAYER + r"mlp\.(gate|up|down)_proj\.weight"),
    ("router", DECODER_LAYER + r"router\.(proj\.weight|scale|per_expert_scale)"),
    ("norm", DECODER_LAYER + r"(self_attn\.[qk]_norm|\w+_layernorm(_\d)?)\.weight"),
    ("norm", r"model\.decoder\.norm\.weight"),
    ("layer_scalar", r"model\.(decoder|encoder\.language_model)\.layers\.\d+\.layer_scalar"),
    ("self_conditioning", r"model\.decoder\.self_conditioning\..+"),
    ("embedding", r"model\.decoder\.embed_tokens\.weight"),
    ("vision", r"model\.encoder\.(vision_tower|embed_vision)\..+"),
)
DROPPED = re.compile(r"lm_head\.weight|model\.encoder\.language_model\.(?!.*layer_scalar$).+")

WHY_KEPT = {
    "router": "routing decides which experts run; vLLM reads it in BF16",
    "self_conditioning": "vLLM reads it in BF16",
    "embedding": "tied with lm_head, which the sampler's logits come from",
    "vision": "text quantization only",
    "norm": "not a Linear",
    "layer_scalar": "not a Linear",
}
# Classes that servers build without a quantization config, each with its pattern for `ignore`.
KEPT_LINEARS = {
    "router": "re:.*router.*",
    "self_conditioning": "re:.*self_conditioning.*",
    "embedding": "re:.*embed_tokens.*",
    "vision": "re:.*vision.*",
}
OPTIONAL = "optional:"  # prefix of an entry of `ignore` that may match nothing
QUANTIZABLE = ("experts", "attention", "mlp")
Chosen = Callable[[str], str | None]  # module -> the name of its scheme

# Linears that servers fuse into one matrix with one global scale.
FUSED = re.compile(r"(.*\.self_attn)\.[qkv]_proj|(.*\.(?:mlp|experts\.\d+))\.(?:gate|up)_proj")


@dataclass(frozen=True)
class Target:
    """One source tensor, and what it becomes."""

    name: str  # on-disk name in the source checkpoint
    module_class: str  # a key of `WHY_KEPT` or a member of `QUANTIZABLE`
    scheme: Scheme | None  # the scheme, or None when the tensor is copied as it is
    reason: str  # why the tensor stays BF16; "" if it is quantized
    shape: tuple[int, ...]  # [out, in]; fused experts [experts, out, in]
    modules: tuple[str, ...]  # on-disk names of the quantized Linears that the tensor becomes
    bytes_before: int  # bytes in the source
    bytes_after: int  # bytes in the artifact, scales included


def module_class(name: str) -> str:
    """Return the class of an on-disk tensor by its name: "experts", "attention" or another of CLASSES.

    Raise InputError if DiffusionGemma has no tensor of that name.
    """
    for kind, pattern in CLASSES:
        if re.fullmatch(pattern, name):
            return kind
    raise InputError(f"unknown tensor {name!r}: not a DiffusionGemma checkpoint this tool knows")


def linear_modules(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the Linear modules that an on-disk tensor holds, () for none.

    Fused tensors of experts are [E, 2I, H] (two Linears per expert: gate, up) or [E, H, I] (down).
    """
    fused = re.fullmatch(rf"({DECODER_LAYER}experts)\.(gate_up|down)_proj", name)
    if fused:
        parts = ("gate_proj", "up_proj") if fused[2] == "gate_up" else ("down_proj",)
        return tuple(f"{fused[1]}.{e}.{part}" for e in range(shape[0]) for part in parts)
    is_linear = name.endswith(".weight") and len(shape) == 2 and "embed_tokens" not in name
    return (name.removesuffix(".weight"),) if is_linear else ()


def plan_targets(tensors: Mapping[str, TensorInfo], quantization: Quantization) -> list[Target]:
    """Return a `Target` for each tensor of a BF16 checkpoint under a recipe; tied copies are left out.

    Raise InputError if a tensor is unknown; if two schemes match a module; if a tensor's experts get
    different schemes; if a scheme matches a tensor that must stay BF16 or does not fit the scheme; or
    if a scheme, or an entry of `targets` or `ignore` without `optional:`, matches nothing.
    """
    kept = [info for name, info in tensors.items() if not DROPPED.fullmatch(name)]
    chosen = _chosen_by(quantization)
    targets = [_target(info, chosen) for info in kept]
    _check_kinds(targets)
    for info, target in zip(kept, targets, strict=True):
        if target.scheme is not None:
            _check_allowed(info, target.scheme)
    _check_patterns(targets, quantization)
    for name in quantization.targets_by_scheme():
        if not any(target.scheme is SCHEMES[name] for target in targets):
            raise InputError(f"the recipe's scheme {name} matches no module of this model")
    return targets


def _check_patterns(targets: list[Target], quantization: Quantization) -> None:
    """Refuse an entry of the recipe that matches no module: it may be misspelt."""
    names = ["lm_head"]
    for target in targets:
        modules = linear_modules(target.name, target.shape)
        names += [target.name.removesuffix(".weight"), *modules]
    entries = [("ignore", entry) for entry in quantization.ignore if not entry.startswith(OPTIONAL)]
    for patterns in quantization.targets_by_scheme().values():
        entries += [("targets", entry) for entry in patterns if entry != "Linear"]
    for key, entry in entries:
        if not any(map(named_by([entry]), names)):
            raise InputError(
                f"quantization.{key}: {entry!r} matches no module of this model; mend it, remove it, "
                f"or in ignore write '{OPTIONAL}{entry}'"
            )


def _check_kinds(targets: Sequence[Target]) -> None:
    """Refuse a recipe that would quantize what must stay BF16, and say what `ignore` lacks."""
    kinds: dict[str, str] = {}
    for target in targets:
        if target.scheme is not None and target.module_class not in QUANTIZABLE:
            kinds.setdefault(target.module_class, target.name)
    if kinds:
        what = "; ".join(f"{name} ({kind}: {WHY_KEPT[kind]})" for kind, name in kinds.items())
        add = ", ".join(f'"{KEPT_LINEARS[kind]}"' for kind in kinds)
        raise InputError(f"the recipe would quantize {what}; add to quantization.ignore: {add}")


def _target(info: TensorInfo, chosen: Chosen) -> Target:
    try:
        kind = module_class(info.name)
    except InputError as error:
        raise InputError(f"{info.file}: {error}") from error
    modules = linear_modules(info.name, info.shape)
    scheme = _scheme(info.name, modules, chosen)
    if scheme is None:
        reason = WHY_KEPT.get(kind, "ignored by the recipe")
        return Target(info.name, kind, None, reason, info.shape, (), info.nbytes, info.nbytes)
    after = len(modules) * layout_bytes(scheme.compressed, *linear_shape(info.shape, modules))
    return Target(info.name, kind, scheme, "", info.shape, modules, info.nbytes, after)


def linear_shape(shape: tuple[int, ...], modules: tuple[str, ...]) -> tuple[int, int]:
    """Return the shape (out, in) of one Linear, if a tensor of `shape` holds the Linears `modules`."""
    if len(shape) == 2:
        return shape[0], shape[1]
    experts, rows, columns = shape
    return rows * experts // len(modules), columns


def fused_units(targets: Sequence[Target]) -> list[list[Target]]:
    """Return `targets`, in order, grouped by the matrix that servers make of them (`fused_with`)."""
    units: dict[str, list[Target]] = {}
    for target in targets:
        units.setdefault(fused_with(target.name.removesuffix(".weight")), []).append(target)
    return list(units.values())


def fused_with(module: str) -> str:
    """Return the key that Linears fused by servers have in common; for any other module, its name."""
    match = FUSED.fullmatch(module)
    return match[1] or match[2] if match else module


def _scheme(name: str, modules: tuple[str, ...], chosen: Chosen) -> Scheme | None:
    schemes = set(map(chosen, modules))
    if len(schemes) > 1:
        raise InputError(
            f"{name}: the recipe gives its experts different schemes "
            f"({', '.join(sorted(map(str, schemes)))}); vLLM reads one scheme a layer"
        )
    only = schemes.pop() if schemes else None
    return SCHEMES[only] if only else None


def _chosen_by(quantization: Quantization) -> Chosen:
    ignored = named_by([entry.removeprefix(OPTIONAL) for entry in quantization.ignore])
    rules = {
        name: named_by(patterns) for name, patterns in quantization.targets_by_scheme().items()
    }

    def chosen(module: str) -> str | None:
        if ignored(module):
            return None
        names = [name for name, named in rules.items() if named(module)]
        if len(names) > 1:
            raise InputError(
                f"{module}: matched by two schemes of the recipe, {' and '.join(names)}"
            )
        return names[0] if names else None

    return chosen


def named_by(entries: Sequence[str]) -> Callable[[str], bool]:
    """Return a function: name of a Linear -> whether one of `entries` names this Linear.

    Entries are as in compressed-tensors: `Linear` names every Linear, `re:PATTERN` every Linear whose
    name begins with a match of the pattern. Any other entry is the exact name of a module.
    """
    exact = {entry for entry in entries if not entry.startswith("re:")}
    if "Linear" in exact:
        return lambda _: True
    patterns = [re.compile(entry[3:]).match for entry in entries if entry.startswith("re:")]
    return lambda module: module in exact or any(match(module) for match in patterns)


def _check_allowed(info: TensorInfo, scheme: Scheme) -> None:
    if info.dtype != "BF16":
        raise InputError(
            f"{info.file}: {info.name} is {info.dtype}; only BF16 weights are quantized"
        )
    if info.shape[-1] % scheme.group_size:
        raise InputError(
            f"{info.file}: {info.name} has {info.shape[-1]} inputs, not a multiple of "
            f"{scheme.group_size} as {scheme} needs"
        )


@cache
def specs(layout: OnDisk, out: int, inputs: int) -> Mapping[str, TensorSpec]:
    """Return suffix -> spec of the tensors of a Linear [out, inputs] in `layout`, in writing order."""
    return {suffix: TensorSpec(*spec) for suffix, spec in layout.tensors(out, inputs).items()}


def layout_bytes(layout: OnDisk, out: int, inputs: int) -> int:
    """Return the bytes that codes and scales of one Linear [out, inputs] take in `layout`."""
    return sum(spec.nbytes for spec in specs(layout, out, inputs).values())


def sum_bytes(targets: Sequence[Target]) -> tuple[int, int]:
    """Return a pair: the bytes of all tensors of a plan before and after quantization."""
    return sum(t.bytes_before for t in targets), sum(t.bytes_after for t in targets)


def ignore_for_config(targets: list[Target]) -> list[str]:
    """Return the `ignore` list of quantization_config, which names every Linear that stays BF16.

    vLLM and compressed-tensors quantize each Linear that `ignore` does not name. So the list also names
    the tied lm_head and the encoder's Linears. Its patterns match on-disk names.
    """
    ignore = ["lm_head", *KEPT_LINEARS.values()]
    for target in targets:
        if target.scheme is None and target.module_class in QUANTIZABLE:
            ignore += linear_modules(target.name, target.shape)
    return ignore
