"""Evens out the channels of an input: weights before a Linear are divided by what its own gain.

In NVFP4 the largest of 16 channels sets the error of all of them, in the input and in the weight. A
channel's input x and column w become x / f and w f. With f = (|x| / |w|)^(1/2), |x| and |w| being root
mean squares, both have the same spread. Factors of down_proj divide the rows of up_proj, an expert's
own; those of a normed input, the norm's gain. They are powers of two, so the BF16 model computes what
it did, bit by bit, and a checkpoint holds nothing new.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from experiments.damage import Model
from quantize.schemes.gptq import shrunk

# Linears by the input they read, and the norm that makes it.
NORMS = {
    "self_attn.q_proj": (
        "input_layernorm",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    "mlp.gate_proj": ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    "experts.gate_up_proj": ("pre_feedforward_layernorm_2", ("experts.gate_up_proj",)),
}  # fmt: skip
DOWN = ("mlp.down_proj", "experts.down_proj")


def factors(squares: Tensor, weight: Tensor, exact: bool = False) -> Tensor:
    """Return factors [..., K] for the columns of `weight` [..., out, K], from its inputs' mean squares.

    Their geometric mean is 1; unless `exact`, they are then rounded to powers of two.
    """
    columns = weight.square().mean(-2)
    found = (squares.clamp(min=1e-20) / columns.clamp(min=1e-20)).log2() / 4
    found = found - found.mean(-1, keepdim=True)
    return (found if exact else found.round()).exp2()


def folded(
    model: Model, sums: Mapping[Any, Tensor], counts: Mapping[Any, Tensor], *, down: bool = True,
    norms: bool = False, exact: bool = False,
) -> Model:  # fmt: skip
    """Return a copy of BF16's `model` with factors folded in; `sums` are its inputs' Hessians."""
    other = copy(model)
    other.layers, other.roundings = [dict(own) for own in model.layers], {}
    for index, w in enumerate(other.layers):

        def squares(name: str, index: int = index) -> Tensor:
            key = index, name
            return shrunk(sums[key], counts[key]).diagonal(dim1=-2, dim2=-1)

        for name, (norm, linears) in NORMS.items() if norms else ():
            own = {key: key if key in w else f"{key}.weight" for key in linears}
            read = [key for key in own.values() if key in w]  # a layer may lack v_proj
            stacked = torch.cat([w[key].flatten(0, -2) for key in read])
            mean = squares(name).mean(0)
            f = factors(mean, stacked, exact)
            w[f"{norm}.weight"] = (w[f"{norm}.weight"] / f).bfloat16().float()
            w |= {key: (w[key] * f).bfloat16().float() for key in read}
        for name in DOWN if down else ():
            dense = name.startswith("mlp")
            at = f"{name}.weight" if dense else name
            weight = w[at]
            f = factors(squares(name)[0] if dense else squares(name), weight, exact)
            w[at] = (weight * f[..., None, :]).bfloat16().float()
            before = "mlp.up_proj.weight" if dense else "experts.gate_up_proj"
            rows = f if dense else torch.cat([torch.ones_like(f), f], -1)
            w[before] = (w[before] / rows[..., None]).bfloat16().float()
    return other
