"""Judges a run; writes report.json and the files that show the verdict, which gates a release.

`quantize/reports/report.schema.json` says what every key of report.json holds. The other files are
rendered from it. report.md is appended to the file that $GITHUB_STEP_SUMMARY names (docs/ci.md).
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from quantize.checkpoints.targets import Target, module_class, sum_bytes
from quantize.errors import InputError
from quantize.host.files import TEMPORARY_SUFFIX, read_json, write_json, write_text
from quantize.host.progress import say
from quantize.recipe.sections import Recipe
from quantize.recovery.gate import Verdict, judge, judge_task
from quantize.recovery.terms import Comparison
from quantize.reports.junit import junit
from quantize.reports.provenance import made
from quantize.reports.questions import questions_and_canvases, unread
from quantize.reports.render import html, markdown
from quantize.runs.digests import sha256_of
from quantize.runs.folder import RunDir
from quantize.runs.models import AT_POINT, BASELINE, BASELINE_AGAIN, CANDIDATE
from quantize.stages.report.points import judged_points, settings_judged, settings_served
from quantize.stages.report.rows import Scores, other_looks

DECODER_LAYER = re.compile(r"model\.decoder\.layers\.(\d+)\.")
FIDELITY = ("faults", "activations", "own_conditioning", "max_kl_nats")


def report(
    run: RunDir, recipe: Recipe, targets: list[Target], *, not_reached: Sequence[str] = ()
) -> Verdict:
    """Judge a run, write report.json, report.md, report.html and junit.xml, and return the verdict.

    `not_reached` names the stages that a failed check kept from running: their results of earlier
    tries, if any, are not read. Raise InputError if another stage that the report needs has not been
    run, or scores were changed.
    """
    judged, verdict = judge_run(run, recipe, not_reached)
    for sentence in judged.get("not_read", []):
        say(sentence)
    manifest = _needed(run.manifest_json, "run")
    verification = _needed(run.verification_json, "verify")
    comparable = (t["task"] for t in judged["tasks"] if t["gated"] and not t["not_comparable"])
    scores = Scores(run, recipe)
    pairs = {task: scores.both(task) for task in comparable}
    questions, canvases = questions_and_canvases(run, pairs)
    before, after = sum_bytes(targets)
    content = {
        "format": 2,
        "not_read": [],
        "judged_settings": None,
        "not_reached": [],
        **judged,
        "sizes": {
            "bf16_bytes": before,
            "quantized_bytes": after,
            "ratio": after / before,
            "quantized_modules": sum(len(target.modules) for target in targets),
        },
        "layers": _layers(targets, verification["relative_error"]),
        "error": _errors(verification["relative_error"]),
        "verification": {key: verification[key] for key in ("passed", "checks")},
        "coverage": _coverage(run),
        "schemes": sorted(recipe.quantization.targets_by_scheme()),
        "questions": questions,
        "canvases": canvases,
        "no_answer": {
            task: {BASELINE: unread(base), CANDIDATE: unread(other)}
            for task, (base, other) in pairs.items()
        },
        "made": made(manifest),
        "stages": manifest["stages"],
    }
    write_json(run.report_json, content)
    write_text(run.report_md, markdown(content))
    write_text(run.report_html, html(content))
    write_text(run.junit_xml, junit(content))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(markdown(content))
    return verdict


def check_report(run: RunDir, recipe: Recipe) -> None:
    """Judge a run again; raise InputError if report.json differs from what the run's files give."""
    judged, _ = judge_run(run, recipe)
    stands = read_json(run.report_json, *judged)
    for key, value in json.loads(json.dumps(judged)).items():
        if stands[key] != value:
            raise InputError(
                f"{run.report_json}: {key!r} is not what the run's files give; it was changed, or they "
                f"were: run `quantize report` again"
            )


