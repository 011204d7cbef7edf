"""Random operands in the real model's shapes, the same for tests, tuning and the benchmark.

Weights are drawn with standard deviation 1/sqrt(K), quantized expert by expert, and laid out as the
device's kernel reads them. Each function draws from its own generator, seeded with `seed`.
"""

import torch

from fused_dequant import formats, weights
from fused_dequant.formats import E2M1_MAX, EIGHT_BIT, FOUR_BIT, FP8_MAX
from fused_dequant.weights.choose import made_of
from fused_dequant.weights.layouts import KERNELS
from fused_dequant.weights.weight import Weight

SHARED = FP8_MAX * E2M1_MAX / 6  # global scale of rows with amax 6, as standard normal rows have


def random_weight(
    scheme: str, experts: int, rows: int, columns: int, device: str, seed: int = 0
) -> Weight:
    """Return a random weight [experts, rows, columns], laid out for `device`; on "meta", a blank one.

    `scheme` is one on disk, or a layout: then the weight is built for the layout's activation mode, and
    may get a plainer layout. Tokens for nvfp4_e2m1 have the global scale SHARED.
    """
    if device == "meta":
        return blank_weight(scheme, experts, rows, columns, device)
    generator = torch.Generator(device).manual_seed(seed)
    shared = torch.full((1,), SHARED, device=device) if scheme == FOUR_BIT else None
    scheme, mode = made_of(scheme)
    in_fp8 = mode == "fp8"
    rounded = KERNELS[scheme].rounded
    assert rounded is not None, scheme
    parts: list[tuple[torch.Tensor, ...]] = []
    for _ in range(experts):
        w = torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5
        parts.append(rounded(w))
    if experts == 1:
        return weights.build(scheme, *parts[0], in_fp8=in_fp8, shared=shared)
    stacked = [torch.stack(tensor) for tensor in zip(*parts, strict=True)]
    return weights.build(scheme, *stacked, in_fp8=in_fp8, shared=shared)


def random_tokens(tokens: int, columns: int, device: str, seed: int = 1) -> torch.Tensor:
    """Return standard normal rows bf16 [tokens, columns], which resemble the output of a norm."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tokens, columns, generator=generator, device=device).to(torch.bfloat16)


def rounded(x: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return x [..., K] in float64, with the rounding that products with `scheme` apply to tokens."""
    if scheme == FOUR_BIT:
        shared = torch.full((1,), SHARED, device=x.device)
        return formats.dequantize_nvfp4(*formats.quantize_nvfp4(x, shared), shared, torch.float64)
    if scheme not in EIGHT_BIT:
        return x.double()
    q, scale = formats.quantize_rows(x, EIGHT_BIT[scheme])
    return q.double() * scale[..., None].double()


def random_routing(
    tokens: int,
    experts: int,
    topk: int,
    device: str,
    *,
    used: int | None = None,
    spread: float = 0.0,
    seed: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `topk` distinct experts for each token, from the first `used` experts (None: from all).

    `spread` is the standard deviation of log(popularity) over experts; 0: all equally popular. Return
    expert ids int32 and routing weights f32, both [tokens, topk]; each token's weights sum to 1.
    """
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.rand(tokens, used or experts, generator=generator, device=device)
    if spread:  # the largest log-popularity plus Gumbel noise draws in proportion to popularity
        popularity = torch.randn(scores.shape[1], generator=generator, device=device)
        scores = spread * popularity - torch.log(-torch.log(scores))
    ids = scores.topk(topk, -1).indices.to(torch.int32)
    routing_weights = torch.rand(tokens, topk, generator=generator, device=device) + 0.1
    return ids, routing_weights / routing_weights.sum(-1, keepdim=True)


# The projections of the 26B-A4B model, [out, in]; count of layers in the comment.
LINEAR_SHAPES = (
    (4096, 2816),  # q, sliding (25)
    (2048, 2816),  # k, v, sliding (25 each)
    (2816, 4096),  # o, sliding (25)
    (8192, 2816),  # q, full (5); q, k, v fused, sliding (25)
    (1024, 2816),  # k, full (5)
    (2816, 8192),  # o, full (5)
    (4224, 2816),  # mlp gate and up fused (30)
    (2816, 2112),  # mlp down (30)
)
EXPERTS, TOPK, HIDDEN, INNER, VOCABULARY = 128, 8, 2816, 704, 262144
# How uneven the model's routing is: `spread` by number of tokens. The fullest of 128 experts gets
# 94 of the 2,048 choices of one canvas, and 187 of the 8,192 choices of four (means over the layers
# of a random 26B model). For other numbers of canvases `spread` is assumed, from these two.
SPREAD = {64: 0.9, 256: 0.9, 512: 0.7, 1024: 0.5, 2048: 0.5, 8192: 0.5}


def blank_weight(scheme: str, experts: int, rows: int, columns: int, device: str) -> Weight:
    """Return an uninitialised weight [experts, rows, columns]; on "meta" it takes no memory."""
    layout = KERNELS[scheme].layout(rows, columns)
    tensors = (torch.empty(experts, *shape, dtype=dtype, device=device) for dtype, shape in layout)
    return Weight(scheme, *tensors)
