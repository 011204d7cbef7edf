"""Renders report.json for people: one HTML page, Markdown, and a summary for the terminal.

The page is one file that loads no script, style, font or image from elsewhere. The one script in it
plays the recorded denoising steps.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from quantize.host.units import size
from quantize.reports import charts
from quantize.reports.headline import facts, not_tested
from quantize.reports.questions import question_counts, question_row, watched
from quantize.reports.sections import ReportSection, head, question_sections, sections
from quantize.reports.table import cell

PAGES = Environment(
    loader=PackageLoader("quantize.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


def html(content: Mapping[str, Any]) -> str:
    """Return the text of report.html: self-contained, light and dark, readable on a phone."""
    return PAGES.get_template("report.html.jinja").render(
        report=content,
        head=head(content),
        facts=facts(content),
        not_tested=not_tested(content),
        sections=sections(content),
        plots={name: Markup(svg) for name, svg in charts.all_charts(content).items()},
        question_row=question_row,
        counts=question_counts,
        watched=partial(watched, content["canvases"]),
        size=size,
    )


def markdown(content: Mapping[str, Any]) -> str:
    """Return the text of report.md, which is also the summary of a GitHub Actions job."""
    parts = [f"# {content['verdict']['outcome']}: {content['recipe']['name']}", *head(content)]
    parts += [f"{name}: {value}" for name, value in facts(content)] + [not_tested(content)]
    for section in [*sections(content), *question_sections(content["questions"])]:
        parts += [f"## {section.title}", *section.lines, markdown_table(section), *section.notes]
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown_table(section: ReportSection) -> str:
    """Return a section's table in Markdown, "" if it has no rows; cells are one line, | escaped."""
    if not section.rows:
        return ""
    lines = [section.columns, ["---"] * len(section.columns), *section.rows]
    cells = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def summary(content: Mapping[str, Any]) -> Group:
    """Return the verdict and the scores for a terminal, 80 columns wide or more."""
    outcome = content["verdict"]["outcome"]
    colour = {"PASS": "green", "FAIL": "red"}.get(outcome, "yellow")
    reason, *about = head(content)
    said = Text.assemble((outcome, f"bold {colour}"), f"  {content['recipe']['name']}\n{reason}\n")
    said.append("".join(f"{line}\n" for line in about), "dim")
    table = Table(
        "", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, caption_justify="left",
        caption="Intervals are two-sided; the verdict rests on a one-sided bound.",
    )  # fmt: skip
    for column in ("BF16", "quantized", "difference, pp", "recovery, %"):
        table.add_column(column, justify="right", no_wrap=True)
    again = [task | {"activations": "BF16 again"} for task in content["noise_floor"]]
    for task in [*content["tasks"], *again]:
        name = f"{task['task']}, {task['activations']}"
        cells = ["", "", "not comparable", ""]
        if not task["not_comparable"]:
            cells = [f"{task[model]:.3f}" for model in ("base", "quantized")]
            cells += [cell(task, "difference_pp", "+.2f"), cell(task, "recovery", ".1f")]
        table.add_row(Text(name, "bold" if task.get("gated") else ""), *cells)
    return Group(said, table)
