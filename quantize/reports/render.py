"""What report.json looks like to people and to CI: terminal, Markdown, one HTML page, JUnit XML.

The page is one file without a script, style, font or image from elsewhere. Plots are SVG made here
(`charts`); the template's only script plays the recorded denoising steps.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from quantize.reports import charts

BUNDLED_NOTE = (
    "This is the small model that ships with quantize, trained on word problems. It is not Google's "
    "26B checkpoint, and nothing here is a claim about that one."
)
FIDELITY = {  # key in fidelity.json -> what it is called
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
OTHER_INTERVAL = {  # estimand -> what the interval of the other one is called
    "these_questions": "on such questions, pp",
    "such_questions": "on these questions, pp",
}
OUTCOME_TAGS = {"FAIL": "failure", "INCONCLUSIVE": "skipped", "NOT COMPARABLE": "error"}


def html(content: dict[str, Any]) -> str:
    """Return report.html: self-contained, light and dark, readable on a phone."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = files("quantize.reports").joinpath("templates", "report.html.jinja").read_text("utf-8")
    plots = {name: Markup(svg) for name, svg in charts.all_charts(content).items()}
    return environment.from_string(text).render(
        report=content,
        plots=plots,
        note=BUNDLED_NOTE,
        judged=JUDGED[content["verdict"]["estimand"]],
        other_interval=OTHER_INTERVAL[content["verdict"]["estimand"]],
        scored_with=scored_with(content["tasks"]),
        fidelity_columns=FIDELITY,
        fidelity_rows=fidelity_rows(content["fidelity"]) if content["fidelity"] else [],
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
            f"{t['difference_pp']:+.2f} {_interval(t['difference_interval'], '+.2f')}",
            "-"
            if t["recovery"] is None
            else f"{t['recovery']:.1f} {_interval(t['recovery_interval'], '.1f')}",
        )
    return Group(head, table)


def scored_with(tasks: Sequence[dict[str, Any]]) -> list[str]:
    """Return on what the scores were made, one sentence each way that occurs."""
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
    """Return what the gate says of each task that another runtime answered."""
    other = [task for task in tasks if "runtime" in task["made_with"]["model"]]
    return ", ".join(f"{task['task']} {task['outcome'] or 'NOT COMPARABLE'}" for task in other)


def _named(model: dict[str, Any]) -> str:
    """Name a served model, and say what is known of its weights."""
    if model["weights"]:
        return f"{model['served']} (weights {model['weights'][:12]}, as the server says)"
    return f"{model['served']} (revision {model['revision']}: a name that was not checked)"


def junit(content: dict[str, Any]) -> str:
    """Return junit.xml: one test case for each static check, for fidelity and for the gate."""
    verdict = content["verdict"]
    cases = [
        (f"verification: {check['name']}", "PASS" if check["passed"] else "FAIL", check["faults"])
        for check in content["verification"]["checks"]
    ]
    if content["fidelity"]:
        faults = content["fidelity"]["faults"]
        cases.append(("fidelity", "FAIL" if faults else "PASS", faults))
    cases.append(("gate", verdict["outcome"], [verdict["reason"]]))
    counted = {
        tag: sum(OUTCOME_TAGS.get(c[1]) == tag for c in cases) for tag in OUTCOME_TAGS.values()
    }
    suite = ElementTree.Element(
        "testsuite",
        name=f"quantize {content['recipe']['name']}",
        tests=str(len(cases)),
        failures=str(counted["failure"]),
        errors=str(counted["error"]),
        skipped=str(counted["skipped"]),
    )
    for name, outcome, details in cases:
        case = ElementTree.SubElement(suite, "testcase", name=name, classname="quantize")
        if outcome in OUTCOME_TAGS:
            message = "; ".join(details) or "looked at nothing"
            ElementTree.SubElement(case, OUTCOME_TAGS[outcome], message=message)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def markdown(content: dict[str, Any]) -> str:
    """Return report.md."""
    parts = [
        f"# {content['verdict']['outcome']}: {content['recipe']['name']}",
        content["verdict"]["reason"],
        JUDGED[content["verdict"]["estimand"]],
        BUNDLED_NOTE if content["model"]["bundled"] else f"Model: {content['model']['model']}",
        "## Recovery",
        _recovery_table(content["tasks"]),
        *_noise_floor_section(content["noise_floor"]),
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
        f"GPUs: {', '.join(content['hardware']['gpus']) or 'none'}. "
        f"Scores: {'; '.join(scored_with(content['tasks']))}.",
        _table(
            ("stage", "seconds", "peak memory, GB"),
            [
                (name, s["seconds"], f"{s['peak_rss_bytes'] / 1e9:.2f}")
                for name, s in content["stages"].items()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _noise_floor_section(tasks: list[dict[str, Any]]) -> list[str]:
    if not tasks:
        return []
    table = _recovery_table([task | {"activations": "BF16, other seed"} for task in tasks])
    return ["## Noise floor: BF16 against itself, other seed in the place of quantized", table]


def _recovery_table(tasks: list[dict[str, Any]]) -> str:
    columns = ("task", "activations", "n x k", "BF16", "quantized", "difference, pp", "recovery, %",
               OTHER_INTERVAL[tasks[0]["estimand"]], "lost / won", "tokens per forward")  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for t in tasks:
        if t["not_comparable"]:
            rows.append((t["task"], t["activations"], "-", t["not_comparable"], *["-"] * 6))
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
                _interval(t["other_interval"], "+.2f"),
                "-" if t["lost"] is None else f"{t['lost']} / {t['won']}",
                _both(t, "tokens_per_forward"),
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
        (name, *(_with_interval(result[key], ".4f") for key in FIDELITY), limit)
        for name, result, limit in fidelity_rows(fidelity)
    ]
    return _table(("activations", *FIDELITY.values(), "KL limit"), rows)


def fidelity_rows(fidelity: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Return (name, summary, KL limit) of each replay."""
    limits = fidelity["max_kl_nats"]
    rows = [(m, r, str(limits.get(m, "-"))) for m, r in fidelity["activations"].items()]
    own = fidelity["own_conditioning"]
    return [*rows, (f"{own['activations']}, own self-conditioning", own, "-")]


def _both(task: dict[str, Any], count: str) -> str:
    """Return a count of both sides; a server does not tell its denoising steps."""
    values = (task[side][count] for side in ("bf16_counts", "quantized_counts"))
    return " / ".join("-" if value is None else f"{value:.2f}" for value in values)


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
