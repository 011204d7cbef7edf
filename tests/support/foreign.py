"""Checkpoints as others publish them, written from the formats' definitions alone.

Nothing of quantize, compressed-tensors or safetensors writes here: bytes are packed by numpy, numbers
decoded by their definition. Every quantized Linear gets random codes and scales. Layouts follow what is
public about the repositories of NVIDIA (ModelOpt) and RedHatAI; none of their files was at hand.
"""

import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.tiny import tiny_config, write_tokenizer

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Format = Literal["modelopt-nvfp4", "modelopt-w4a16", "modelopt-fp8", "ct-fp8", "ct-nvfp4"]
DTYPES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def e4m3(byte: int) -> float:
    """The number of an e4m3 byte: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


E4M3 = np.array([e4m3(byte) for byte in range(256)])


@dataclass
class Foreign:
    """Tensors to write, (dtype, shape, bytes), and the weights of each quantized Linear.

    `exact` in float64 without a rounding; `single` as the makers' own code multiplies, in float32.
    """

    tensors: dict[str, tuple[str, list[int], bytes]] = field(default_factory=dict)
    exact: dict[str, np.ndarray] = field(default_factory=dict)
    single: dict[str, np.ndarray] = field(default_factory=dict)
    shared: dict[str, np.float32] = field(default_factory=dict)
    fuses: bool = False

    def scale(self, module: str, suffix: str, value: np.float32) -> np.float32:
        """The first one's scale of Linears that a server fuses, where the maker sees to that."""
        fused = re.sub("[qkv]_proj|(gate|up)_proj", "fused", module)
        return self.shared.setdefault(f"{fused}.{suffix}", value) if self.fuses else value

    def add(self, name: str, dtype: str, shape: list[int], data: bytes) -> None:
        assert len(data) == DTYPES[dtype] * int(np.prod(shape)), name
        self.tensors[name] = (dtype, shape, data)

    def number(self, name: str, shape: list[int], value: np.float32) -> None:
        self.add(name, "F32", shape, struct.pack("<f", value))

    def write(self, folder: Path, config: dict[str, Any]) -> Path:
        """Write config.json and model.safetensors."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        write_tokenizer(folder)
        header: dict[str, Any] = {}
        end = 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {
                "dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)],
            }  # fmt: skip
            end += len(data)
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        payload = b"".join(data for _, _, data in self.tensors.values())
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + payload)
        return folder


def linears(name: str, shape: list[int]) -> list[tuple[str, int, int]]:
    """The text Linears that a BF16 tensor holds, (module, out, in); experts one by one."""
    if ".experts." in name:
        parts = ["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]
        prefix, (count, rows, columns) = name.rsplit(".", 1)[0], shape
        return [
            (f"{prefix}.{e}.{p}", rows // len(parts), columns) for e in range(count) for p in parts
        ]
    if ".self_attn." in name or ".mlp." in name:
        module = name.removesuffix(".weight")
        return [(module, *shape)] if module.endswith("_proj") else []
    return []


def add_nvfp4(out: Foreign, module: str, rows: int, columns: int, kind: Format, rng: Any) -> None:
    codes = rng.integers(0, 16, (rows, columns))
    blocks = rng.integers(0x38, 0x48, (rows, columns // 16))  # 1 to 3.75
    unit = np.float32(rng.uniform(0.2, 0.3) * columns**-0.5 / 6)
    if kind == "ct-nvfp4":
        unit = np.float32(1 / unit)
    unit = out.scale(module, "weight", unit)
    packed = bytearray()
    for row in codes:
        for column in range(0, columns, 2):
            packed.append(int(row[column]) | int(row[column + 1]) << 4)
    suffix = "weight_packed" if kind == "ct-nvfp4" else "weight"
    out.add(f"{module}.{suffix}", "U8", [rows, columns // 2], bytes(packed))
    block_bytes = bytes(blocks.astype(np.uint8).flatten().tolist())
    out.add(f"{module}.weight_scale", "F8_E4M3", [rows, columns // 16], block_bytes)
    scale = E4M3[blocks].astype(np.float32)
    if kind == "ct-nvfp4":
        out.number(f"{module}.weight_global_scale", [1], unit)
        given = out.scale(module, "input", np.float32(rng.uniform(300, 600)))
        out.number(f"{module}.input_global_scale", [1], given)
        scale, exact = scale / unit, E4M3[blocks] / float(unit)
    else:
        out.number(f"{module}.weight_scale_2", [], unit)
        if kind == "modelopt-nvfp4":
            given = out.scale(module, "input", np.float32(rng.uniform(0.001, 0.003)))
            out.number(f"{module}.input_scale", [], given)
        scale, exact = scale * unit, E4M3[blocks] * float(unit)
    assert scale.dtype == np.float32
    out.exact[module] = E2M1[codes] * np.repeat(exact, 16, axis=1)
    out.single[module] = E2M1[codes].astype(np.float32) * np.repeat(scale, 16, axis=1)


def add_fp8(out: Foreign, module: str, rows: int, columns: int, kind: Format, rng: Any) -> None:
    codes = rng.integers(0, 0x60, (rows, columns)) | rng.integers(0, 2, (rows, columns)) << 7
    out.add(f"{module}.weight", "F8_E4M3", [rows, columns], bytes(codes.astype(np.uint8).tobytes()))
    if kind == "modelopt-fp8":
        scale = np.float32(rng.uniform(0.2, 0.3) * columns**-0.5)
        out.number(f"{module}.weight_scale", [], scale)
        given = out.scale(module, "input", np.float32(rng.uniform(0.01, 0.03)))
        out.number(f"{module}.input_scale", [], given)
        scales = np.full((1, 1), scale)
    else:
        scales = (rng.uniform(0.2, 0.3, (rows, 1)) * columns**-0.5).astype(np.float32)
        out.add(f"{module}.weight_scale", "F32", [rows, 1], scales.tobytes())
    out.exact[module] = E4M3[codes] * scales.astype(np.float64)
    out.single[module] = E4M3[codes].astype(np.float32) * scales


def foreign(source: Path, kinds: dict[str, Format], *, fuses: bool = False) -> Foreign:
    """Quantize a BF16 checkpoint's Linears of each class ("experts", "self_attn", "mlp") as stated."""
    out, rng = Foreign(fuses=fuses), np.random.default_rng(0)
    for name, tensor in load_file(source / "model.safetensors").items():
        shape = list(tensor.shape)
        found = linears(name, shape)
        kind = next((kind for key, kind in kinds.items() if found and f".{key}." in name), None)
        if kind is None:
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            out.add(name, "BF16", shape, data)
            continue
        for module, rows, columns in found:
            add = add_fp8 if kind.endswith("fp8") else add_nvfp4
            add(out, module, rows, columns, kind, rng)
    return out


def config_with(quantization: dict[str, Any] | None) -> dict[str, Any]:
    """The tiny model's config.json, with a quantization_config."""
    config: dict[str, Any] = tiny_config().to_dict()
    return config if quantization is None else {**config, "quantization_config": quantization}
