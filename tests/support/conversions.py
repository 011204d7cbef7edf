"""Conversions with made-up input scales, for every test that needs a quantized checkpoint."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, fused_with, plan_targets
from quantize.host.files import write_json
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Recipe
from quantize.runs.digests import xxh3_of
from quantize.schemes.records import SCHEMES
from quantize.stages.convert.convert import Conversion, convert
from tests.support.tiny import LAYERS

DENSE = LAYERS * 7 - 1  # q, k, v, o, gate, up, down a layer; the full-attention layer has no v
IGNORE = ["lm_head", "re:.*router.*", "re:.*self_conditioning.*", "re:.*vision.*"]
MIXED = {
    "NVFP4": ["re:.*experts.*"],
    "FP8_DYNAMIC": ["re:.*self_attn.*", r"re:.*\.mlp\..*"],
}


def recipe_for(scheme: str | dict[str, list[str]], observer="memoryless_minmax") -> Recipe:
    recipe = load_recipe("nvfp4_w4a4")
    changed = {**recipe.quantization.model_dump(), "scheme": scheme, "observer": observer}
    limits = {name: record.max_relative_error for name, record in SCHEMES.items()}
    fields = {"quantization": changed, "verification": {"max_relative_error": limits}}
    return Recipe.model_validate({**recipe.model_dump(), **fields})


def write_input_scales(path: Path, targets: list[Target]) -> dict[str, float]:
    """Write a scale for every NVFP4 module, one of its own for every input."""
    modules = [m for t in targets if t.scheme and t.scheme.calibrated for m in t.modules]
    inputs = {m: fused_with(m) for m in modules}  # what a server fuses reads one input
    order = {name: i for i, name in enumerate(dict.fromkeys(inputs.values()))}
    scales = {m: 100.0 + order[name] for m, name in inputs.items()}
    tensors = {f"{m}.input_global_scale": torch.tensor([s]) for m, s in scales.items()}
    save_file(tensors, path)
    return scales


def note_codes(folder: Path) -> None:
    """Write rounding.json, as `round_weights` does, for layers that a test made up."""
    files = {path.name: xxh3_of(path) for path in sorted(folder.glob("layer-*.safetensors"))}
    write_json(folder / "rounding.json", {"files": files})


def run(
    source_folder: Path, out: Path, recipe: Recipe, **options: object
) -> tuple[Conversion, list[Target]]:
    """Convert with made-up input scales."""
    source = Checkpoint.open(source_folder)
    targets = plan_targets(source.tensors, recipe.quantization)
    path = out.with_name("input_scales.safetensors")
    needed = any(t.scheme and t.scheme.calibrated for t in targets)
    if needed:
        write_input_scales(path, targets)
    result = convert(
        source, targets, out, recipe=recipe, input_scales=path if needed else None, **options
    )
    return result, targets
