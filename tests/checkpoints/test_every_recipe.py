"""Every recipe that ships, and every variant that docs/rounding.md measures, on the bundled model: what
`quantize run` writes passes `verify`, and both loaders read the same weights from it.
"""

from pathlib import Path

import pytest
import torch
import yaml
from experiments.rounding import VARIANTS
from fused_dequant.formats import interleave_gate_up
from fused_dequant.weights import Weight, dequantize

import quantize
from quantize.host.files import read_json
from quantize.recipe.reading import shipped_recipes
from quantize.runtime.weights.load import load_packed
from quantize.schemes.records import SCHEMES
from tests.support.quick_run import in_few_steps

CALIBRATION = {
    "datasets": ["bundled"], "prompts": 2, "canvases": 1, "batch_size": 4, "thinking": 0.5, "seed": 0,
    "min_tokens_per_expert": 1,
}  # fmt: skip
CASES = [
    *sorted(shipped_recipes()),
    *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS),
]


def recipe_file(name: str, folder: Path) -> Path:
    """Write a recipe that ships, or `nvfp4` in a variant of it, that calibrates on a few prompts."""
    fields = yaml.safe_load(shipped_recipes().get(name) or shipped_recipes()["nvfp4"])
    if name in VARIANTS:
        fields["quantization"] = VARIANTS[name].quantization().model_dump(exclude_none=True)
        rounding = VARIANTS[name].rounding
        limits = {scheme: record.largest_error(rounding) for scheme, record in SCHEMES.items()}
        fields["verification"]["max_relative_error"] = limits
    if "calibration" in fields:
        fields["calibration"] = fields["bundled"]["calibration"] = CALIBRATION
    path = folder / f"{fields['name']}.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def values(*weights: Weight) -> torch.Tensor:
    """Return what the kernels multiply with, [..., out, in] in BF16, as transformers holds it."""
    return torch.cat([dequantize(weight) for weight in weights], -2).bfloat16()


@pytest.mark.parametrize("name", CASES)
def test_its_checkpoint_passes_verify_and_loads_alike_in_both_loaders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantize.stages.denoising.HELD_OUT", 1)
    in_few_steps(monkeypatch)
    run = quantize.run(str(recipe_file(name, tmp_path)), out=tmp_path, until="verify").folder
    assert read_json(run.verification_json)["passed"] is True
    modules = quantize.load(run.checkpoint)
    packed = load_packed(run.checkpoint, "cpu")
    assert len(packed.layers) == len(modules.model.decoder.layers) > 0
    for ours, theirs in zip(packed.layers, modules.model.decoder.layers, strict=True):
        attention, mlp, experts = theirs.self_attn, theirs.mlp, theirs.experts
        heads = (attention.q_proj, attention.k_proj, *([attention.v_proj] if ours.sliding else []))
        expected = {
            "qkv": torch.cat([head.weight for head in heads]),
            "o": attention.o_proj.weight,
            "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "down": mlp.down_proj.weight,
            "experts_gate_up": interleave_gate_up(*experts.gate_up_proj.chunk(2, 1)),
            "experts_down": experts.down_proj,
        }
        for part, right in expected.items():
            held = getattr(ours, part)
            held = values(*(held if isinstance(held, tuple) else (held,)))
            assert torch.equal(held.squeeze(), right.bfloat16()), part
