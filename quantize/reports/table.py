"""The table of scores, described once for report.md, report.html and the model card."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantize.recovery.gate import decides
from quantize.recovery.health import SIGNS

Task = Mapping[str, Any]  # an entry of report.json's `tasks` or `noise_floor`
OTHER_INTERVAL = {  # estimand -> name of the other estimand's interval
    "these_questions": "on such questions, pp",
    "such_questions": "on these questions, pp",
}


def score_table(
    tasks: Sequence[Task], estimand: str, *, card: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return the headings and one row of cells per task; a `card` has only the first 10 columns."""
    columns = _columns(OTHER_INTERVAL[estimand])
    columns = dict(list(columns.items())[:10]) if card else columns
    rows: list[list[str]] = []
    for task in tasks:
        if reason := task["not_comparable"]:
            first = [*_name(task), "-", f"not comparable: {reason}"]
            rows.append(first + ["-"] * (len(columns) - len(first)))
        else:
            rows.append([written(task) for written in columns.values()])
    return list(columns), rows


def _columns(other_interval: str) -> dict[str, Callable[[Task], str]]:
    return {
        "task": lambda t: _name(t)[0],
        "activations": lambda t: _name(t)[1],
        "n x k": lambda t: f"{t['questions']} x {t['repeats']}",
        "BF16": lambda t: cell(t, "base", ".3f"),
        "quantized": lambda t: cell(t, "quantized", ".3f"),
        "difference, pp": lambda t: cell(t, "difference_pp", "+.2f"),
        "margin, pp": lambda t: f"{t['margin_pp']:g}",
        "recovery, %": lambda t: cell(t, "recovery", ".1f"),
        other_interval: lambda t: interval_text(t["other_interval"], "+.2f"),
        "steps a token": lambda t: steps_text(t.get("step_inflation")),
        "lost / won": lambda t: "-" if t["lost"] is None else f"{t['lost']} / {t['won']}",
        "tokens per forward": lambda t: _both(t, "tokens_per_forward", ".2f"),
    }


def health_rows(tasks: Sequence[Task]) -> list[list[str]]:
    """Return one row per gated task and sign of ill health, and one per task on answers' length."""
    rows: list[list[str]] = []
    for task in (task for task in tasks if task["gated"]):
        for name, sign in task.get("health", {}).items():
            limit = sign["limit_pp"]
            passed = limit is not None and decides(sign["p_at_least_limit"], task["confidence"])
            rows.append([
                task["task"],
                SIGNS[name],
                *(f"{100 * sign[model]:.1f} %" for model in ("base", "quantized")),
                f"{sign['difference_pp']:+.1f} pp {interval_text(sign, '+.1f')}",
                "-" if limit is None else f"{limit:+.2f} pp",
                "not judged" if limit is None else "within" if passed else "not excluded",
            ])  # fmt: skip
        if task.get("length"):
            counts = (task[key]["tokens_per_sample"] for key in ("bf16_counts", "quantized_counts"))
            more = steps_text(dict(zip(("ratio", "low", "high"), task["length"], strict=True)))
            length = [*(f"{count:.1f}" for count in counts), more, "-", "not judged"]
            rows.append([task["task"], "tokens an answer", *length])
    return rows


ENDS = {  # heading of a column -> key of a side's counts, and its format
    "answers": ("samples", ",d"),
    "steps a canvas": ("steps_per_canvas", ".2f"),
    "p90": ("steps_p90", "d"),
    "tokens a forward": ("tokens_per_forward", ".2f"),
    "finished, %": ("finished", ".1f"),
    "in a loop, %": ("loops", ".1f"),
    "empty, %": ("empty", ".1f"),
}


def ends_rows(tasks: Sequence[Task]) -> list[list[str]]:
    """Return one row per gated task, and one per kind of its prompts, on steps, ends and loops."""
    rows: list[list[str]] = []
    for task in (task for task in tasks if task["gated"]):
        sides = [task.get(key, {}) for key in ("bf16_counts", "quantized_counts")]
        if not all("loops" in side for side in sides):  # a report from before
            continue
        budget = f" at {task['max_tokens']:,} tokens" if task.get("max_tokens") else ""
        kinds = [side.get("by_kind", {}) for side in sides]
        shown = [(k, [of[k] for of in kinds]) for k in kinds[0] if k in kinds[1]]
        for kind, both in [("all", sides), *shown]:
            pair = dict(
                zip(("bf16_counts", "quantized_counts"), map(in_percent, both), strict=True)
            )
            rows.append([task["task"] + budget, kind, *(_both(pair, *of) for of in ENDS.values())])
    return rows


def in_percent(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts, with the answers that finished, loop or are empty in percent of all."""
    ends = {"finished": counts["samples"] - counts["truncated"]}
    ends |= {key: counts[key] for key in ("loops", "empty")}
    return {**counts, **{key: 100 * count / counts["samples"] for key, count in ends.items()}}


def _name(task: Task) -> list[str]:
    return [task["task"], task.get("activations") or "BF16, other seed"]


def cell(task: Task, key: str, spec: str, unit: str = "") -> str:
    """Return a task's figure `key` and its interval, formatted by `spec`; "-" for None."""
    interval = task[f"{key.removesuffix('_pp')}_interval"]
    return "-" if task[key] is None else f"{task[key]:{spec}}{unit} {interval_text(interval, spec)}"


def _both(task: Task, count: str, spec: str) -> str:
    """Return a count of both models, "-" for an unknown one (servers report no steps)."""
    values = (task[model][count] for model in ("bf16_counts", "quantized_counts"))
    return " / ".join("-" if value is None else f"{value:{spec}}" for value in values)


def interval_text(interval: dict[str, Any], spec: str) -> str:
    """Return "[low, high]", formatted by `spec`, or "[no interval]" if an end is None."""
    if interval["low"] is None or interval["high"] is None:
        return "[no interval]"
    return f"[{interval['low']:{spec}}, {interval['high']:{spec}}]"


def steps_text(inflation: dict[str, float] | None) -> str:
    """Return by how much steps per token exceed BF16's: "+7.1 % [+2.0, +12.5]", or "-" for None."""
    if inflation is None:
        return "-"
    ratio, low, high = (100 * (inflation[key] - 1) for key in ("ratio", "low", "high"))
    return f"{ratio:+.1f} % [{low:+.1f}, {high:+.1f}]"
