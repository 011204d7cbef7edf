"""Plans the GGUF tensors that llama.cpp's `diffusion-gemma` reads, and packs each one's bytes.

The `gguf` package has llama.cpp's names for Gemma 4; the table OWN has the other names.
`ffn_gate_inp.scale` is the router's scale, `ffn_down_exps.scale` the router's scale per expert. The
prefix `enc_` marks the encoder's layer scalars. A BF16 matrix stays BF16, bit for bit, or becomes
Q8_0. Vectors and the router become F32, exactly, as llama.cpp wants.

An NVFP4 Linear becomes two tensors. `.weight` holds its codes and its scales of groups of 16 inputs.
`.scale`, F32 [1] or [experts], holds 1 / weight_global_scale. llama.cpp multiplies the product by it.
Experts in NVFP4 become three such pairs (gate, up, down), since llama.cpp fuses gate and up only if
they have no scale. `ffn_down_exps.scale` then holds one float32 number per expert: its down matrix's
1 / weight_global_scale, times its router's scale.

`rope_freqs` divides the angles of full-attention layers: 1 where they rotate, 1e30 where they do not.
A GGUF block of NVFP4 holds four groups of 16 values: 4 scales in e4m3, read without their sign, and
4 x 8 bytes of codes. Byte j of a group has the codes of values j (low nibble) and j + 8. In a
checkpoint, byte j has the codes of values 2 j and 2 j + 1. The `gguf` package can read such blocks
(tests use this), but cannot write them.

llama.cpp takes text only, so the vision tower is left out. The calibrated input scales are left out
too, since llama.cpp reads but does not use them. The embedding is also the output matrix.

Source: src/models/diffusion-gemma.cpp of unslothai/llama.cpp at c3fb9724, read for names and shapes.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import gguf
import torch

from quantize.checkpoints.layout import bf16_layout, model_config, schemes_by_module
from quantize.checkpoints.load import read_finite
from quantize.checkpoints.reader import FIX, Checkpoint
from quantize.checkpoints.shards import Task
from quantize.checkpoints.targets import linear_modules, linear_shape
from quantize.errors import InputError
from quantize.schemes.records import Scheme
from quantize.schemes.rounding import E2M1_GROUPS, GROUP, all_finite

KeptAs = Literal["BF16", "Q8_0"]
GGMLType = Literal["F32", "BF16", "Q8_0", "NVFP4"]
ALIGNMENT = 32  # bytes; every tensor begins at a multiple, GGUF's default
TASK_BYTES = 1 << 22  # source bytes read at once, as in convert
LARGEST_Q8_0 = 127 * 65504.0  # for larger values the F16 scale of a block is infinite
NO_ROTATION = 1e30

NAME = re.compile(
    r"model\.(decoder|encoder\.language_model)\.(?:layers\.(\d+)\.)?(.+?)(?:\.weight)?"
)
OF_GEMMA = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, n_blocks=1)
OWN = {  # names of tensors that llama.cpp's Gemma 4 does not have
    "self_conditioning.pre_norm": "self_cond_pre_norm",
    "self_conditioning.gate_proj": "self_cond_gate",
    "self_conditioning.up_proj": "self_cond_up",
    "self_conditioning.down_proj": "self_cond_down",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
ROUTER_SCALE, FIRST_DOWN = "router.per_expert_scale", "experts.0.down_proj"


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor [..., out, in] of the file, under llama.cpp's name, in blocks of GGML's `type`."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    tasks: tuple[Task, ...]  # each returns the next bytes, uint8 [n]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor's blocks take in the file, without padding."""
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return math.prod(self.shape) // values * size


def _gguf_name(name: str) -> str | None:
    """Return the GGUF name of a tensor of the BF16 layout, or None for the vision tower's."""
    if name.startswith(("model.encoder.vision_tower.", "model.encoder.embed_vision.")):
        return None
    tree, layer, plain = match.groups() if (match := NAME.fullmatch(name)) else ("", None, name)
    here = "model.layers.0." if layer else "model."
    known = OWN.get(plain) or (OF_GEMMA.get_name(here + plain) or "").removeprefix("blk.0.")
    if not known or (layer is None and tree != "decoder"):
        raise InputError(f"{name}: llama.cpp's diffusion-gemma has no such tensor")
    place = f"blk.{layer}." if layer else ""
    encoder = "" if tree == "decoder" else "enc_"
    return f"{place}{encoder}{known}{'' if '.' in known else '.weight'}"


def plan_tensors(source: Checkpoint, kept_as: KeptAs) -> list[GGUFTensor]:
    """Return the tensors of the file in writing order, without reading any weights.

    The caller has checked the layout of `source`. BF16 matrices become `kept_as`, routers F32.
    Raise InputError if GGUF cannot hold a scheme or a width, or llama.cpp has no name for a tensor.
    """
    schemes = schemes_by_module(source.config)
    if refused := [(m, scheme) for m, scheme in schemes.items() if scheme.codes is not E2M1_GROUPS]:
        module, scheme = refused[0]
        raise InputError(
            f"{source.folder}: {module} is {scheme} ({len(refused)} Linears in all), which GGUF cannot "
            f"hold: it has BF16, Q8_0 and NVFP4; export the BF16 model with --type q8_0, or quantize "
            f"it with the recipe nvfp4 or nvfp4a16"
        )
    return list(_Planner(source, kept_as, schemes).tensors())


