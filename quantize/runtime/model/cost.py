"""Computes the least time of one pass, part by part, from the bytes it reads and its FLOP.

    seconds of a product >= max(bytes / copy bandwidth, FLOP / rate of its tensor cores)

A pass reads each weight once, but no weights of experts without a token. It reads each sequence's keys
and values once. 8-bit weights, and NVFP4 in the mode `fp8`, multiply at the rate of FP8 tensor cores.
Other NVFP4 weights multiply at the rate of bf16 tensor cores (W4A16) or of FP4 units (W4A4). Norms,
routing and the sampler's reads of logits are left out, so a real pass takes longer.
"""

from fused_dequant import Weight

from quantize.runtime.gpu.rates import Rates
from quantize.runtime.weights.load import TextWeights


def decoder_floor(
    weights: TextWeights, rates: Rates, batch: int, context: int, experts_hit: float
) -> dict[str, float]:
    """Return the least seconds of one denoising step of `batch` canvases, by part as in `pass_floor`.

    `context` positions precede each canvas. On average, `experts_hit` experts of a layer get a token.
    """
    shape = batch, weights.config.canvas_length
    floor = pass_floor(weights, rates, shape, context, experts_hit)
    return floor | {"vocabulary": 2 * floor["vocabulary"]}  # lm_head, then the soft embedding


def pass_floor(
    weights: TextWeights, rates: Rates, shape: tuple[int, int], context: int, experts_hit: float
) -> dict[str, float]:
    """Return the least seconds of a pass over `shape` = (batch, length) tokens, by part.

    Parts are "experts", "dense" (all other Linears), "attention" and "vocabulary" (all rows' logits).
    `context` and `experts_hit` are as in `decoder_floor`.
    """
    text, (batch, length) = weights.config.text_config, shape
    rows = batch * length

    def product(weight: Weight, share: float = 1.0, tokens: int = rows) -> float:
        _, N, K = weight.shape
        return rates.seconds(weight.bytes * share, 2 * tokens * N * K, weight.scheme)

    parts = {"experts": 0.0, "dense": 0.0, "attention": 0.0}
    for index, layer in enumerate(weights.layers):
        share, slots = experts_hit / text.num_experts, rows * text.top_k_experts
        both = (layer.experts_gate_up, layer.experts_down)
        parts["experts"] += sum(product(w, share, slots) for w in both)
        dense = (*layer.qkv, layer.o, *layer.gate_up, layer.down)
        parts["dense"] += sum(product(w) for w in dense)
        layer_config = text.per_layer_config[index]
        seen = (min(context, text.sliding_window - 1) if layer.sliding else context) + length
        cells = 2 * 2 * batch * seen * layer_config.num_key_value_heads * layer_config.head_dim
        flop = 4 * rows * seen * text.num_attention_heads * layer_config.head_dim
        parts["attention"] += rates.seconds(cells, flop, "bf16")
    V, H = weights.embedding.shape
    return parts | {"vocabulary": rates.seconds(2 * V * H, 2 * rows * V * H, "bf16")}
