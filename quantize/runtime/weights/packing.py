"""Packs modules of a checkpoint into the matrices that the kernels multiply with, on their device.

Bytes are copied as they are on disk (`transfer`) and rearranged on the device. q/k/v become one matrix,
and so do gate/up. Gate and up rows of experts are interleaved. On Hopper, NVFP4 gets the tensor cores'
fragment layout (`fused_dequant.weights`). ModelOpt's names and scales lead to the same weights.
What is BF16 on disk stays BF16. NVFP4 is packed for FP8 products in the activation mode `fp8`, and for
FP4 units in `per_layer` on a GPU with such units. The same code packs resident and streamed layers.
When a tensor is first read, it is checked: all values must be finite, scales of whole tensors above 0,
scales of blocks not negative. Input scales are not read here, but by `inputs.read_scales`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fused_dequant import Weight, formats, weights
from torch import Tensor

from quantize.checkpoints.layout import module_tensors, stated_schemes
from quantize.checkpoints.reader import FIX, Checkpoint
from quantize.errors import InputError
from quantize.runtime.gpu.transfer import Fetched, Layout, Transfer
from quantize.schemes.records import GLOBAL_SCALES, TENSOR_SCALES, Scheme
from quantize.schemes.rounding import all_finite, sound_scales

NORMS = {
    "input": "input_layernorm",
    "post_attention": "post_attention_layernorm",
    "dense": "pre_feedforward_layernorm",
    "experts": "pre_feedforward_layernorm_2",
    "post_dense": "post_feedforward_layernorm_1",
    "post_experts": "post_feedforward_layernorm_2",
    "post": "post_feedforward_layernorm",
}
Rows = tuple[Weight, ...]  # one matrix, or several if their schemes or scales differ
# How a product reads its input: the scheme that quantizes it, and for NVFP4 the global scale f32 [1].
Read = tuple[str, Tensor | None]
Entrance = tuple[Tensor, Read]  # a layer's input norm, and how the normed input is read
# Kind of product -> global scales f32 [1], or [E] for experts; inputs of other kinds are not rounded.
Scales = Mapping[str, Tensor]
BF16: Read = ("bf16", None)
Keep = Callable[[Weight], Weight]  # called with each packed weight; returns it in its final memory


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights. Tensors are bf16, the two scalars of shape [1]; `norms` has NORMS' keys."""

    sliding: bool
    norms: dict[str, Tensor]
    qkv: Rows
    q_norm: Tensor
    k_norm: Tensor
    o: Weight
    gate_up: Rows
    down: Weight
    router: Tensor
    router_scale: Tensor
    per_expert_scale: Tensor
    experts_gate_up: Weight
    experts_down: Weight
    encoder_scalar: Tensor
    decoder_scalar: Tensor

    @property
    def products(self) -> Rows:
        """The matrices of Linears and experts, which hold nearly all of a layer's bytes."""
        dense = (*self.qkv, self.o, *self.gate_up, self.down)
        return (*dense, self.experts_gate_up, self.experts_down)

    @property
    def entrance(self) -> Entrance:
        """The input norm's weight, and how the normed input is quantized.

        The preceding layer applies both. Both stay on the device even if this layer is streamed.
        """
        scheme, shared = how_read(self.qkv)
        return self.norms["input"], (scheme, None if shared is None else shared.clone())


def how_read(rows: Rows) -> Read:
    """Return how the input of `rows` is quantized; BF16 if it is not, or if `rows` differ in scheme."""
    schemes = {weight.scheme for weight in rows}
    if len(schemes) > 1 or not schemes <= {*formats.EIGHT_BIT, formats.FOUR_BIT}:
        return BF16
    return rows[0].scheme, rows[0].shared


