"""The experiment on Hessians: sums of rounded inputs, and weights that make up for the rounding."""

import torch
from experiments.hessians import SOURCE, BothInputs
from experiments.rounding import VARIANTS

from quantize.checkpoints.targets import plan_targets
from quantize.stages.round_weights.round_weights import units_of

SCALE = 448 * 6 / 4.0  # of inputs up to 4


def test_aimed_weights_lose_less_on_rounded_inputs() -> None:
    targets = plan_targets(SOURCE.tensors, VARIANTS["a16-gptq"].quantization())
    unit = next(unit for unit in units_of(targets) if unit.reads.endswith("mlp.down_proj"))
    weight = SOURCE.read(unit.targets[0].name)
    inputs, noise = weight.shape[-1], torch.Generator().manual_seed(0)
    mixed = torch.randn(4 * inputs, 4, generator=noise) @ torch.randn(4, inputs, generator=noise)
    x = mixed / mixed.abs().max() * 4  # of few directions: in the others, rounding is all there is
    hessians = BothInputs([unit], 8, {unit.reads: SCALE})
    hessians.see(unit.reads, x, None)
    assert unit.scheme.round_activations is not None
    seen = unit.scheme.round_activations(x, SCALE)
    for which, rows in enumerate((x, seen)):
        found = hessians.half(which).mean(unit.reads, slice(None))[0]
        assert torch.allclose(found, rows.T @ rows / len(x), atol=1e-4)
    right = x @ weight.float().T
    loss, aimed = (
        (right - seen @ each.float().T).square().mean()
        for each in (weight, hessians.aimed(unit.reads, weight))
    )
    assert aimed < 0.95 * loss