@dataclass(frozen=True)
class _Planner:
    source: Checkpoint
    kept_as: KeptAs
    schemes: dict[str, Scheme]

    def tensors(self) -> Iterator[GGUFTensor]:
        yield self._rope_freqs()
        for name, spec in bf16_layout(self.source.config).items():
            target = _gguf_name(name)
            modules = [m for m in linear_modules(name, spec.shape) if m in self.schemes]
            if target is None:
                continue
            if len(spec.shape) == 3 and modules:
                yield from self._experts(target, spec.shape, modules)
            elif modules:
                yield from self._linears(target, spec.shape, modules)
            elif name.replace(ROUTER_SCALE, FIRST_DOWN) not in self.schemes:  # else `_read_scales`
                yield self._kept(name, target, spec.shape)

    def _rope_freqs(self) -> GGUFTensor:
        text = model_config(self.source.config).text_config
        full = text.layer_types.index("full_attention")
        norm = self.source.tensors[f"model.decoder.layers.{full}.self_attn.q_norm.weight"]
        half = norm.shape[0] // 2
        factor = text.rope_parameters["full_attention"]["partial_rotary_factor"]
        values = torch.full((half,), NO_ROTATION)
        values[: int(half * factor)] = 1.0
        return GGUFTensor("rope_freqs.weight", "F32", (half,), (lambda: values.view(torch.uint8),))

    def _kept(self, name: str, target: str, shape: tuple[int, ...]) -> GGUFTensor:
        exact = len(shape) == 1 or target.endswith("ffn_gate_inp.weight")
        kind: GGMLType = "F32" if exact else self.kept_as
        _check_width(name, shape, kind)
        runs = _runs(shape[0], self.source.tensors[name].nbytes)
        tasks = tuple(partial(self._read_kept, name, kind, *run) for run in runs)
        return GGUFTensor(target, kind, shape, tasks)

    def _read_kept(self, name: str, kind: GGMLType, start: int, stop: int) -> torch.Tensor:
        rows, info = self.source.read_rows(name, start, stop), self.source.tensors[name]
        if not all_finite(rows):
            raise InputError(f"{info.file}: tensor {name!r} holds NaN or infinity; {FIX}")
        if kind != "Q8_0":
            return (rows.float() if kind == "F32" else rows).flatten().view(torch.uint8)
        if float(rows.abs().amax()) > LARGEST_Q8_0:
            raise InputError(f"{info.file}: tensor {name!r} is too large for Q8_0; use --type bf16")
        made = gguf.quants.quantize(rows.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        return torch.from_numpy(made).flatten()

    def _linears(
        self, target: str, shape: tuple[int, ...], modules: Sequence[str]
    ) -> Iterator[GGUFTensor]:
        """Yield a weight tensor and a scale tensor for Linears that are adjacent in one tensor."""
        _check_width(modules[0], shape, "NVFP4")
        code_bytes = math.prod(shape) // len(modules) // 2  # bytes of codes
        runs = _runs(len(modules), code_bytes * len(modules))
        tasks = tuple(partial(self._read_blocks, modules[start:stop]) for start, stop in runs)
        yield GGUFTensor(target, "NVFP4", shape, tasks)
        scale = target.removesuffix("weight") + "scale"
        yield GGUFTensor(scale, "F32", (len(modules),), (partial(self._read_scales, modules),))

    def _experts(
        self, target: str, shape: tuple[int, ...], modules: Sequence[str]
    ) -> Iterator[GGUFTensor]:
        """Yield the tensors of gate and up, or of down, for all experts of a layer."""
        per_expert = len(modules) // shape[0]
        separate = (shape[0], *linear_shape(shape, tuple(modules)))
        for index, part in enumerate(("gate", "up")[:per_expert]):  # a name without gate_up stays
            yield from self._linears(
                target.replace("gate_up", part), separate, modules[index::per_expert]
            )

    def _read_blocks(self, modules: Sequence[str]) -> torch.Tensor:
        read, blocks = self.source.read, list[torch.Tensor]()
        for module in modules:
            ours = f"{module}.weight_packed" in self.source.tensors
            codes = read(f"{module}.{'weight_packed' if ours else 'weight'}")
            blocks.append(nvfp4_blocks(codes, read_finite(self.source, f"{module}.weight_scale")))
        return torch.cat(blocks)

    def _read_scales(self, modules: Sequence[str]) -> torch.Tensor:
        """Return each module's 1 / global scale (FP32), times the router's scale for down experts."""
        values: list[torch.Tensor] = []
        for module in modules:
            inverse = f"{module}.weight_scale_2"  # ModelOpt's
            if inverse in self.source.tensors:
                values.append(read_finite(self.source, inverse).reshape(1))
            else:
                scale = read_finite(self.source, f"{module}.weight_global_scale")
                values.append(1 / scale.reshape(1))
        scales = torch.cat(values)
        if modules[0].endswith(FIRST_DOWN):
            router = modules[0].replace(FIRST_DOWN, ROUTER_SCALE)
            scales = scales * read_finite(self.source, router).float()
        return scales.view(torch.uint8)


def nvfp4_blocks(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return GGUF blocks, uint8 [n], from codes U8 [..., in/2] and scales e4m3 >= 0 [..., in/16]."""
    pairs = packed.reshape(-1, GROUP // 2)  # a group of 16: codes 0 1, 2 3, ... 14 15
    codes = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)
    low, high = codes.split(GROUP // 2, dim=-1)
    d = scales.view(torch.uint8).reshape(-1, 4)
    return torch.cat([d, (low | (high << 4)).view(len(d), -1)], dim=-1).flatten()


def _check_width(name: str, shape: tuple[int, ...], kind: GGMLType) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if shape[-1] % block:
        raise InputError(
            f"{name} has {shape[-1]} inputs, and GGUF's {kind} blocks hold {block}: it cannot be "
            f"exported in {kind}"
        )


def _runs(rows: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Split rows of `nbytes` in all into ranges (start, stop) of about TASK_BYTES each."""
    step = max(1, rows * TASK_BYTES // nbytes)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))