class Packer:
    """Reads a checkpoint's modules onto one device; the caller has checked the checkpoint's layout.

    `text` is transformers' configuration of the text stack. With `in_fp8`, NVFP4 weights are packed for
    FP8 products (activation mode `fp8`). If `scales` is not empty, NVFP4 weights are packed for FP4
    units under these global input scales, one mapping per layer.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        transfer: Transfer,
        text: Any,
        *,
        in_fp8: bool = False,
        scales: Sequence[Scales] = (),
    ) -> None:
        self.scales = scales
        self.checkpoint, self.transfer, self.text, self.in_fp8 = checkpoint, transfer, text, in_fp8
        self.schemes = stated_schemes(checkpoint.config)
        self._checked: set[str] = set()
        self._joinable: dict[str, bool] = {}
        self._layouts: dict[str, Layout] = {}
        self._named: dict[str, list[str]] = {}

    def plain(self, name: str) -> Tensor:
        """Return one tensor as it is on disk; raise InputError if a value is not finite."""
        return self._check(name, self._fetch([name]).tensor(name))

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a Linear, or None for BF16."""
        return self.schemes.of(module) if self.schemes else None

    def rows(self, modules: Sequence[str], shared: Tensor | None = None) -> Rows:
        """Return one matrix of Linears that share an input; one per Linear if schemes or scales differ.

        `shared` is the input's global scale f32 [1] for products on FP4 units, else None.
        """
        fetched = self._fetch([name for module in modules for name in self._names(module)])
        parts = [self._linear(fetched, module) for module in modules]
        key = modules[0]
        if key not in self._joinable:  # once per module: comparing waits for the device
            schemes = {self.scheme(module) for module in modules}
            self._joinable[key] = len(schemes) == 1 and _joinable(parts)
        groups = [parts] if self._joinable[key] else [[part] for part in parts]
        return tuple(
            _weight(group, self.scheme(m), self.in_fp8, shared)
            for group, m in zip(groups, modules, strict=False)
        )

    def small(self, index: int) -> dict[str, Any]:
        """Read a layer's norms, router and scalars; return them by field of `LayerWeights`."""
        layer = f"model.decoder.layers.{index}."
        attention, router = f"{layer}self_attn.", f"{layer}router."
        return {
            "sliding": self._is_sliding(index),
            "norms": {key: self.plain(f"{layer}{name}.weight") for key, name in NORMS.items()},
            "q_norm": self.plain(f"{attention}q_norm.weight"),
            "k_norm": self.plain(f"{attention}k_norm.weight"),
            "router": self.plain(f"{router}proj.weight"),
            "router_scale": self.plain(f"{router}scale"),
            "per_expert_scale": self.plain(f"{router}per_expert_scale"),
            "encoder_scalar": self.plain(
                f"model.encoder.language_model.layers.{index}.layer_scalar"
            ),
            "decoder_scalar": self.plain(f"{layer}layer_scalar"),
        }

    def products(self, index: int, keep: Keep) -> dict[str, Any]:
        """Read a layer's matrices; return the result of `keep` for each, by field of `LayerWeights`."""
        layer = f"model.decoder.layers.{index}."
        attention = f"{layer}self_attn."
        heads = ["q_proj", "k_proj", "v_proj"][: 3 if self._is_sliding(index) else 2]
        scales = self.scales[index] if self.scales else {}
        gate_up, down = self._experts(f"{layer}experts", keep, scales)

        def rows(kind: str, *modules: str) -> Rows:
            return tuple(keep(weight) for weight in self.rows(modules, scales.get(kind)))

        return {
            "qkv": rows("qkv", *(attention + head for head in heads)),
            "o": rows("o", f"{attention}o_proj")[0],
            "gate_up": rows("gate_up", f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
            "down": rows("down", f"{layer}mlp.down_proj")[0],
            "experts_gate_up": gate_up,
            "experts_down": down,
        }

    def _is_sliding(self, index: int) -> bool:
        return self.text.layer_types[index] == "sliding_attention"

    def _experts(self, prefix: str, keep: Keep, scales: Scales) -> tuple[Weight, Weight]:
        """Read the experts of one layer: gate_up interleaved, and down."""
        scheme = self.scheme(f"{prefix}.0.gate_proj")
        if scheme is None:
            gate, up = self.plain(f"{prefix}.gate_up_proj").chunk(2, 1)
            both = keep(weights.bf16(_interleaved(gate, up)))
            del gate, up  # their buffer is as large as all that follows
            return both, keep(weights.bf16(self.plain(f"{prefix}.down_proj")))
        projections = ("gate_proj", "up_proj", "down_proj")
        experts = range(self.text.num_experts)
        modules = {p: [f"{prefix}.{e}.{p}" for e in experts] for p in projections}
        names = [
            n for names_of in modules.values() for module in names_of for n in self._names(module)
        ]
        fetched = self._fetch(names)
        gate, up, down = (self._stacked(fetched, names_of) for names_of in modules.values())
        del fetched
        both = {
            suffix: torch.cat([gate[suffix], up[suffix]], 1)
            if suffix in GLOBAL_SCALES
            else _interleaved(gate[suffix], up[suffix])
            for suffix in gate
        }
        del gate, up
        packed = (
            keep(_weight([part], scheme, self.in_fp8, scales.get(kind)))
            for part, kind in ((both, "experts_gate_up"), (down, "experts_down"))
        )
        return next(packed), next(packed)

    def _fetch(self, names: Sequence[str]) -> Fetched:
        """Fetch tensors; calls with the same first name must give the same names."""
        if names[0] not in self._layouts:
            infos = [self.checkpoint.tensors[name] for name in names]
            self._layouts[names[0]] = Layout.of(infos)
        return self.transfer.fetch(self._layouts[names[0]])

    def _linear(self, fetched: Fetched, module: str) -> dict[str, Tensor]:
        packed = {
            name.removeprefix(f"{module}."): self._check(name, fetched.tensor(name))
            for name in self._names(module)
        }
        return _as_kernels_read(packed, 2)

    def _names(self, module: str) -> list[str]:
        if module not in self._named:
            names = module_tensors(self.checkpoint, module)
            self._named[module] = [n for n in names if not n.startswith(f"{module}.input_")]
        return self._named[module]

    def _stacked(self, fetched: Fetched, modules: Sequence[str]) -> dict[str, Tensor]:
        """Stack the same Linear of every expert: suffix -> [E, ...]."""
        stacked: dict[str, Tensor] = {}
        for first in self._names(modules[0]):
            suffix = first.removeprefix(f"{modules[0]}.")
            tensor = fetched.stacked([f"{module}.{suffix}" for module in modules])
            stacked[suffix] = self._check(first, tensor)
        return _as_kernels_read(stacked, 3)

    def _check(self, name: str, tensor: Tensor) -> Tensor:
        """Check a tensor when it is first read, and only then: the check waits for the device."""
        if name in self._checked:
            return tensor
        sound = sound_scales if name.endswith(".weight_scale") else all_finite
        bad = not sound(tensor)
        if name.endswith(TENSOR_SCALES):
            bad = bad or not bool((tensor > 0).all())
        if bad:
            raise InputError(
                f"{self.checkpoint.tensors[name].file}: {name!r}, or the same tensor of another "
                f"expert, holds NaN, infinity or a scale that is not above 0; {FIX}"
            )
        self._checked.add(name)
        return tensor


def _as_kernels_read(tensors: dict[str, Tensor], dims: int) -> dict[str, Tensor]:
    """Reshape ModelOpt's scales of whole matrices to [..., 1], and for FP8 to one scale per row."""
    shaped = dict(tensors)
    if "weight_scale_2" in tensors:
        shaped["weight_packed"] = shaped.pop("weight")
        shaped["weight_scale_2"] = tensors["weight_scale_2"].unsqueeze(-1)
    elif "weight_scale" in tensors and tensors["weight_scale"].dim() < dims:
        rows = tensors["weight"].shape[:-1]
        shaped["weight_scale"] = tensors["weight_scale"][..., None, None].expand(*rows, 1)
    return shaped


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave rows, as words of 8 bytes if they are whole words, since bytes take longer."""
    whole = gate.shape[-1] * gate.element_size() % 8 == 0
    pair = (t.view(torch.int64 if whole else torch.uint8) for t in (gate, up))
    return formats.interleave_gate_up(*pair).view(gate.dtype)


def _joinable(parts: Sequence[dict[str, Tensor]]) -> bool:
    """Whether rows of several Linears may form one matrix: NVFP4 rows must share a global scale."""
    scales = [part[name] for part in parts for name in GLOBAL_SCALES if name in part]
    return all(torch.equal(scale, scales[0]) for scale in scales)


def _weight(
    parts: Sequence[dict[str, Tensor]], scheme: Scheme | None, in_fp8: bool, shared: Tensor | None
) -> Weight:
    """Build the kernels' weight from the rows of one or several Linears, or of stacked experts."""

    def rows(suffix: str) -> Tensor:
        tensors = [part[suffix] for part in parts]
        if len(tensors) == 1:
            return tensors[0]
        if tensors[0].element_size() == 1:
            return torch.cat([t.view(torch.uint8) for t in tensors], -2).view(tensors[0].dtype)
        return torch.cat(tensors, -2)

    if scheme is None:
        return weights.build("bf16", rows("weight"))
    codes = rows("weight_packed" if "weight_packed" in parts[0] else "weight")
    factor = None
    if "weight_scale_2" in parts[0]:
        factor = 128 * parts[0]["weight_scale_2"]
    elif "weight_global_scale" in parts[0]:
        factor = 128 / parts[0]["weight_global_scale"]
    shared_scale = shared if scheme.calibrated else None
    scale = rows("weight_scale")
    return weights.build(scheme.kernel, codes, scale, factor, in_fp8=in_fp8, shared=shared_scale)