def judge_run(
    run: RunDir, recipe: Recipe, not_reached: Sequence[str] = ()
) -> tuple[dict[str, Any], Verdict]:
    """Return the part of report.json that judging or publishing needs, and the verdict.

    `not_reached` names the stages that a failed check kept from running.

    Raise InputError if baseline or candidate were scored on other weights than the run has now. Rows
    of further models are then not read; sentences under the key `not_read`, if any, name them.
    """
    verification = _needed(run.verification_json, "verify")
    manifest = _needed(run.manifest_json, "run")
    is_scored = "evaluate" not in not_reached
    unscored: dict[str, Any] = {"tasks": [], "looks": {}}
    done = _needed(run.evaluation / "done.json", "evaluate") if is_scored else unscored
    scores = Scores(run, recipe, as_served="judged" in manifest)
    scores.not_read += filter(None, [other_looks(run)] if is_scored else [])
    # Task -> the candidate's comparison; None if the verdict was certain before the task was asked.
    comparisons: dict[str, Comparison | None] = dict.fromkeys(recipe.evaluation.tasks)
    tasks: list[dict[str, Any]] = []
    points: dict[str, dict[str, Comparison]] = {}
    for task in (task for task in recipe.evaluation.tasks if task in done["tasks"]):
        for name, mode in scores.candidates(task).items():
            entry, comparison = scores.entry(task, name)
            if name.startswith(AT_POINT) and comparison is not None:
                points.setdefault(name.removeprefix(AT_POINT), {})[task] = comparison
            alone = judge_task(task, comparison).outcome if comparison else None
            about = {"task": task, "activations": mode, "gated": name == CANDIDATE}
            tasks.append(about | {"outcome": alone} | entry)
            if name == CANDIDATE and comparison is not None:
                comparisons[task] = comparison
    was_replayed = run.fidelity_json.exists() and "fidelity" not in not_reached
    fidelity = read_json(run.fidelity_json, *FIDELITY) if was_replayed else None
    verdict = _verdict(verification, fidelity, tasks, comparisons)
    speeds = scores.speeds([BASELINE, CANDIDATE, *(AT_POINT + name for name in points)])
    at_points = judged_points(points, tasks, recipe, verdict, speeds)
    served_at, unjudged = settings_served(run.checkpoint, tasks, at_points)
    if unjudged and verdict.outcome == "PASS":
        verdict = Verdict("FAIL", unjudged, verdict.estimand)
    judged = {
        "model": manifest["source"],
        "versions": manifest["versions"],
        "hardware": manifest["hardware"],
        "artifact": verification.get("artifact"),
        "recipe": {"name": recipe.name, "scheme": recipe.quantization.scheme},
        "verdict": {
            **asdict(verdict),
            "estimand": recipe.gate.estimand,
            "exit_code": verdict.exit_code,
        },
        "tasks": tasks,
        "not_asked": [task for task in recipe.evaluation.tasks if task not in done["tasks"]],
        "looks": done.get("looks", {}),
        "noise_floor": [  # BF16 against itself under another seed: the effect of noise only
            {"task": task} | scores.entry(task, BASELINE_AGAIN)[0]
            for task in recipe.evaluation.tasks
            if is_scored and scores.has(BASELINE_AGAIN, task)
        ],
        "speeds": speeds,
        "operating_points": at_points,
        "served_at": served_at,
        "baseline": _imported(run, done["tasks"]),
        "fidelity": fidelity,
        "evidence": _evidence(run),
    }
    # Keys that a report of an earlier version lacks, where it has nothing to say of them.
    judged |= {"not_read": scores.not_read} if scores.not_read else {}
    judged |= {"not_reached": list(not_reached)} if not_reached else {}
    judged |= {"judged_settings": settings_judged(tasks, scores)} if scores.as_served else {}
    return judged, verdict


def _evidence(run: RunDir) -> dict[str, str]:
    scores = (file for file in run.evaluation.glob("*/*") if TEMPORARY_SUFFIX not in file.name)
    files = [file for file in (run.recipe_yaml, *sorted(scores)) if file.is_file()]
    return {file.relative_to(run.path).as_posix(): sha256_of(file) for file in files}


