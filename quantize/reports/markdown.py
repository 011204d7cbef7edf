"""Turns report.json into Markdown: report.md, and the summary of a job of GitHub Actions."""

from collections.abc import Sequence
from typing import Any

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
from quantize.reports.questions import QUESTION_COLUMNS, question_counts, question_row
from quantize.reports.render import (
    BUNDLED_NOTE,
    FIDELITY,
    JUDGED,
    fidelity_rows,
    kind_lines,
    looks_lines,
    scored_with,
)
from quantize.reports.table import HEALTH_COLUMNS, health_rows, score_table

SHOWN = 20  # questions of a task that report.md lists


def markdown(content: dict[str, Any]) -> str:
    """Return report.md."""
    parts = [
        f"# {content['verdict']['outcome']}: {content['recipe']['name']}",
        content["verdict"]["reason"],
        JUDGED[content["verdict"]["estimand"]],
        BUNDLED_NOTE if content["model"]["bundled"] else f"Model: {content['model']['model']}",
        *(f"{name}: {value}" for name, value in facts(content)),
        not_tested(content),
        "## Recovery",
        _recovery_table(content["tasks"]),
        *looks_lines(content),
        "## Operating points",
        chosen_point(content),
        *([_table(POINT_COLUMNS, point_rows(content))] if content["operating_points"] else []),
        "## Health of answers",
        _table(HEALTH_COLUMNS, health_rows(content["tasks"])),
        *_published_section(content),
        *_noise_floor_section(content["noise_floor"]),
        *_questions_section(content["questions"]),
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
        *_made_section(content),
    ]
    return "\n\n".join(parts) + "\n"


def _made_section(content: dict[str, Any]) -> list[str]:
    columns = ("stage", "seconds", "in all tries", "peak memory", "peak GPU memory", "GPU", "ended")
    return [
        "## Made with",
        ", ".join(f"{name} {version}" for name, version in content["versions"].items()),
        f"{content['hardware']['cpu']}, {content['hardware']['cores']} cores; "
        f"GPUs: {', '.join(content['hardware']['gpus']) or 'none'}. "
        f"Scores: {'; '.join(scored_with(content['tasks']))}.",
        *made_lines(content),
        _table(columns, stage_rows(content["stages"])),
    ]


def _noise_floor_section(tasks: list[dict[str, Any]]) -> list[str]:
    if not tasks:
        return []
    table = _recovery_table(tasks)
    return ["## Noise floor: BF16 against itself, other seed in the place of quantized", table]


def _questions_section(questions: dict[str, Any]) -> list[str]:
    """List some questions a task that differ; report.html and report.json hold all of them."""
    parts: list[str] = []
    for task, found in questions.items():
        rows = [question_row(entry) for entry in found["differ"]]
        if not rows:
            continue
        more = f" The first {SHOWN} are listed." if len(rows) > SHOWN else ""
        parts += [
            f"## Questions of {task} that differ",
            f"{question_counts(found['differ'])}.{more}"
            + (" Private: a hash is shown, no answer." if found["private"] else ""),
            _table(QUESTION_COLUMNS, rows[:SHOWN]),
        ]
    return parts


def _recovery_table(tasks: list[dict[str, Any]]) -> str:
    return _table(*score_table(tasks, tasks[0]["estimand"]))


def _published_section(content: dict[str, Any]) -> list[str]:
    found = published(content)
    if found is None:
        return []
    return [
        "## Published figures beside these",
        _table(PUBLISHED_COLUMNS, found["rows"]),
        found["speed"],
    ]


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
    table = _fidelity_table(fidelity)
    return ["## Fidelity on replayed trajectories", table, *kind_lines(fidelity)]


def _fidelity_table(fidelity: dict[str, Any]) -> str:
    rows = [
        (name, *(_with_interval(result[key], ".4f") for key in FIDELITY), limit)
        for name, result, limit in fidelity_rows(fidelity)
    ]
    return _table(("activations", *FIDELITY.values(), "KL limit"), rows)


def _with_interval(entry: dict[str, Any], spec: str) -> str:
    low, high = entry["interval"]
    return f"{entry['mean']:{spec}} [{low:{spec}}, {high:{spec}}]"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    """Return a value on one line, with the characters escaped that a table would read."""
    return " ".join(str(value).split()).replace("|", "\\|")
