"""What runs on the GPU for each operation: which kernels, in which order, with which configuration.

experts, for M tokens and topk choices:

    route                ids -> sorted blocks                                     1 launch
    [quantize_rows]      fp8, int8: tokens to 8 bits                              1
    gate_up + gelu_mul   [slots, I] bf16, activation in the epilogue              1
    [quantize_rows]      fp8, int8: hidden rows to 8 bits                         1
    down * weight        [slots, H] bf16                                          1
    combine              sum over the choices of a token                          1

Both products read the same blocks, so their configurations share BM. Everything is allocated through
torch's caching allocator and sized by shapes, so the sequence can be captured in a CUDA graph.
"""

import torch

from fused_dequant import (
    matmul,
    nvfp4,
    nvfp4_blackwell,
    nvfp4_hopper,
    quantize,
    routing,
    tuning,
    vocabulary,
)
from fused_dequant.routing import Routing
from fused_dequant.weights import Weight

_EIGHT_BIT = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """X bf16 [M, K], weight [1, N, K] -> bf16 [M, N]."""
    if weight.scheme in _EIGHT_BIT:
        return linear_quantized(*quantize.quantize_rows(x, _EIGHT_BIT[weight.scheme]), weight)
    _, N, K = weight.shape
    config = tuning.choose("linear", weight.scheme, len(x), N, K, x.device)
    if weight.scheme == "bf16":
        return matmul.matmul(x, weight.data[0], None, None, config)
    scale, factor = _present(weight.scale), _present(weight.factor)
    if weight.scheme == "nvfp4_fragments":
        return nvfp4_hopper.nvfp4_hopper(x, weight.data, scale, factor, config)
    if weight.scheme == "nvfp4":
        return nvfp4.nvfp4(x, weight.data[0], scale[0], factor, config)
    input_scale = _present(weight.input_scale)
    q, q_scale = quantize.quantize_nvfp4(x, input_scale)
    return nvfp4_blackwell.nvfp4_w4a4(
        q, q_scale, weight.data[0], scale[0], factor, input_scale, config
    )


def linear_quantized(q: torch.Tensor, q_scale: torch.Tensor, weight: Weight) -> torch.Tensor:
    """8-bit activations and weight -> bf16 [M, N]."""
    _, N, K = weight.shape
    config = tuning.choose("linear", weight.scheme, len(q), N, K, q.device)
    return matmul.matmul(q, weight.data[0], q_scale, _present(weight.scale)[0], config)


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
) -> torch.Tensor:
    """See `ops.experts`."""
    count, N, K = gate_up.shape
    up_config = tuning.choose("experts", gate_up.scheme, len(x), N, K, x.device)
    down_config = tuning.choose("experts", down.scheme, len(x), *down.shape[1:], x.device)
    blocks = routing.route(expert_ids, count, up_config["BM"])
    row_weight = routing_weights.flatten()
    hidden = _grouped(x, gate_up, blocks, up_config, None)
    y = _grouped(hidden, down, blocks, down_config, row_weight)
    return routing.combine(y, expert_ids, count)


def _grouped(
    x: torch.Tensor,
    weight: Weight,
    blocks: Routing,
    config: tuning.Config,
    row_weight: torch.Tensor | None,
) -> torch.Tensor:
    """gate_up with its activation (no row_weight), or down times the routing weight."""
    per_slot = row_weight is not None
    if weight.scheme == "bf16" or weight.scheme in _EIGHT_BIT:
        x_scale = None
        if weight.scheme in _EIGHT_BIT:
            x, x_scale = quantize.quantize_rows(x, _EIGHT_BIT[weight.scheme])
        return matmul.grouped_matmul(
            x, weight.data, x_scale, weight.scale, blocks, config,
            row_weight=row_weight, per_slot=per_slot, epilogue="none" if per_slot else "gelu_mul",
        )  # fmt: skip
    scale, factor = _present(weight.scale), _present(weight.factor)
    if weight.scheme == "nvfp4_w4a4":
        input_scale = _present(weight.input_scale)
        q, q_scale = quantize.quantize_nvfp4(x, input_scale)
        return nvfp4_blackwell.grouped_nvfp4_w4a4(
            q, q_scale, weight.data, scale, factor, input_scale, blocks, config,
            row_weight=row_weight, per_slot=per_slot, gelu_mul=not per_slot,
        )  # fmt: skip
    kernel = (
        nvfp4_hopper.grouped_nvfp4_hopper
        if weight.scheme == "nvfp4_fragments"
        else nvfp4.grouped_nvfp4
    )
    return kernel(
        x, weight.data, scale, factor, blocks, config,
        row_weight=row_weight, per_slot=per_slot, gelu_mul=not per_slot,
    )  # fmt: skip


def lm_head(x: torch.Tensor, weight: Weight, softcap: float) -> torch.Tensor:
    """See `ops.lm_head`."""
    _, N, K = weight.shape
    config = tuning.choose("lm_head", weight.scheme, len(x), N, K, x.device)
    x_scale, w_scale = None, None
    if weight.scheme in _EIGHT_BIT:
        x, x_scale = quantize.quantize_rows(x, _EIGHT_BIT[weight.scheme])
        w_scale = _present(weight.scale)[0]
    return matmul.matmul(
        x, weight.data[0], x_scale, w_scale, config, epilogue="softcap", cap=softcap
    )


def soft_embedding(
    logits: torch.Tensor, embedding: torch.Tensor, inverse_temperature: float
) -> torch.Tensor:
    """See `ops.soft_embedding`."""
    V, H = embedding.shape
    config = tuning.choose("soft_embedding", "bf16", len(logits), H, V, logits.device)
    return vocabulary.soft_embedding(logits, embedding, inverse_temperature, config)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError(
            "this weight lacks its scale or factor: build it with fused_dequant.weights"
        )
    return tensor
