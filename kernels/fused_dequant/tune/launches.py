"""One product with one launch configuration: its operands, the launch, and the exact result.

`search` times these launches, and `selftest` checks those that a user's table has.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fused_dequant import formats, reference, weights
from fused_dequant.inputs import quantize
from fused_dequant.products import routing
from fused_dequant.tune import cases
from fused_dequant.tune.candidates import Product
from fused_dequant.vocabulary import dense
from fused_dequant.weights import tuning
from fused_dequant.weights.tuning import Config
from fused_dequant.weights.weight import Weight

SOFTCAP, SHARPNESS = 30.0, 1.5  # lm_head's, and 1 / T of the soft embedding


@dataclass(frozen=True)
class Operands:
    """A product's operands; on "meta" they have no storage, and serve only to compile a launch."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    weight: Weight
    row_weight: torch.Tensor | None
    blocks: dict[int, routing.Routing]  # by number of rows per block; empty for a dense product


def operands(product: Product, device: str, configs: Iterable[Config]) -> Operands:
    """Return a product's operands for `configs`: random numbers, or no storage on "meta"."""
    grouped, down = product.verb.startswith("experts"), product.verb == "experts_down"
    rows = product.M * (cases.TOPK if down else 1)
    # The soft embedding takes logits; its weight has the embedding's layout.
    soft = product.verb == "soft_embedding"
    N, K = (product.K, product.N) if soft else (product.N, product.K)
    experts = cases.EXPERTS if grouped else 1
    scheme = product.scheme
    if device == "meta":
        x, x_scale = quantize.room(rows, product.K, scheme, torch.device(device))
        weight = cases.blank_weight(scheme, experts, N, K, device)
    else:
        x, x_scale = cases.random_tokens(rows, product.K, device), None
        weight = cases.random_weight(scheme, experts, N, K, device)
        if not soft:
            x, x_scale = weight.reads(x)
    row_weight = torch.ones(rows, device=device) if down else None
    blocks = _blocks(product, device, configs) if grouped else {}
    return Operands(x, x_scale, weight, row_weight, blocks)


def _blocks(product: Product, device: str, configs: Iterable[Config]) -> dict[int, routing.Routing]:
    """Route the batch once for each block size, so that a product is timed without routing."""
    sizes = {tuning.block_rows(config) for config in configs}
    if device != "meta":
        ids = _chosen(product, device)
        return {size: routing.route(ids, cases.EXPERTS, size) for size in sizes}
    blank = torch.empty(8192, dtype=torch.int32, device=device)
    return {size: routing.Routing(blank, blank, blank, blank, size, cases.TOPK) for size in sizes}


def _chosen(product: Product, device: str) -> torch.Tensor:
    """Return the experts int32 [M, topk] that tokens choose, as unevenly as a model's."""
    spread = cases.SPREAD.get(product.M, min(cases.SPREAD.values()))
    how = {"used": product.used, "spread": spread}
    ids, _ = cases.random_routing(product.M, cases.EXPERTS, cases.TOPK, device, **how)
    return ids


def call(product: Product, o: Operands, config: Config) -> torch.Tensor:
    """Launch one product, as `operations` would, with the configuration `config`; return its result."""
    if product.verb == "soft_embedding":
        sharpness = torch.full((len(o.x),), SHARPNESS, device=o.x.device)
        return dense.soft_embedding(o.x, o.weight.data[0], sharpness, config=config)
    if product.verb == "lm_head":
        return dense.lm_head(o.x, o.weight.data[0], SOFTCAP, config=config)
    blocks = o.blocks[tuning.block_rows(config)] if o.blocks else None
    return o.weight.multiply(o.x, o.x_scale, config, blocks, o.row_weight)


def exact(product: Product, o: Operands) -> torch.Tensor:
    """Return what `call` should return, computed by torch in float32 from the values of `o`."""
    device = str(o.x.device)
    tokens = cases.random_tokens(len(o.x), product.K, device)
    if product.verb == "soft_embedding":
        sharpness = torch.full((len(o.x),), SHARPNESS, device=device)
        return reference.soft_embedding(tokens, o.weight.data[0], sharpness)
    if product.verb == "lm_head":
        return reference.lm_head(tokens, o.weight.data[0], SOFTCAP)
    rows = cases.rounded(tokens, o.weight.scheme).float()
    if product.verb == "linear":
        return rows @ weights.dequantize(o.weight)[0].T
    return _of_experts(rows, o.weight, _chosen(product, device), gated=o.row_weight is None)


def _of_experts(
    rows: torch.Tensor, weight: Weight, ids: torch.Tensor, *, gated: bool
) -> torch.Tensor:
    """Return each choice's product [M * topk, N or N/2] with its expert's weight; `gated`: gelu_mul."""
    experts = ids.flatten().long()
    width = weight.shape[1] // (2 if gated else 1)
    result = rows.new_empty(len(experts), width)
    choices = len(experts) // len(rows)  # of a row
    tensors = [t for t in (weight.data, weight.scale, weight.factor) if t is not None]
    for expert in experts.unique().tolist():
        at = (experts == expert).nonzero()[:, 0]
        matrix = Weight(weight.scheme, *(tensor[expert : expert + 1] for tensor in tensors))
        y = rows[at // choices] @ weights.dequantize(matrix)[0].T
        if gated:
            gate, up = y.unflatten(1, (-1, 2, formats.GATE_UP_RUN)).unbind(2)
            y = reference.gelu_mul(gate.flatten(1), up.flatten(1))
        result[at] = y
    return result


def relative_error(product: Product, config: Config, device: torch.device) -> float:
    """Return the relative error of a launch with a configuration."""
    o = operands(product, str(device), [config])
    return reference.relative_error(call(product, o, config), exact(product, o))
