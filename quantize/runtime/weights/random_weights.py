"""Makes random weights of a config's exact shapes on the device, to measure speed and memory.

Standard deviations are 1/sqrt(K) for the weights of a Linear with K inputs, and 1 for router logits.
Random attention gives all tokens nearly the same output: tokens would become ever more alike, and
a dozen experts would get all of them. So attention's branch is a tenth as large as the others.
"""

import itertools
from typing import Any

import torch
from fused_dequant import Weight, weights
from fused_dequant.tune.cases import random_weight
from fused_dequant.weights.choose import preferred
from torch import Tensor

from quantize.checkpoints.layout import model_config
from quantize.errors import InputError
from quantize.runtime.weights.load import SelfConditioning, TextWeights, in_memory_of_its_own
from quantize.runtime.weights.packing import NORMS, LayerWeights
from quantize.schemes.records import refusal


def random_weights(
    config: dict[str, Any],
    schemes: dict[str, str],
    device: str,
    *,
    in_fp8: bool = False,
    in_fp4: bool = False,
) -> TextWeights:
    """Return random weights for the text stack of a BF16 config.json; on "meta", they have no values.

    `schemes` maps "experts", "attention" and "mlp" to kernel schemes ("bf16", "fp8", "int8", "nvfp4").
    `in_fp8` packs NVFP4 weights for FP8 products, `in_fp4` for FP4 units. Raise InputError if either is
    set and no scheme is NVFP4.
    """
    if in_fp8 or in_fp4:
        if why := refusal("fp8", schemes.values()):
            raise InputError(f"random weights: {why}")
        packed = preferred("nvfp4", "fp8" if in_fp8 else "per_layer")[0]
        schemes = {
            kind: packed if scheme == "nvfp4" else scheme for kind, scheme in schemes.items()
        }
    whole = model_config(config)
    text = whole.text_config
    made = _Maker(text, schemes, device)
    embedding = made.plain(text.vocab_size, text.hidden_size)
    conditioning = SelfConditioning(
        made.ones(text.hidden_size),
        weights.bf16(made.plain(2 * text.intermediate_size, text.hidden_size)),
        weights.bf16(made.plain(text.hidden_size, text.intermediate_size)),
    )
    layers = tuple(made.layer(i) for i in range(text.num_hidden_layers))
    norm = made.ones(text.hidden_size)
    return TextWeights(whole, embedding, norm, conditioning, layers, in_fp8=in_fp8, in_fp4=in_fp4)


class _Maker:
    """Makes matrices, each from the next seed, so that equal calls give equal weights."""

    def __init__(self, text: Any, schemes: dict[str, str], device: str) -> None:
        self.text, self.schemes, self.device = text, schemes, device
        self.seeds = itertools.count()

    def linear(self, kind: str, rows: int, columns: int) -> Weight:
        scheme, count = self.schemes[kind], self.text.num_experts if kind == "experts" else 1
        made = random_weight(scheme, count, rows, columns, self.device, seed=next(self.seeds))
        return in_memory_of_its_own(made)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device=self.device)

    def plain(self, rows: int, columns: int) -> Tensor:
        seed = next(self.seeds)
        return random_weight("bf16", 1, rows, columns, self.device, seed=seed).data[0]

    def layer(self, index: int) -> LayerWeights:
        text, H = self.text, self.text.hidden_size
        sliding = text.layer_types[index] == "sliding_attention"
        layer = text.per_layer_config[index]
        D, kv, heads = layer.head_dim, layer.num_key_value_heads, text.num_attention_heads
        router, ones = self.plain(text.num_experts, H) * H**0.5, self.ones
        return LayerWeights(
            sliding=sliding,
            norms={key: ones(H) * (0.1 if key == "post_attention" else 1) for key in NORMS},
            qkv=(self.linear("attention", (heads + kv * (2 if sliding else 1)) * D, H),),
            q_norm=ones(D) * D**-0.5,  # scores of size 1: attention has no other scale
            k_norm=ones(D),
            o=self.linear("attention", H, heads * D),
            gate_up=(self.linear("mlp", 2 * text.intermediate_size, H),),
            down=self.linear("mlp", H, text.intermediate_size),
            router=router,
            router_scale=ones(H),
            per_expert_scale=ones(text.num_experts),
            experts_gate_up=self.linear("experts", 2 * text.moe_intermediate_size, H),
            experts_down=self.linear("experts", H, text.moe_intermediate_size),
            encoder_scalar=ones(1) * 0.2,
            decoder_scalar=ones(1) * 0.2,
        )
