"""Operating points in a report: which points pass, and whose settings the checkpoint states."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantize.checkpoints.reader import GENERATION
from quantize.host.files import read_json
from quantize.recipe.controls import CONTROLS, JUDGED, SETTINGS
from quantize.recipe.sections import Recipe
from quantize.recovery.gate import Verdict, decides, passing
from quantize.recovery.terms import Comparison
from quantize.runs.models import AT_POINT
from quantize.stages.report.rows import Scores


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
        name: [compared[t] for t in asked]
        for name, compared in points.items()
        if set(compared) == set(asked)
    }
    adjusted = passing(whole) if whole else {}
    entries_of: list[dict[str, Any]] = []
    for name in points:
        entries = [t for t in tasks if t["activations"] == f"at {name}"]
        made = entries[0]["made_with"]
        steps = [
            (c["tokens_per_sample"] * c["samples"], c["tokens_per_forward"])
            for c in (entry["quantized_counts"] for entry in entries)
        ]
        forwards = sum(tokens / rate for tokens, rate in steps)
        p = adjusted.get(name)
        fits = p is not None and decides(p, recipe.gate.confidence) and verdict.outcome != "FAIL"
        entries_of.append({
            "name": name,
            "activations": made["model"]["activations"],
            "settings": _judged(made["sampler"]),
            "tokens_per_forward": sum(tokens for tokens, _ in steps) / forwards,
            "tokens_a_second": speeds and speeds["tokens_a_second"][AT_POINT + name],
            "p": p,
            "passes": fits,
        })  # fmt: skip
    by = "tokens_a_second" if speeds else "tokens_per_forward"
    return sorted(entries_of, key=lambda point: -point[by])


def settings_served(
    checkpoint: Path, tasks: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]
) -> tuple[str | None, str | None]:
    """Compare the settings that a checkpoint states with those that were judged.

    Returns:
        (None, None) if the candidate was judged at the stated settings. Else (name, None) if the
        passing operating point `name` has them. Else (None, a sentence on a setting that differs).
    """
    path = checkpoint / GENERATION
    stated = _stated(path)
    noted = next((t["made_with"].get("sampler", {}) for t in tasks if t["gated"]), {})
    judged = noted | _judged(noted)

    def differs(settings: Mapping[str, Any]) -> str | None:
        keys = sorted(stated.keys() & settings.keys())
        return next((key for key in keys if stated[key] != settings[key]), None)

    key = differs(judged)
    if key is None:
        return None, None
    for point in points:
        if point["passes"] and differs(judged | point["settings"]) is None:
            return point["name"], None
    return None, (
        f"{path}: {key} is {stated[key]}, and the answers were judged at {judged[key]}; `quantize "
        f"adopt` writes the settings of a point that passes, or with --own the model's"
    )


def _stated(path: Path) -> dict[str, Any]:
    """Return each control's value under a generation_config.json; servers read null as the default."""
    config = read_json(path) if path.is_file() else {}
    config |= config.get("sampler_config") or {}
    values = {key: config.get(key) for key in CONTROLS}
    return {k: CONTROLS[k].default if value is None else value for k, value in values.items()}


def settings_judged(tasks: Sequence[Mapping[str, Any]], scores: Scores) -> str:
    """Return a sentence: at which settings a checkpoint built elsewhere and BF16 were judged."""
    entry = next((task for task in tasks if task["gated"]), None)
    if entry is None:
        return "No task was asked, so no setting was judged."
    ours, theirs = entry["made_with"].get("sampler", {}), scores.both(entry["task"])[0].made_with
    if not ours.keys() & SETTINGS:
        return "Judged at the settings of the server that answered."
    bf16 = theirs.get("sampler", {})
    unlike = [
        f"{key} {_in_words(ours.get(key))} (BF16 {_in_words(bf16.get(key))})"
        for key in sorted(SETTINGS & (ours.keys() | bf16.keys()))
        if ours.get(key) != bf16.get(key)
    ]
    which = ", ".join(unlike) or "which are BF16's"
    return f"Judged at the settings that the checkpoint's own {GENERATION} states: {which}."


def _in_words(setting: Any) -> str:
    return "not stated" if setting is None else str(setting)


def _judged(noted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the judged settings, with defaults for those not noted; {} for a server's sampler."""
    return {key: noted.get(key, CONTROLS[key].default) for key in sorted(JUDGED) if noted}
