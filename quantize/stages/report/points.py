"""Operating points in a report: which points pass, and whose settings the checkpoint states."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantize.checkpoints.reader import GENERATION
from quantize.host.files import read_json
from quantize.recipe.controls import CONTROLS, JUDGED
from quantize.recipe.sections import Recipe
from quantize.recovery.gate import Verdict, passing
from quantize.recovery.statistics import Comparison
from quantize.runs.folder import RunDir
from quantize.runs.models import AT_POINT


def judged_points(
    points: Mapping[str, Mapping[str, Comparison]],
    tasks: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    verdict: Verdict,
    speeds: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Return report.json's entries on operating points, fastest first; each says if it passes."""
    asked = [task for task in recipe.evaluation.tasks if any(t["task"] == task for t in tasks)]
    whole = {
        name: [each[t] for t in asked] for name, each in points.items() if set(each) == set(asked)
    }
    adjusted = passing(whole) if whole else {}
    found: list[dict[str, Any]] = []
    for name in points:
        entries = [t for t in tasks if t["activations"] == f"at {name}"]
        made = entries[0]["made_with"]
        steps = [
            (c["tokens_per_sample"] * c["samples"], c["tokens_per_forward"])
            for c in (entry["quantized_counts"] for entry in entries)
        ]
        forwards = sum(tokens / rate for tokens, rate in steps)
        p = adjusted.get(name)
        fits = p is not None and p <= 1 - recipe.gate.confidence and verdict.outcome != "FAIL"
        found.append({
            "name": name,
            "activations": made["model"]["activations"],
            "settings": _judged(made["sampler"]),
            "tokens_per_forward": sum(tokens for tokens, _ in steps) / forwards,
            "tokens_a_second": speeds and speeds["tokens_a_second"][AT_POINT + name],
            "p": p,
            "passes": fits,
        })  # fmt: skip
    by = "tokens_a_second" if speeds else "tokens_per_forward"
    return sorted(found, key=lambda point: -point[by])


def measured_speeds(run: RunDir, models: Sequence[str]) -> dict[str, Any] | None:
    """Return evaluation/speeds.json (device, tokens/s by model) if it has all `models`, else None."""
    path = run.evaluation / "speeds.json"
    found = read_json(path, "device", "tokens_a_second") if path.exists() else None
    return found if found and found["tokens_a_second"].keys() >= set(models) else None


def settings_served(
    checkpoint: Path, tasks: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]
) -> tuple[str | None, str | None]:
    """Compare the settings that a checkpoint states with those that were judged.

    Returns:
        (None, None) if the candidate was judged at the stated settings. Else (name, None) if the
        passing operating point `name` has them. Else (None, a sentence on a setting that differs).
    """
    path = checkpoint / GENERATION
    stated = read_json(path) if path.is_file() else {}
    stated |= stated.get("sampler_config") or {}
    judged = _judged(next((t["made_with"].get("sampler", {}) for t in tasks if t["gated"]), {}))

    def differs(settings: Mapping[str, Any]) -> str | None:
        keys = sorted(JUDGED & stated.keys() & settings.keys())  # null means the model's own value
        return next((k for k in keys if stated[k] not in (None, settings[k])), None)

    key = differs(judged)
    if key is None:
        return None, None
    for point in points:
        if point["passes"] and differs(point["settings"]) is None:
            return point["name"], None
    return None, (
        f"{path}: {key} is {stated[key]}, and the answers were judged at {judged[key]}; `quantize "
        f"adopt` writes the settings of a point that passes, or with --own the model's"
    )


def _judged(noted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the judged settings, with defaults for those not noted; {} for a server's sampler."""
    return {key: noted.get(key, CONTROLS[key].default) for key in sorted(JUDGED) if noted}
