"""Random weights of a config's exact shapes, made on the device: for speed and memory alone.

Linears of K inputs have a standard deviation of 1/sqrt(K), the router's logits one of 1. Random
attention gives all tokens nearly the same output; it enters with a tenth of the other branches' weight,
or the tokens would become alike layer by layer and meet in a dozen experts.
"""

from typing import Any

import torch
from fused_dequant import Weight, weights
from fused_dequant.cases import random_weight
from torch import Tensor

from quantize.runtime.fused.packing import NORMS, LayerWeights
from quantize.runtime.fused.weights import (
    SelfConditioning,
    TextWeights,
    check_gpu,
    in_memory_of_its_own,
    model_config,
)


def random_weights(
    config: dict[str, Any],
    schemes: dict[str, str],
    device: str,
    *,
    experts_hit: int | None = None,
) -> TextWeights:
    """Make the text stack.

    Args:
        config: config.json of a BF16 model.
        schemes: kernel scheme ("bf16", "fp8", "int8", "nvfp4") of "experts", "attention" and "mlp".
        device: where they are made.
        experts_hit: route to the first so many experts only; None spreads routing over all.

    Raises:
        ResourceError: as `check_gpu`.
    """
    check_gpu(schemes.values(), torch.device(device))
    whole = model_config(config)
    text = whole.text_config
    H, E = text.hidden_size, text.num_experts
    seeds = iter(range(1 << 20))

    def dense(kind: str, rows: int, columns: int) -> Weight:
        return random_weight(schemes[kind], 1, rows, columns, device, seed=next(seeds))

    def routed(rows: int, columns: int) -> Weight:
        made = random_weight(schemes["experts"], E, rows, columns, device, seed=next(seeds))
        return in_memory_of_its_own(made)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)

    def plain(rows: int, columns: int) -> Tensor:
        return random_weight("bf16", 1, rows, columns, device, seed=next(seeds)).data[0]

    def layer(index: int) -> LayerWeights:
        sliding = text.layer_types[index] == "sliding_attention"
        own = text.per_layer_config[index]
        D, kv = own.head_dim, own.num_key_value_heads
        heads = text.num_attention_heads
        I, inner = text.intermediate_size, text.moe_intermediate_size  # noqa: E741
        router = plain(E, H) * H**0.5
        if experts_hit is not None:
            router[experts_hit:] = 0  # the top 8 of many random scores are above 0
        return LayerWeights(
            sliding=sliding,
            norms={key: ones(H) * (0.1 if key == "post_attention" else 1) for key in NORMS},
            qkv=(dense("attention", (heads + kv * (2 if sliding else 1)) * D, H),),
            q_norm=ones(D) * D**-0.5,  # scores of size 1: attention has no other scale
            k_norm=ones(D),
            o=dense("attention", H, heads * D),
            gate_up=(dense("mlp", 2 * I, H),),
            down=dense("mlp", H, I),
            router=router,
            router_scale=ones(H),
            per_expert_scale=ones(E),
            experts_gate_up=routed(2 * inner, H),
            experts_down=routed(H, inner),
            encoder_scalar=ones(1) * 0.2,
            decoder_scalar=ones(1) * 0.2,
        )

    embedding = plain(text.vocab_size, H)
    conditioning = SelfConditioning(
        ones(H), weights.bf16(plain(2 * text.intermediate_size, H)),
        weights.bf16(plain(H, text.intermediate_size)),
    )  # fmt: skip
    layers = tuple(layer(i) for i in range(text.num_hidden_layers))
    return TextWeights(whole, embedding, ones(H), conditioning, layers)
