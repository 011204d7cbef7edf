"""Renders report.json for people: one HTML page, and a summary for the terminal.

The page is one file without a script, style, font or image from elsewhere. Plots are SVG made here
(`charts`); the template's only script plays the recorded denoising steps.
"""

from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from quantize.host.units import size
from quantize.reports import charts
from quantize.reports.headline import (
    POINT_COLUMNS,
    PUBLISHED_COLUMNS,
    chosen_point,
    facts,
    not_tested,
    point_rows,
    published,
)
from quantize.reports.provenance import made_lines, stage_rows
from quantize.reports.questions import question_counts, question_row, watched
from quantize.reports.table import HEALTH_COLUMNS, health_rows, interval_text, score_table

BUNDLED_NOTE = (
    "This is the small model that ships with quantize, trained on word problems. It is not Google's "
    "26B checkpoint, and nothing here is a claim about that one."
)
FIDELITY = {  # key in fidelity.json -> its name in the report
    "kl_nats": "KL, nats",
    "top1_agreement": "top-1 agreement",
    "acceptance_jaccard": "acceptance, Jaccard",
    "commit_agreement": "commit agreement",
}
JUDGED = {  # estimand -> what is judged, and what is not
    "these_questions": (
        "Judged: the loss on these questions, the benchmark as it stands; chance is in the answers."
    ),
    "such_questions": (
        "Judged: the loss on questions like these, of which they are a sample; chance is in the "
        "questions."
    ),
}


def html(content: dict[str, Any]) -> str:
    """Return report.html: self-contained, light and dark, readable on a phone."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = files("quantize.reports").joinpath("templates", "report.html.jinja").read_text("utf-8")
    plots = {name: Markup(svg) for name, svg in charts.all_charts(content).items()}
    scored = [*content["tasks"], *content["noise_floor"]]
    columns, rows = score_table(scored, content["verdict"]["estimand"])
    return environment.from_string(text).render(
        report=content,
        plots=plots,
        note=BUNDLED_NOTE,
        judged=JUDGED[content["verdict"]["estimand"]],
        facts=facts(content),
        not_tested=not_tested(content),
        chosen_point=chosen_point(content),
        point_columns=POINT_COLUMNS,
        point_rows=point_rows(content),
        health_columns=HEALTH_COLUMNS,
        health_rows=health_rows(content["tasks"]),
        published=published(content),
        published_columns=PUBLISHED_COLUMNS,
        score_columns=columns,
        scored=list(zip(scored, rows, strict=True)),
        scored_with=scored_with(content["tasks"]),
        looks_lines=looks_lines(content),
        made_lines=made_lines(content),
        stage_rows=stage_rows(content["stages"]),
        question_row=question_row,
        counts=question_counts,
        watched=partial(watched, content["canvases"]),
        size=size,
        fidelity_columns=FIDELITY,
        fidelity_rows=fidelity_rows(content["fidelity"]) if content["fidelity"] else [],
        kind_lines=kind_lines(content["fidelity"]) if content["fidelity"] else [],
    )


def summary(content: dict[str, Any]) -> Group:
    """Return the verdict and the scores for a terminal, 80 columns wide or more."""
    verdict, model = content["verdict"], content["model"]
    colour = {"PASS": "green", "FAIL": "red"}.get(verdict["outcome"], "yellow")
    head = Text.assemble((verdict["outcome"], f"bold {colour}"), f"  {content['recipe']['name']}\n")
    head.append(f"{verdict['reason']}\n")
    head.append(f"{JUDGED[verdict['estimand']]}\n", "dim")
    head.append(f"{BUNDLED_NOTE if model['bundled'] else model['model']}\n", "dim")
    table = Table("", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("BF16", "quantized", "difference, pp", "recovery, %"):
        table.add_column(column, justify="right", no_wrap=True)
    again = [task | {"activations": "BF16 again"} for task in content["noise_floor"]]
    for t in [*content["tasks"], *again]:
        name = Text(f"{t['task']}, {t['activations']}", "bold" if t.get("gated") else "")
        if t["not_comparable"]:
            table.add_row(name, "", "", "not comparable", "")
            continue
        table.add_row(
            name,
            f"{t['base']:.3f}",
            f"{t['quantized']:.3f}",
            f"{t['difference_pp']:+.2f} {interval_text(t['difference_interval'], '+.2f')}",
            "-"
            if t["recovery"] is None
            else f"{t['recovery']:.1f} {interval_text(t['recovery_interval'], '.1f')}",
        )
    return Group(head, table)


def scored_with(tasks: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences on the hardware and software that made the scores, one each way."""
    found: dict[str, None] = {}
    for made in (task["made_with"] for task in tasks):
        if "served" in made["model"]:
            found[f"a server's model {_named(made['model'])}, seed {made['seed']}"] = None
        elif "runtime" in made["model"]:
            made_by = f"{made['model']['runtime']} on {made['model']['file'][:12]}"
            found[f"{made_by}, seed {made['seed']}: {_judged(tasks)}"] = None
        else:
            dtype = str(made["dtype"]).removeprefix("torch.")
            found[
                f"{made['device']}, torch {made['versions']['torch']}, {dtype}, "
                f"batches of {made['batch_size']}, seed {made['seed']}"
            ] = None
    return list(found)


def _judged(tasks: Sequence[dict[str, Any]]) -> str:
    """Return the gate's judgement of each task that another runtime answered."""
    other = [task for task in tasks if "runtime" in task["made_with"]["model"]]
    return ", ".join(f"{task['task']} {task['outcome'] or 'NOT COMPARABLE'}" for task in other)


def _named(model: dict[str, Any]) -> str:
    """Return a served model's name, and what is known of its weights."""
    if model["weights"]:
        return f"{model['served']} (weights {model['weights'][:12]}, as the server says)"
    return f"{model['served']} (revision {model['revision']}: a name that was not checked)"


def fidelity_rows(fidelity: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Return (name, summary, KL limit) of each replay."""
    limits = fidelity["max_kl_nats"]
    rows = [(m, r, str(limits.get(m, "-"))) for m, r in fidelity["activations"].items()]
    own = fidelity["own_conditioning"]
    return [*rows, (f"{own['activations']}, own self-conditioning", own, "-")]


def kind_lines(fidelity: dict[str, Any]) -> list[str]:
    """Return a sentence a replay: its KL by kind of prompt, where there are several kinds."""
    lines: list[str] = []
    for name, result, _ in fidelity_rows(fidelity):
        kinds = result.get("by_kind", [])
        each = [
            f"{k['kind']} {k['kl_nats']['mean']:.4f} "
            f"[{k['kl_nats']['interval'][0]:.4f}, {k['kl_nats']['interval'][1]:.4f}] "
            f"({k['trajectories']} trajectories)"
            for k in kinds
        ]
        if len(kinds) > 1:
            lines.append(f"{name}, KL by kind of prompt: {'; '.join(each)}.")
    return lines


def looks_lines(content: dict[str, Any]) -> list[str]:
    """Return sentences on what was not asked, since the verdict was certain, and not judged."""
    lines = [
        f"{task}: the verdict was certain after look {look['taken']} of {look['of']}; the rest was "
        f"not asked. Its intervals are of what was asked, not widened for the looks."
        for task, look in content["looks"].items()
        if look["taken"] < look["of"]
    ]
    lines += [
        f"{task}: not asked; the run's verdict was certain before." for task in content["not_asked"]
    ]
    limits = [task["max_step_inflation"] for task in content["tasks"] if task["gated"]]
    if limits and not any(limits):
        lines.append("Denoising steps were not judged: the recipe sets no max_step_inflation.")
    return lines
