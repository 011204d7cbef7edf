"""Says which activation mode a gate judged a checkpoint in, and which mode this server multiplies in.

The gate scores NVFP4's activations as Blackwell rounds them (`per_layer`). Without `--activations` this
server leaves them in BF16, on every GPU. So what was judged may not be what is served.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from quantize.checkpoints.layout import stated_schemes
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import QuantizeError
from quantize.host.files import read_json
from quantize.runs.folder import RESULTS, RunDir
from quantize.runs.weights import Weights
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import Scheme

NOTED = re.compile(r"; activations (\w+)")  # in the notes of a release's scores (`reports.card`)


def judged_modes(checkpoint: Path, digest: str) -> list[str] | None:
    """Return the activation modes of a checkpoint's gated scores; None if nothing beside it tells them.

    The checkpoint's run tells them, if it has verified weights with the fingerprint `digest`; else the
    files of scores that a release holds.
    """
    run = RunDir(checkpoint.resolve().parent)
    try:
        if run.report_json.is_file() and digest in Weights.of(run).checkpoint:
            tasks = read_json(run.report_json, "tasks")["tasks"]
            return sorted({task["activations"] for task in tasks if task["gated"]}) or None
        texts = [path.read_text("utf-8") for path in (checkpoint / RESULTS).glob("*.yaml")]
    except (OSError, KeyError, QuantizeError):
        return None  # another folder's files, or half a run
    return (
        sorted({mode for text in texts for mode in NOTED.findall(" ".join(text.split()))}) or None
    )


def served_mode(opened: Checkpoint, activations: ActivationMode | None) -> str:
    """Return how this server rounds activations: the mode, or what it does beside which weights."""
    stated = stated_schemes(opened.config)
    if activations or stated is None:
        return activations or "none"
    rounded = set(_rounding(stated.used, None).values())
    if len(rounded) > 1:
        return "none beside 4 bits, 8 bits beside 8 bits"
    return "8 bits" if "8" in rounded else "none"


def mode_line(
    opened: Checkpoint, activations: ActivationMode | None, judged: Iterable[str] | None
) -> str | None:
    """Return a sentence on the judged modes and the served mode; None for a BF16 checkpoint."""
    stated = stated_schemes(opened.config)
    if stated is None:
        return None
    schemes, served = stated.used, served_mode(opened, activations)
    if judged is None:
        return f"activations are served as {served}; no report or score here says which were judged"
    said = ", ".join(judged)
    others = [m for m in judged if _rounding(schemes, m) != _rounding(schemes, activations)]
    if not others:
        return f"activations are served as they were judged ({said})"
    return (
        f"judged with activations {said}, and served with others ({served}): `--activations "
        f"{others[0]}` serves what was judged; `quantize evaluate RUN --activations "
        f"{activations or 'none'}` judges what is served"
    )


def _rounding(schemes: Iterable[Scheme], mode: str | None) -> dict[str, str]:
    """Return scheme -> how a mode rounds what its weights are multiplied with (`schemes.modes`)."""
    rounded: dict[str, str] = {}
    for scheme in schemes:
        if scheme.calibrated or (mode == "fp8" and scheme.kernel == "nvfp4"):
            rounded[scheme.name] = mode or "none"
        else:
            kept = mode == "none" or not scheme.config_activations
            rounded[scheme.name] = "none" if kept else "8"
    return rounded
