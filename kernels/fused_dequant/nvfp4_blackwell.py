"""NVFP4 W4A4 on Blackwell: both operands stay FP4, the tensor core applies the block scales.

    y = acc * factor / 128 / input_scale,   acc = sum over groups of 16 of sx * sw * <e2m1 x, e2m1 w>

`tl.dot_scaled` with e4m3 scales a group of 16 becomes `tcgen05.mma ... kind::mxf4nvf4` (SASS
UTCOMMA) on sm_100 and `mma ... mxf4nvf4` (OMMA) on sm_120; no other target has it. Compiled and
its SASS checked for both, and its arithmetic checked as a reference on the CPU; it has not run on
a Blackwell GPU, so no speed is claimed.
"""

# Kernels are compiled from their syntax: their parameters have no Python types, and a launch passes
# numbers for `constexpr`.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

from fused_dequant.routing import DENSE, Routing, place_results
from fused_dequant.tiles import block_rows, store_nvfp4


@triton.jit
def nvfp4_w4a4_kernel(
    x,
    x_scale,
    packed,
    scale,
    factor,
    input_scale,
    y,
    slots,
    block_expert,
    block_count,
    row_weight,
    total,
    N,
    K,
    TOPK: tl.constexpr,
    GROUPED: tl.constexpr,
    GELU_MUL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """X uint8 [rows, K/2], x_scale e4m3 [rows, K/16]; weights as in `nvfp4.py` but scale e4m3."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.zeros((), tl.int64)
    if GROUPED:
        if block >= tl.load(block_count):
            return
        expert = tl.load(block_expert + block).to(tl.int64)
    slot, real = block_rows(slots, block * BM, total, BM, GROUPED)
    row = (slot // TOPK).to(tl.int64)
    channel = expert * N + ((tile * BN + tl.arange(0, BN)) % N)
    half = tl.arange(0, BK // 2)
    group = tl.arange(0, BK // 16)
    tokens = x + row[:, None] * (K // 2) + half[None, :]
    token_scales = x_scale + row[:, None] * (K // 16) + group[None, :]
    weights = packed + channel[None, :] * (K // 2) + half[:, None]
    weight_scales = scale + channel[:, None] * (K // 16) + group[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        if EVEN_K:
            a = tl.load(tokens + k0 // 2, mask=real[:, None], other=0)
            sa = tl.load(token_scales + k0 // 16, mask=real[:, None], other=0.0)
            b = tl.load(weights + k0 // 2)
            sb = tl.load(weight_scales + k0 // 16)
        else:
            left = K - k0
            a = tl.load(tokens + k0 // 2, mask=real[:, None] & (half < left // 2)[None, :], other=0)
            in_scale = (group < left // 16)[None, :]
            sa = tl.load(token_scales + k0 // 16, mask=real[:, None] & in_scale, other=0.0)
            b = tl.load(weights + k0 // 2, mask=(half < left // 2)[:, None], other=0)
            sb = tl.load(weight_scales + k0 // 16, mask=in_scale, other=0.0)
        acc = tl.dot_scaled(a, sa, "e2m1", b, sb, "e2m1", acc)
    result = acc.T / (128.0 * tl.load(input_scale))
    store_nvfp4(
        result, y, factor, row_weight, expert, slot, real, tile, N, BM, BN, GELU_MUL, WEIGHTED
    )


def nvfp4_w4a4(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
    input_scale: torch.Tensor,
    config: dict[str, int],
) -> torch.Tensor:
    """Activations from `quantize.quantize_nvfp4`, canonical weight [N, K/2] -> bf16 [M, N]."""
    M, N, K = len(x), len(packed), packed.shape[1] * 2
    y = torch.empty(M, N, dtype=torch.bfloat16, device=x.device)
    nvfp4_w4a4_kernel[(triton.cdiv(N, config["BN"]), triton.cdiv(M, config["BM"]))](
        x, x_scale, packed, scale, factor, input_scale, y, y, y, y, y, M, N, K,
        EVEN_K=K % config["BK"] == 0, **DENSE, **config,
    )  # fmt: skip
    return y


def grouped_nvfp4_w4a4(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
    input_scale: torch.Tensor,
    routing: Routing,
    config: dict[str, int],
    *,
    row_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `nvfp4.grouped_nvfp4`, with quantized activations."""
    N, K = packed.shape[1], packed.shape[2] * 2
    y, mode = place_results(x, N, routing, row_weight)
    nvfp4_w4a4_kernel[(triton.cdiv(N, config["BN"]), routing.max_blocks)](
        x, x_scale, packed, scale, factor, input_scale, y,
        routing.slots, routing.block_expert, routing.block_count,
        y if row_weight is None else row_weight, len(y), N, K,
        EVEN_K=K % config["BK"] == 0, **mode, **config,
    )  # fmt: skip
    return y
