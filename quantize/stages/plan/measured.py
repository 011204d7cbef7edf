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

    Without a file (None), return what is assumed. Raise InputError if the file is damaged or edited, or
    is of a model with other layers or experts.
    """
    if path is None:
        return AS_ASSUMED
    keys = ("by_step", "kinds.all.steps_per_canvas", "schema_version")
    content = read_json(path, *keys, remedy=REMEDY)
    text = config["text_config"]
    layers, experts = text["num_hidden_layers"], text["num_experts"]
    if not _fits(content, layers, experts):
        raise InputError(
            f"{path}: was not measured on a model of {layers} layers with {experts} experts, was "
            f"edited, or is of another version; {REMEDY}"
        )
    weights = [step["canvases"] for step in content["by_step"]]
    hit = fmean([fmean(step["experts_hit"]) for step in content["by_step"]], weights)
    return CanvasWork(content["kinds"]["all"]["steps_per_canvas"], hit / experts)


def _fits(content: Any, layers: int, experts: int) -> bool:
    try:
        hits = [step["experts_hit"] for step in content["by_step"]]
        counts = (
            content["kinds"]["all"]["steps_per_canvas"],
            *(s["canvases"] for s in content["by_step"]),
        )
        sound = content["schema_version"] == 1 <= min(counts) and bool(hits)
        return sound and all(len(h) == layers and 0 < min(h) <= max(h) <= experts for h in hits)
    except (KeyError, TypeError):
        return False
