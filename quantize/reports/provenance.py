"""Says when, by which code and at what cost a run was made: report.json's key `made`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from quantize.host.resources import now
from quantize.host.units import size


def made(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return dates, version and commit of the code, hours and price of the evaluation; None: unknown.

    The hours cover all tries of this run's evaluation, but not BF16 answers from another run.
    """
    stage = manifest["stages"].get("evaluate", {})
    hours = stage.get("seconds_in_all", 0.0) / 3600
    hourly = manifest.get("hourly_price")
    return {
        "began": manifest.get("began"),
        "judged": now(),
        "tool": manifest.get("tool"),
        "evaluation": {
            "hours": round(hours, 4),
            "hourly_price": hourly,
            "price": None if hourly is None else round(hours * hourly, 2),
        },
    }


def made_lines(content: Mapping[str, Any]) -> list[str]:
    """Return sentences on when, by which code and at what cost a report's run was made."""
    facts = content["made"]
    tool, recipe = facts["tool"], content["evidence"].get("recipe.yaml", "unknown")
    evaluation = facts["evaluation"]
    code = "unknown code"
    if tool:
        commit = f"commit {tool['commit']}" if tool["commit"] else "commit unknown"
        changed = ", with changes of its own" if tool["modified"] else ""
        code = f"diffusiongemma-quantize {tool['version']} ({commit}{changed})"
    cost = f"The evaluation took {evaluation['hours']:.2f} hours of this machine"
    if evaluation["price"] is not None:
        cost += f": {evaluation['price']:,.2f} at {evaluation['hourly_price']:g} an hour"
    gpus = {stage.get("gpu"): stage.get("launches") for stage in content["stages"].values()}
    where = [f"{gpu} (launch table {table})" for gpu, table in sorted(gpus.items(), key=str) if gpu]
    return [
        f"Begun {facts['began'] or 'at an unknown time'}, judged {facts['judged']}, by {code}.",
        f"sha256 of the resolved recipe: {recipe}.",
        f"{cost}.",
        f"Built again with the same versions on {' and '.join(where) or content['hardware']['cpu']}, "
        f"the checkpoint has the same bytes, whatever the number of threads or the GPU memory that is "
        f"used; another processor rounds sums otherwise, so that single codes and answers differ.",
        *baseline_lines(content),
    ]


def baseline_lines(content: Mapping[str, Any]) -> list[str]:
    """Return a sentence on where BF16's answers were made, if they were imported; else []."""
    if (baseline := content.get("baseline")) is None:
        return []
    made, tool = baseline["made_with"], baseline["tool"]
    pulled = f", pulled from {baseline['hub']}" if "hub" in baseline else ""
    return [
        f"BF16's answers were made elsewhere and imported: on {made['device']} with torch "
        f"{made['versions.torch']}, by diffusiongemma-quantize {tool['version']} (commit "
        f"{tool['commit'] or 'unknown'}); sha256 of the pack: {baseline['pack']}{pulled}. "
        f"{baseline.get('spot_check') or 'No spot check was made of them.'}"
    ]


def scored_with(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one text per origin of scores: a server, a file in llama.cpp, or our own engine.

    A text names the model or hardware, and the seed. llama.cpp's also gives its tasks' outcomes.
    """
    sentences: dict[str, None] = {}
    for made in (task["made_with"] for task in tasks):
        model, seed = made["model"], f"seed {made['seed']}"
        if "served" in model:
            known = f"revision {model['revision']}: a name that was not checked"
            if model["weights"]:
                known = f"weights {model['weights'][:12]}, as the server says"
            text = f"a server's model {model['served']} ({known}), {seed}"
        elif "runtime" in model:
            others = [task for task in tasks if "runtime" in task["made_with"]["model"]]
            judged = (f"{task['task']} {task['outcome'] or 'NOT COMPARABLE'}" for task in others)
            text = f"{model['runtime']} on {model['file'][:12]}, {seed}: {', '.join(judged)}"
        else:
            dtype = str(made["dtype"]).removeprefix("torch.")
            text = f"{made['device']}, torch {made['versions']['torch']}, {dtype}, "
            text += f"batches of {made['batch_size']}, {seed}"
        sentences[text] = None
    return list(sentences)


def stage_rows(stages: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return one row of cells for each stage that has ended.

    Cells: name, seconds, seconds of all tries, peak memory of host and of GPU, GPU, end time.
    """
    rows: list[tuple[str, ...]] = []
    for name, facts in stages.items():
        if "ended" in facts:  # the report itself, and interrupted stages, have not ended
            times = (f"{facts[key]:.1f}" for key in ("seconds", "seconds_in_all"))
            peaks = (facts[key] for key in ("peak_rss_bytes", "peak_gpu_bytes"))
            sizes = ("-" if count is None else size(count) for count in peaks)
            rows.append((name, *times, *sizes, facts["gpu"] or "-", facts["ended"]))
    return rows


def without_places(recipe: str) -> str:
    """Return a recipe's YAML with the names of files in place of their paths on this machine."""
    return yaml.safe_dump(_named(yaml.safe_load(recipe)), sort_keys=False)


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_named(item) for item in value]
    is_place = (
        isinstance(value, str) and "\n" not in value and Path(value).expanduser().is_absolute()
    )
    return Path(value).name if is_place else value
