"""The report of a run: report.json is everything, report.md shows it; the verdict gates the release.

report.json, by key:
  model         which model, and whether it is the small bundled one
  recipe        name and scheme
  verdict       outcome, reason, exit_code
  sizes         bytes of BF16, of the artifact, planned; quantized modules
  verification  passed, one line a check
  error         relative error by module class: tensors, mean, largest, where
  coverage      tokens per expert: least, median, most; experts that fell back
  tasks         one entry a task and activation mode: the paired comparison and what else was counted
  fidelity      fidelity.json as it is, None when there is none
  versions, hardware, stages   from the manifest
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from recovery.gate import Verdict, judge, not_comparable
from recovery.scoring import Row, Scoring
from recovery.statistics import Comparison, compare

from quantize.errors import InputError
from quantize.recipe import ActivationMode, Recipe
from quantize.run_dir import RunDir, read_json, write_json, write_text
from quantize.targets import Target, module_class, sum_bytes

BUNDLED_NOTE = (
    "This is the small model that ships with quantize, trained on word problems. It is not Google's "
    "26B checkpoint, and nothing here is a claim about that one."
)


def report(run: RunDir, recipe: Recipe, targets: list[Target]) -> Verdict:
    """Read a run folder, judge it, and write report.json and report.md.

    Raises:
        InputError: a stage that the report needs has not been run.
    """
    manifest = _needed(run.manifest_json, "run")
    verification = _needed(run.verification_json, "verify")
    modes: dict[str, ActivationMode] = {"quantized": recipe.evaluation.activations}
    modes |= _more_modes(run)
    tasks = [
        entry
        for task in recipe.evaluation.tasks
        for entry in _task_entries(run, task, modes, recipe)
    ]
    verdict = _verdict(verification, tasks, recipe)
    content = {
        "model": manifest["source"],
        "recipe": {"name": recipe.name, "scheme": recipe.quantization.scheme},
        "verdict": {**asdict(verdict), "exit_code": verdict.exit_code},
        "sizes": _sizes(targets),
        "verification": {
            "passed": verification["passed"],
            "checks": verification["checks"],
        },
        "error": _errors(verification["relative_error"]),
        "coverage": _coverage(run),
        "tasks": [entry["json"] for entry in tasks],
        "fidelity": read_json(run.fidelity_json) if run.fidelity_json.exists() else None,
        "versions": manifest["versions"],
        "hardware": manifest["hardware"],
        "stages": manifest["stages"],
    }
    write_json(run.report_json, content)
    write_text(run.report_md, markdown(content))
    return verdict


def _needed(path: Path, stage: str) -> Any:
    if not path.exists():
        raise InputError(f"{path}: missing; run `quantize {stage}` first")
    return read_json(path)


def _more_modes(run: RunDir) -> dict[str, ActivationMode]:
    """Return the sides that were scored besides the gated one."""
    known: dict[str, ActivationMode] = {
        "quantized-none": "none",
        "quantized-per-expert": "per_expert",
        "quantized-per-layer": "per_layer",
    }
    return {side: mode for side, mode in known.items() if (run.evaluation / side).is_dir()}


def _task_entries(
    run: RunDir, task: str, modes: dict[str, ActivationMode], recipe: Recipe
) -> list[dict[str, Any]]:
    base = read_scoring(run.evaluation / "bf16", task)
    entries: list[dict[str, Any]] = []
    for side, mode in modes.items():
        quantized = read_scoring(run.evaluation / side, task)
        differs = not_comparable(base.conditions, quantized.conditions)
        comparison = (
            None
            if differs
            else compare(
                base.by_question(),
                quantized.by_question(),
                margin_pp=recipe.gate.margin_pp[task],
                confidence=recipe.gate.confidence,
            )
        )
        entries.append(
            {
                "gated": side == "quantized",
                "task": task,
                "comparison": comparison,
                "differs": differs,
                "json": {
                    "task": task,
                    "activations": mode,
                    "gated": side == "quantized",
                    "margin_pp": recipe.gate.margin_pp[task],
                    "not_comparable": differs.reason if differs else None,
                    **(asdict(comparison) if comparison else {}),
                    "bf16_counts": counts(base.rows),
                    "quantized_counts": counts(quantized.rows),
                },
            }
        )
    return entries


def read_scoring(folder: Path, task: str) -> Scoring:
    """Read a scoring that evaluate wrote.

    Raises:
        InputError: it is not there.
    """
    path = folder / f"{task}.jsonl"
    if not path.exists():
        raise InputError(f"{path}: missing; run `quantize evaluate` first")
    rows = [Row(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    return Scoring(task, rows, **read_json(folder / f"{task}.conditions.json"))


def counts(rows: Sequence[Row]) -> dict[str, float]:
    """Return what is counted besides the score: per sample, and tokens per decoder forward."""
    steps = [step for row in rows for step in row.denoising_steps]
    return {
        "samples": len(rows),
        "no_answer": sum(not row.answered for row in rows),
        "truncated": sum(row.truncated for row in rows),
        "tokens_per_forward": round(sum(row.tokens for row in rows) / sum(steps), 4),
        "steps_per_canvas": round(mean(steps), 4),
        "canvases_per_sample": round(len(steps) / len(rows), 4),
    }


def _verdict(verification: dict[str, Any], tasks: list[dict[str, Any]], recipe: Recipe) -> Verdict:
    if not verification["passed"]:
        faults = [fault for check in verification["checks"] for fault in check["faults"]]
        reason = faults[0] if faults else "a check looked at nothing"
        return Verdict("FAIL", f"static verification: {reason}")
    gated = [entry for entry in tasks if entry["gated"]]
    for entry in gated:
        if entry["differs"]:
            return entry["differs"]
    comparisons: dict[str, Comparison] = {entry["task"]: entry["comparison"] for entry in gated}
    return judge(comparisons)


def _sizes(targets: list[Target]) -> dict[str, float]:
    before, after = sum_bytes(targets)
    return {
        "bf16_bytes": before,
        "quantized_bytes": after,
        "ratio": after / before,
        "quantized_modules": sum(len(target.modules) for target in targets),
    }


def _errors(relative_error: dict[str, float]) -> list[dict[str, Any]]:
    by_class: dict[str, dict[str, float]] = {}
    for name, error in relative_error.items():
        by_class.setdefault(module_class(name), {})[name] = error
    return [
        {
            "class": kind,
            "tensors": len(errors),
            "mean": mean(errors.values()),
            "largest": max(errors.values()),
            "where": max(errors, key=lambda name: errors[name]),
        }
        for kind, errors in sorted(by_class.items())
    ]


def _coverage(run: RunDir) -> dict[str, Any] | None:
    path = run.calibration / "coverage.json"
    if not path.exists():
        return None
    coverage = read_json(path)
    tokens = [count for layer in coverage["tokens_per_expert"].values() for count in layer]
    return {
        "experts": len(tokens),
        "least_tokens": min(tokens),
        "median_tokens": median(tokens),
        "most_tokens": max(tokens),
        "fallbacks": coverage["fallbacks"],
    }


def markdown(content: dict[str, Any]) -> str:
    """Return report.md."""
    parts = [
        f"# {content['verdict']['outcome']}: {content['recipe']['name']}",
        content["verdict"]["reason"],
        BUNDLED_NOTE if content["model"]["bundled"] else f"Model: {content['model']['model']}",
        "## Recovery",
        _recovery_table(content["tasks"]),
        "## Size",
        _size_line(content["sizes"]),
        "## Error of the weights",
        _table(
            ("class", "tensors", "mean |W-W'|/|W|", "largest", "where"),
            [
                (e["class"], e["tensors"], f"{e['mean']:.4f}", f"{e['largest']:.4f}", e["where"])
                for e in content["error"]
            ],
        ),
        *_coverage_section(content["coverage"]),
        *_fidelity_section(content["fidelity"]),
        "## Verification",
        _table(
            ("check", "looked at", "result"),
            [
                (c["name"], c["looked_at"], "passed" if c["passed"] else "; ".join(c["faults"]))
                for c in content["verification"]["checks"]
            ],
        ),
        "## Made with",
        ", ".join(f"{name} {version}" for name, version in content["versions"].items()),
        f"{content['hardware']['cpu']}, {content['hardware']['cores']} cores; "
        f"GPUs: {', '.join(content['hardware']['gpus']) or 'none'}",
        _table(
            ("stage", "seconds", "peak memory, GB"),
            [
                (name, s["seconds"], f"{s['peak_rss_bytes'] / 1e9:.2f}")
                for name, s in content["stages"].items()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _recovery_table(tasks: list[dict[str, Any]]) -> str:
    columns = ("task", "activations", "n x k", "BF16", "quantized", "difference, pp", "recovery, %",
               "lost / won", "tokens per forward")  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for t in tasks:
        if t["not_comparable"]:
            rows.append((t["task"], t["activations"], "-", t["not_comparable"], *["-"] * 5))
            continue
        rows.append(
            (
                t["task"],
                t["activations"],
                f"{t['questions']} x {t['repeats']}",
                f"{t['base']:.3f} {_interval(t['base_interval'], '.3f')}",
                f"{t['quantized']:.3f} {_interval(t['quantized_interval'], '.3f')}",
                f"{t['difference_pp']:+.2f} {_interval(t['difference_interval'], '+.2f')}",
                "-"
                if t["recovery"] is None
                else f"{t['recovery']:.1f} {_interval(t['recovery_interval'], '.1f')}",
                "-" if t["lost"] is None else f"{t['lost']} / {t['won']}",
                f"{t['bf16_counts']['tokens_per_forward']:.2f} / "
                f"{t['quantized_counts']['tokens_per_forward']:.2f}",
            )
        )
    return _table(columns, rows)


def _size_line(sizes: dict[str, float]) -> str:
    return (
        f"{sizes['bf16_bytes']:,} bytes in BF16, {sizes['quantized_bytes']:,} quantized "
        f"({sizes['ratio']:.1%}); {sizes['quantized_modules']:,} Linear modules quantized."
    )


def _coverage_section(coverage: dict[str, Any] | None) -> list[str]:
    if coverage is None:
        return []
    fallbacks = coverage["fallbacks"]
    listed = (
        f": {', '.join(fallbacks[:8])}{' ...' if len(fallbacks) > 8 else ''}" if fallbacks else ""
    )
    return [
        "## Expert coverage",
        f"Tokens routed to each of {coverage['experts']} experts while calibrating: least "
        f"{coverage['least_tokens']:,}, median {coverage['median_tokens']:,}, most "
        f"{coverage['most_tokens']:,}. Fell back to their layer's maximum: {len(fallbacks)}{listed}.",
    ]


def _fidelity_section(fidelity: dict[str, Any] | None) -> list[str]:
    if fidelity is None:
        return []
    return ["## Fidelity on replayed trajectories", _fidelity_table(fidelity)]


def _fidelity_table(fidelity: dict[str, Any]) -> str:
    rows = [
        (
            mode,
            _with_interval(result["kl_nats"], ".4f"),
            _with_interval(result["top1_agreement"], ".4f"),
            _with_interval(result["commit_agreement"], ".4f"),
        )
        for mode, result in fidelity["activations"].items()
    ]
    return _table(("activations", "KL, nats", "top-1 agreement", "commit agreement"), rows)


def _with_interval(entry: dict[str, Any], spec: str) -> str:
    low, high = entry["interval"]
    return f"{entry['mean']:{spec}} [{low:{spec}}, {high:{spec}}]"


def _interval(interval: dict[str, Any], spec: str) -> str:
    if interval["low"] is None or interval["high"] is None:
        return "[no interval]"
    return f"[{interval['low']:{spec}}, {interval['high']:{spec}}]"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
