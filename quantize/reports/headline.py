"""Lines below a report's verdict: facts, what was not tested, operating points, published figures.

The argument `content` is report.json. report.md and report.html show the same sentences and rows.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import yaml

from quantize.host.units import size
from quantize.reports.table import interval_text

PUBLISHED: dict[str, Any] = yaml.safe_load(
    files("quantize.reports").joinpath("published.yaml").read_text("utf-8")
)


def facts(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) pairs: the verdict's date; the checkpoint's fingerprint, size and speed."""
    sizes = content["sizes"]
    share = f"{sizes['ratio']:.1%} of {size(sizes['bf16_bytes'])}"
    modules = f"{sizes['quantized_modules']:,} Linear modules quantized"
    return [
        ("judged", str(content["made"]["judged"])),
        ("checkpoint", content["artifact"] or "unknown"),
        ("size", f"{size(sizes['quantized_bytes'])}, {share}; {modules}"),
        ("speed", "; ".join(_speed(content)) or "not measured"),
    ]


def _speed(content: Mapping[str, Any]) -> list[str]:
    """Return both models' tokens per forward pass, and tokens/s while scoring, as far as known."""
    sentences: list[str] = []
    gated = [task for task in content["tasks"] if task["gated"]]
    counts = [
        [t[key]["tokens_per_forward"] for key in ("quantized_counts", "bf16_counts")] for t in gated
    ]
    if counts and None not in counts[0]:
        sentences.append("{:.1f} tokens a forward (BF16 {:.1f})".format(*counts[0]))
    rates = content["stages"].get("evaluate", {}).get("rates", {})
    speeds = {name: r["tokens"] / r["seconds"] for name, r in rates.items() if r["seconds"]}
    if "quantized" in speeds:
        beside = f" (BF16 {speeds['bf16']:,.0f})" if "bf16" in speeds else ""
        sentences.append(
            f"{speeds['quantized']:,.0f} tokens/s while scoring{beside}, not a server's speed"
        )
    return sentences


def not_tested(content: Mapping[str, Any]) -> str:
    """Return a sentence that lists what the verdict does not cover."""
    tasks = [task for task in content["tasks"] if task["gated"]]
    fidelity = content["fidelity"]
    missing = {
        "thinking": not any(thinks(task) for task in tasks),
        "pictures": True,
        "prompts over 1,024 tokens": not any(t["task"].startswith("needle") for t in tasks),
        "distance from BF16 on replayed canvases": not fidelity,
        "a limit on the distance from BF16 on replayed canvases (no gate.max_kl_nats)": bool(
            fidelity and not fidelity.get("max_kl_nats", {}).keys() & fidelity["activations"].keys()
        ),
        "denoising steps (no gate.max_step_inflation)": bool(tasks)
        and not any(task.get("max_step_inflation") for task in tasks),
        "BF16 against itself (--noise-floor)": not content["noise_floor"],
        "a server's tokens/s (quantize bench)": not content["speeds"],
    }
    named = [what for what, is_missing in missing.items() if is_missing]
    return f"Not tested: {', '.join([*named, *content['not_asked']])}."


def thinks(task: Mapping[str, Any]) -> bool:
    """Return whether a task of report.json was asked with thinking on (older reports: not known)."""
    return bool(task.get("thinking"))


def point_rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Return one row of cells per operating point, fastest first, for the report's table."""
    return [
        [
            point["name"],
            point["activations"],
            ", ".join(f"{key} {value:g}" for key, value in point["settings"].items()),
            f"{point['tokens_per_forward']:.2f}",
            "-" if point["tokens_a_second"] is None else f"{point['tokens_a_second']:,.0f}",
            "not asked" if point["p"] is None else f"{point['p']:.2g}",
            "PASS" if point["passes"] else "not excluded",
        ]
        for point in content["operating_points"]
    ]