def _needed(path: Path, stage: str) -> Any:
    if not path.exists():
        raise InputError(f"{path}: missing; run `quantize {stage}` first")
    keys = {
        "run": ("source", "versions", "hardware", "stages"),
        "verify": ("passed", "checks", "relative_error"),
        "evaluate": ("tasks", "looks"),
    }
    return read_json(path, *keys[stage])


def _imported(run: RunDir, tasks: Sequence[str]) -> dict[str, Any] | None:
    """Return where BF16's answers were made, None if they were made here."""
    paths = (run.evaluation / BASELINE / f"{task}.conditions.json" for task in tasks)
    models = [read_json(path, "made_with")["made_with"].get("model", {}) for path in paths]
    pack = next((model["imported"] for model in models if "imported" in model), None)
    path = run.spot_check_json
    checked = read_json(path, "pack", "said") if pack and path.exists() else {"pack": None}
    if pack and checked["pack"] == pack["pack"]:
        return pack | {"spot_check": checked["said"]}
    return pack


def _verdict(
    verification: Mapping[str, Any],
    fidelity: Mapping[str, Any] | None,
    tasks: Sequence[Mapping[str, Any]],
    comparisons: Mapping[str, Comparison | None],
) -> Verdict:
    if not verification["passed"]:
        faults = [fault for check in verification["checks"] for fault in check["faults"]]
        reason = faults[0] if faults else "a check looked at nothing"
        return Verdict("FAIL", f"static verification: {reason}")
    if fidelity and fidelity["faults"]:
        return Verdict("FAIL", f"fidelity: {fidelity['faults'][0]}")
    for entry in tasks:
        if entry["gated"] and entry["not_comparable"]:
            return Verdict("NOT COMPARABLE", f"{entry['task']}: {entry['not_comparable']}")
    return judge(comparisons)


def _layers(targets: list[Target], relative_error: Mapping[str, float]) -> list[dict[str, Any]]:
    layers: dict[int, list[Target]] = {}
    for target in targets:
        if match := DECODER_LAYER.match(target.name):
            layers.setdefault(int(match[1]), []).append(target)
    rows: list[dict[str, Any]] = []
    for index, of_layer in sorted(layers.items()):
        before, after = sum_bytes(of_layer)
        errors = {t.name: relative_error[t.name] for t in of_layer if t.name in relative_error}
        means = {kind: mean(of_class.values()) for kind, of_class in _by_class(errors).items()}
        rows.append({"layer": index, "bytes_before": before, "bytes_after": after, "error": means})
    return rows


def _by_class(relative_error: Mapping[str, float]) -> dict[str, dict[str, float]]:
    by_class: dict[str, dict[str, float]] = {}
    for name, error in relative_error.items():
        by_class.setdefault(module_class(name), {})[name] = error
    return dict(sorted(by_class.items()))


def _errors(relative_error: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "class": kind,
            "tensors": len(errors),
            "mean": mean(errors.values()),
            "largest": max(errors.values()),
            "where": max(errors, key=lambda name: errors[name]),
        }
        for kind, errors in _by_class(relative_error).items()
    ]


def _coverage(run: RunDir) -> dict[str, Any] | None:
    path = run.calibration / "coverage.json"
    if not path.exists():
        return None
    coverage = read_json(path, "tokens_per_expert", "min_tokens_per_expert", "fallbacks")
    tokens = [count for layer in coverage["tokens_per_expert"].values() for count in layer]
    return {
        "experts": len(tokens),
        "least_tokens": min(tokens),
        "median_tokens": median(tokens),
        "most_tokens": max(tokens),
        "by_layer": coverage["tokens_per_expert"],
        "min_tokens_per_expert": coverage["min_tokens_per_expert"],
        "fallbacks": coverage["fallbacks"],
    }
