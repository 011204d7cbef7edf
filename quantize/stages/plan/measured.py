"""Reads what measured.json knows of a model and is else assumed: steps a canvas, and experts hit."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from quantize.errors import InputError
from quantize.host.files import read_json
from quantize.stages.plan.gpu_support import AS_ASSUMED, CanvasWork

REMEDY = "make it again with `quantize measure`"


def measured_denoising(path: Path | None, config: Mapping[str, Any]) -> CanvasWork:
    """Return what `quantize measure` found of the model with this `config`, all prompts together.

    Without a file (None), return what is assumed. Raise InputError if the file is damaged, or is of a
    model with other layers or experts.
    """
    if path is None:
        return AS_ASSUMED
    keys = ("by_step", "kinds.all.steps_per_canvas", "schema_version")
    content = read_json(path, *keys, remedy=REMEDY)
    text, hits = config["text_config"], [step["experts_hit"] for step in content["by_step"]]
    layers, experts = text["num_hidden_layers"], text["num_experts"]
    if not hits or any(len(hit) != layers or max(hit) > experts for hit in hits):
        raise InputError(
            f"{path}: was not measured on a model of {layers} layers with {experts} experts; {REMEDY}"
        )
    canvases = [step["canvases"] for step in content["by_step"]]
    weighted = (fmean(hit) * count for hit, count in zip(hits, canvases, strict=True))
    hit = sum(weighted) / sum(canvases) / experts
    return CanvasWork(content["kinds"]["all"]["steps_per_canvas"], hit)