def fastest_point(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fastest operating point that passes and is faster than the own settings; or None."""
    speeds, gated = content["speeds"], [task for task in content["tasks"] if task["gated"]]
    if speeds:
        judged, key = speeds["tokens_a_second"]["quantized"], "tokens_a_second"
    else:
        judged = tokens_a_forward([task["quantized_counts"] for task in gated])
        key = "tokens_per_forward"
    passing = (point for point in content["operating_points"] if point["passes"])
    return next((point for point in passing if judged is None or point[key] > judged), None)


def tokens_a_forward(counts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the tokens per forward over several tasks' counts, None if a count does not tell it."""
    if not counts or any(not count["tokens_per_forward"] for count in counts):
        return None
    tokens = [count["tokens_per_sample"] * count["samples"] for count in counts]
    forwards = (n / count["tokens_per_forward"] for n, count in zip(tokens, counts, strict=True))
    return sum(tokens) / sum(forwards)


def chosen_point(content: Mapping[str, Any]) -> str:
    """Return a sentence: the fastest point that passes, or that none passes, or none was judged."""
    points = content["operating_points"]
    if not points:
        return "Operating points were not judged: the model's own sampler settings hold."
    best = fastest_point(content)
    if best is None:
        some = any(point["passes"] for point in points)
        what = "that passes is faster than" if some else "passes: keep"
        served = content.get("served_at")
        has = f" generation_config.json has the settings of {served}." if served else ""
        return (
            f"None of {len(points)} operating points {what} the model's own sampler settings.{has}"
        )
    speed = f"{best['tokens_per_forward']:.1f} tokens a forward"
    if speeds := content["speeds"]:
        beside = speeds["tokens_a_second"]
        speed = (
            f"{best['tokens_a_second']:,.0f} tokens/s on {speeds['device']} (own settings "
            f"{beside['quantized']:,.0f}, BF16 {beside['bf16']:,.0f})"
        )
    return (
        f"Fastest of {len(points)} operating points whose whole loss, format and settings, fits: "
        f"{best['name']}, {speed}. generation_config.json has the settings of "
        f"{content.get('served_at') or 'the model'}."
    )


def _published(content: Mapping[str, Any]) -> dict[str, Any]:
    model = content["model"]
    here = not model["bundled"] and PUBLISHED["model"] in str(model["model"]).lower()
    return PUBLISHED if here else {"scores": []}


def published_speed(content: Mapping[str, Any]) -> list[str]:
    """Return one sentence, in a list, on the model's published speeds; [] if none are known."""
    known = _published(content)
    return [known["speed"].strip()] if "speed" in known else []


def published_rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Return one row per published task: published scores with recovery, then this run's scores."""
    tasks = (task for task in content["tasks"] if task["gated"] and not task["not_comparable"])
    ours = {task["task"]: task for task in tasks}
    return [
        [
            *(row["name"], block["by"], f"{row['bf16']}"),
            *(_printed(row.get(scheme, ())) for scheme in ("fp8", "nvfp4")),
            *_beside(row["bf16"], ours.get(row.get("task"))),
        ]
        for block in _published(content)["scores"]
        for row in block["rows"]
    ]


def _printed(scores: Sequence[float]) -> str:
    """Return a published accuracy, with its recovery if that was printed too; "-" if neither was."""
    return " ".join(map(str.format, ("{}", "({} %)"), map(str, scores))) or "-"


def _beside(printed: float, task: Mapping[str, Any] | None) -> list[str]:
    """Return both accuracies, and whether BF16's interval has the published score `printed`."""
    if task is None:
        return ["not asked", "-", "-"]
    intervals = [
        {end: 100 * value for end, value in task[f"{key}_interval"].items()}
        for key in ("base", "quantized")
    ]
    means = (f"{100 * task[key]:.1f}" for key in ("base", "quantized"))
    texts = [f"{m} {interval_text(i, '.1f')}" for m, i in zip(means, intervals, strict=True)]
    covered = intervals[0]["low"] <= printed <= intervals[0]["high"]
    return [*texts, "covered" if covered else "not covered"]
