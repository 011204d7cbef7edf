"""Measures tokens/s of scored models on this GPU, with the numbers of steps that their answers took.

Noise, prompts and slots are equal for all models. So speeds differ only by weight format and steps.
Models run as they are served: the GPU's kernels decide how a quantized model rounds activations, unless
its operating point names an activation mode.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from quantize.bench.adaptive import speeds
from quantize.checkpoints.reader import Checkpoint
from quantize.host.files import read_json, write_json
from quantize.host.progress import say
from quantize.recipe.sections import AT_ONCE, OperatingPoint
from quantize.reports.scores import read_scoring, scored_tasks
from quantize.runs.folder import RunDir
from quantize.runs.models import AT_POINT, BASELINE, CANDIDATE
from quantize.runs.weights import scored_weights
from quantize.runtime.gpu.placement import Placement, free_unused
from quantize.schemes.modes import ActivationMode

CONTEXT = 1024  # tokens before the first canvas, as `quantize bench` has them


def measure_speeds(
    run: RunDir, source: Path, points: Mapping[str, OperatingPoint], place: Placement
) -> None:
    """Write evaluation/speeds.json: tokens/s of BF16, the candidate and its operating `points`.

    Rates of other points stay if they were measured on this GPU, at steps that these weights took.
    """
    served: dict[tuple[Path, ActivationMode | None], list[str]] = {(source, None): [BASELINE]}
    served[run.checkpoint, None] = [CANDIDATE]
    for name, point in points.items():
        served.setdefault((run.checkpoint, point.activations), []).append(AT_POINT + name)
    canvas = int(Checkpoint.open(source).config["canvas_length"])
    by_setting: dict[str, float] = {}
    for (folder, mode), models in served.items():
        say(f"tokens/s of {', '.join(models)} at the steps that their answers took")
        at = replace(place, activations=mode, capacity=AT_ONCE, max_context=CONTEXT + 2 * canvas)
        by_setting |= speeds(folder, at, CONTEXT, {name: _steps(run, name) for name in models})
        free_unused(place.device)
    path = run.evaluation / "speeds.json"
    about = {"device": torch.cuda.get_device_name(), "slots": AT_ONCE, "context": CONTEXT}
    about |= {"weights": scored_weights(run)}
    before = read_json(path) if path.exists() else {}
    earlier = before["tokens_a_second"] if before.items() >= about.items() else {}
    rates = {name: round(rate, 1) for name, rate in by_setting.items()}
    write_json(path, about | {"tokens_a_second": earlier | rates})


def _steps(run: RunDir, model: str) -> list[int]:
    folder = run.evaluation / model
    tasks = [task for task in scored_tasks(run) if (folder / f"{task}.jsonl").exists()]
    rows = [row for task in tasks for row in read_scoring(folder, task).rows]
    return [steps for row in rows for steps in row.denoising_steps]
