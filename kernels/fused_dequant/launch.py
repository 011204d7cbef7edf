"""What runs on the GPU for each operation: which kernels, in which order, with which configuration.

experts, for M tokens and topk choices:

    route                ids -> sorted blocks                                     1 launch
    [quantize_rows]      fp8, int8: tokens to 8 bits, unless they come so         1
    gate_up + gelu_mul   [slots, I] bf16, activation in the epilogue              1
    [quantize_rows]      fp8, int8: hidden rows to 8 bits                         1
    down * weight        [slots, H] bf16                                          1

Both products read the same blocks, so their configurations share BM. Everything is allocated through
torch's caching allocator and sized by shapes, so the sequence can be captured in a CUDA graph.
"""

import torch

from fused_dequant import (
    attention,
    matmul,
    nvfp4,
    nvfp4_hopper,
    quantize,
    routing,
    tuning,
    vocabulary,
    vocabulary_hopper,
)
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.routing import Routing
from fused_dequant.weights import Weight, is_hopper


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """X bf16 [M, K], weight [1, N, K] -> bf16 [M, N]."""
    q, x_scale = _quantize(x, weight)
    config = tuning.choose("linear", weight.scheme, len(x), *weight.shape[1:], x.device)
    return dense(q, x_scale, weight, config)


def linear_quantized(q: torch.Tensor, x_scale: torch.Tensor, weight: Weight) -> torch.Tensor:
    """8-bit activations and weight -> bf16 [M, N]."""
    config = tuning.choose("linear", weight.scheme, len(q), *weight.shape[1:], q.device)
    return dense(q, x_scale, weight, config)


def dense(
    x: torch.Tensor, x_scale: torch.Tensor | None, weight: Weight, config: tuning.Config
) -> torch.Tensor:
    """One product with a weight of E = 1; x as `_quantize` returns it."""
    if weight.factor is None:
        w_scale = None if weight.scale is None else weight.scale[0]
        return matmul.matmul(x, weight.data[0], x_scale, w_scale, config)
    scale = _present(weight.scale)
    if weight.scheme == "nvfp4_fragments":
        return nvfp4_hopper.nvfp4_hopper(x, weight.data, scale, weight.factor, config)
    return nvfp4.nvfp4(x, weight.data[0], scale[0], weight.factor, config)


def _quantize(x: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Activations as the weight's scheme multiplies them, and their scales."""
    if weight.scheme in EIGHT_BIT:
        return quantize.quantize_rows(x, EIGHT_BIT[weight.scheme])
    return x, None


def experts(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
) -> torch.Tensor:
    """See `ops.routed_experts`."""
    count, N, K = gate_up.shape
    up_config = tuning.choose("experts", gate_up.scheme, len(x), N, K, x.device)
    down_config = tuning.choose("experts", down.scheme, len(x), *down.shape[1:], x.device)
    blocks = routing.route(expert_ids, count, tuning.block_rows(up_config))
    if x_scale is None:
        x, x_scale = _quantize(x, gate_up)
    row_weight = routing_weights.flatten()
    hidden = grouped(x, x_scale, gate_up, blocks, up_config, None)
    y = grouped(*_quantize(hidden, down), down, blocks, down_config, row_weight)
    return y.view(*expert_ids.shape, -1)


def grouped(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: Weight,
    blocks: Routing,
    config: tuning.Config,
    row_weight: torch.Tensor | None,
) -> torch.Tensor:
    """gate_up with its activation (no row_weight), or down times the routing weight."""
    if weight.factor is None:
        return matmul.grouped_matmul(
            x, weight.data, x_scale, weight.scale, blocks, config,
            row_weight=row_weight,
        )  # fmt: skip
    scale = _present(weight.scale)
    if weight.scheme == "nvfp4_fragments":
        return nvfp4_hopper.grouped_nvfp4_hopper(
            x, weight.data, scale, weight.factor, blocks, config, row_weight=row_weight
        )
    return nvfp4.grouped_nvfp4(
        x, weight.data, scale, weight.factor, blocks, config, row_weight=row_weight
    )


def lm_head(
    x: torch.Tensor, embedding: torch.Tensor, softcap: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.lm_head`."""
    V, H = embedding.shape
    config = tuning.choose("lm_head", "bf16", len(x), V, H, x.device)
    return head(x, embedding, softcap, config, out)


def head(
    x: torch.Tensor,
    embedding: torch.Tensor,
    softcap: float,
    config: tuning.Config,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """lm_head in a given configuration; one with STAGES is of Hopper's kernel."""
    product = vocabulary_hopper.lm_head if "STAGES" in config else vocabulary.lm_head
    return product(x, embedding, softcap, config, out)


def soft_embedding(
    logits: torch.Tensor, embedding: torch.Tensor, inverse_temperature: torch.Tensor
) -> torch.Tensor:
    """See `ops.soft_embedding`."""
    V, H = embedding.shape
    config = tuning.choose("soft_embedding", "bf16", len(logits), H, V, logits.device)
    return vocabulary.soft_embedding(logits, embedding, inverse_temperature, config)


def attend_parts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> attention.Parts:
    """See `layer.attend`."""
    rows, q_heads, D = q.shape
    config = attention.configure(
        rows, len(slots), q_heads, keys.shape[2], D, tuning.processors(q.device),
        hopper=is_hopper(q.device),
    )  # fmt: skip
    return attention.attend_parts(q, keys, values, slots, first, last, config)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError(
            "this weight lacks its scale or factor: build it with fused_dequant.weights"
        )
    return tensor
