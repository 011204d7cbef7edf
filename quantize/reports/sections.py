"""Makes a report's sentences and tables from report.json; `render` shows them in Markdown and HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantize.recovery.sequential import LEAST_CHANCE
from quantize.reports.headline import chosen_point, point_rows, published_rows, published_speed
from quantize.reports.provenance import made_lines, scored_with, stage_rows
from quantize.reports.questions import QUESTION_COLUMNS, question_counts, question_row
from quantize.reports.table import ENDS, cell, ends_rows, health_rows, score_table

Content = Mapping[str, Any]  # report.json
SHOWN = 20  # questions of a task that report.md lists
FIDELITY = {  # key in fidelity.json -> its name in the report
    "kl_nats": "KL, nats",
    "top1_agreement": "top-1 agreement",
    "acceptance_jaccard": "acceptance, Jaccard",
    "commit_agreement": "commit agreement",
}
BUNDLED_NOTE = (
    "This is the small model that ships with quantize, trained on word problems. It is not Google's "
    "26B checkpoint, and nothing here is a claim about that one."
)
JUDGED = {  # estimand -> what is judged, and what is not
    "these_questions": (
        "Judged: the loss on these questions, the benchmark as it stands; chance is in the answers."
    ),
    "such_questions": (
        "Judged: the loss on questions like these, of which they are a sample; chance is in the "
        "questions."
    ),
}


@dataclass(frozen=True)
class ReportSection:
    """A section of a report; it is left out if it has neither sentences nor rows."""

    title: str  # its heading
    columns: Sequence[str] = ()  # headings of its table
    rows: Sequence[Sequence[str]] = ()  # cells of its table, as text
    lines: Sequence[str] = ()  # sentences before the table
    notes: Sequence[str] = ()  # sentences after the table
    plots: Sequence[str] = ()  # names of the plots (`charts`) that the page shows before the table


def head(content: Content) -> list[str]:
    """Return three sentences: the verdict's reason, what was judged, and on which model."""
    verdict, model = content["verdict"], content["model"]
    about = BUNDLED_NOTE if model["bundled"] else f"Model: {model['model']}"
    judged = JUDGED[verdict["estimand"]]
    if "evaluate" in content["not_reached"]:
        judged = "No accuracy was judged: the run ended at a failed check, before any question."
    return [verdict["reason"], judged, about]


def sections(content: Content) -> list[ReportSection]:
    """Return a report's sections, except those that `question_sections` returns."""
    tasks, fidelity = content["tasks"], content["fidelity"]
    scored = [*tasks, *content["noise_floor"]]
    columns, rows = score_table(scored, content["verdict"]["estimand"])
    for task, cells in zip(scored, rows, strict=True):
        cells[0] += " (gated)" if task.get("gated") else ""
    made = [
        ReportSection("Recovery", columns, rows, (), looks_lines(content), ("difference",)),
        ReportSection(
            "Operating points",
            ("operating point", "activations", "settings", "tokens a forward", "tokens/s", "p",
             "outcome"),
            point_rows(content), _settings(content), _corrected(content), ("points",),
        ),
        health_section(tasks),
        ends_section(tasks),
        ReportSection(
            "Answers without a final value",
            ("task", "model", "answers", "share", "examples"),
            unread_rows(content),
        ),
        ReportSection(
            "Published figures beside these",
            ("published", "by", "BF16", "FP8", "NVFP4", "BF16 here", "quantized here",
             "published BF16"),
            published_rows(content), (), published_speed(content),
        ),
        *([fidelity_section(fidelity), _by_entropy(fidelity)] if fidelity else []),
        ReportSection(
            "Error of the weights", ("class", "tensors", "mean |W-W'|/|W|", "largest", "where"),
            [
                (e["class"], str(e["tensors"]), f"{e['mean']:.4f}", f"{e['largest']:.4f}", e["where"])
                for e in content["error"]
            ],
            plots=("error",),
        ),
        ReportSection("Expert coverage", lines=_coverage(content["coverage"])),
        ReportSection(
            "Verification", ("check", "looked at", "result"),
            [
                (c["name"], f"{c['looked_at']:,}",
                 "passed" if c["passed"] else "; ".join(c["faults"]) or "looked at nothing")
                for c in content["verification"]["checks"]
            ],
        ),
        ReportSection(
            "Made with",
            ("stage", "seconds", "in all tries", "peak memory", "peak GPU memory", "GPU", "ended"),
            stage_rows(content["stages"]), (*_machine(content), *made_lines(content)),
        ),
    ]  # fmt: skip
    return [section for section in made if section.rows or section.lines]


def question_sections(questions: Content) -> list[ReportSection]:
    """Return a section for each task with questions that differ; each lists the first SHOWN."""
    made: list[ReportSection] = []
    for task, of_task in questions.items():
        rows = [question_row(entry) for entry in of_task["differ"]]
        said = f"{question_counts(of_task['differ'])}."
        said += f" The first {SHOWN} are listed." if len(rows) > SHOWN else ""
        said += " Private: a hash is shown, no answer." if of_task["private"] else ""
        title = f"Questions of {task} that differ"
        made += [ReportSection(title, QUESTION_COLUMNS, rows[:SHOWN], [said])] if rows else []
    return made


def health_section(tasks: Sequence[Content]) -> ReportSection:
    """Return the section on signs of ill health in both models' answers to `tasks`."""
    columns = ("task", "answers", "BF16", "quantized", "difference", "allowed", "judged")
    return ReportSection("Health of answers", columns, health_rows(tasks))


def ends_section(tasks: Sequence[Content]) -> ReportSection:
    """Return the section on steps, ends and loops of both models' answers, by kind of prompt."""
    lines = ["BF16 / quantized. Finished: the answer ended before its limit of tokens."]
    rows = ends_rows(tasks)
    return ReportSection("Steps, ends and loops", ("task", "kind", *ENDS), rows, lines * bool(rows))


def mode_lines(content: Content) -> list[str]:
    """Return a sentence, in a list, on the mode that was judged and the modes that servers multiply in.

    There is one only where they may differ: where NVFP4's activations are rounded on some GPUs.
    """
    gated = [task for task in content["tasks"] if task["gated"]]
    if not gated or "NVFP4" not in content.get("schemes", []):
        return []
    judged = {task["activations"] for task in gated}
    others = [task for task in content["tasks"] if task["activations"] == "none"]
    if judged == {"none"}:
        return [
            "Judged with activations in BF16 (mode none), as Hopper and older GPUs serve NVFP4. On "
            "Blackwell they are rounded to NVFP4 (per_layer), which was not judged."
        ]
    also = "which was not judged; `quantize evaluate RUN --activations none` judges it too"
    if others:
        shown = (f"{task['task']} {cell(task, 'difference_pp', '+.2f', ' pp')}" for task in others)
        also = f"scored beside it: {'; '.join(shown)}"
    return [
        f"Judged with activations rounded ({', '.join(sorted(judged))}), as Blackwell serves NVFP4. "
        f"Hopper and older GPUs leave them in BF16 (mode none), {also}."
    ]


def unread_rows(content: Content) -> list[list[str]]:
    """Return one row per gated task and model: how many answers have no final value, and examples.

    There is none for a task in which both models always have one.
    """
    rows: list[list[str]] = []
    for task in (task for task in content["tasks"] if task["gated"]):
        examples = content.get("no_answer", {}).get(task["task"], {})
        counts = {"bf16": task["bf16_counts"], "quantized": task["quantized_counts"]}
        if not any(count["no_answer"] for count in counts.values()):
            continue
        for model, count in counts.items():
            share = f"{100 * count['no_answer'] / count['samples']:.1f} %"
            number = f"{count['no_answer']:,} of {count['samples']:,}"
            shown = "; ".join(examples.get(model, [])) or "-"
            rows.append([task["task"], {"bf16": "BF16"}.get(model, model), number, share, shown])
    return rows


def _early_end(look: Mapping[str, int], *, given_up: bool) -> str:
    """Return a sentence on a task of which not all looks were taken; `look` is its entry in `looks`."""
    at = f"after look {look['taken']} of {look['of']}"
    if "budget" in look:
        return f"ended {at}: the budget of {look['budget']:,} tokens was spent."
    if given_up:
        return (
            f"given up {at}: the chance that the rest, which `--all` asks, would decide the verdict "
            f"was below {LEAST_CHANCE:.0%}."
        )
    return f"the verdict was certain {at}; the rest was not asked."


def looks_lines(content: Content) -> list[str]:
    """Return sentences on tasks that ended early or were not asked, and on unjudged steps."""
    undecided = content["verdict"]["outcome"] == "INCONCLUSIVE"
    given_up = {
        task["task"]
        for task in content["tasks"]
        if undecided and task["gated"] and task["outcome"] != "PASS"
    }
    lines = [
        f"{task}: {_early_end(look, given_up=task in given_up)} Its intervals are of what was asked, "
        f"not widened for the looks."
        for task, look in content["looks"].items()
        if look["taken"] < look["of"]
    ]
    why = "budget was spent" if undecided else "verdict was certain"  # else all are looked at once
    lines += [f"{task}: not asked; the run's {why} before." for task in content["not_asked"]]
    lines += [f"{sentence}." for sentence in content.get("not_read", [])]
    gated = [task for task in content["tasks"] if task["gated"] and not task["not_comparable"]]
    if gated:
        lines.append(
            f"The verdict rests on a one-sided {gated[0]['confidence']:.0%} bound of the loss, the "
            f"table's intervals are two-sided: beside a PASS one may reach past the margin."
        )
    lines += [
        f"{task['task']}: BF16 answers everything correctly, so the task is saturated: it shows large "
        f"losses only."
        for task in gated
        if task["base"] == 1
    ]
    lines += mode_lines(content)
    limits = [task["max_step_inflation"] for task in content["tasks"] if task["gated"]]
    if limits and not any(limits):
        lines.append("Denoising steps were not judged: the recipe sets no max_step_inflation.")
    elif limit := max(filter(None, limits), default=None):
        lines.append(f"The verdict includes that steps a token rise by at most {limit:.0%}.")
    return lines


def _settings(content: Content) -> list[str]:
    """Return sentences on the sampler settings that hold: a judged checkpoint's, or a point's."""
    judged = content.get("judged_settings")
    if judged and not content["operating_points"]:
        return [judged]
    return [judged, chosen_point(content)] if judged else [chosen_point(content)]


def _corrected(content: Content) -> list[str]:
    return [
        "p is corrected over all points (Holm). While points were asked, each was judged at its share "
        "of the error: one that was undecided then may pass here."
    ] * (len(content["operating_points"]) > 1)


def fidelity_section(fidelity: Content) -> ReportSection:
    """Return the section on each replay's distance from BF16; `fidelity` is fidelity.json."""
    limits, conditioned = fidelity["max_kl_nats"], fidelity["own_conditioning"]
    replays = [
        (mode, figures, limits.get(mode)) for mode, figures in fidelity["activations"].items()
    ]
    replays.append((f"{conditioned['activations']}, own self-conditioning", conditioned, None))
    rows = [
        (name, *(_mean(figures[key]) for key in FIDELITY), "-" if limit is None else str(limit))
        for name, figures, limit in replays
    ]
    notes = [
        f"{name}, KL by kind of prompt: {kinds}."
        for name, figures, _ in replays
        if (kinds := kinds_text(figures.get("by_kind", [])))
    ]
    notes += [line for name, figures, _ in replays for line in _routing_lines(name, figures)]
    notes += routing_cost_lines(fidelity)
    notes += [
        "In the row of own self-conditioning the quantized model reads its own logits of the step "
        "before, so its errors add up over a canvas, as while serving. The row has no limit, because "
        "a few trajectories that take another course make most of its mean, and no accuracy was found "
        "to follow from it (docs/evaluation.md).",
        *_largest_lines(replays, fidelity.get("trajectories")),
    ]
    notes += ranges_lines(fidelity)
    columns = ("activations", *FIDELITY.values(), "KL limit")
    lines = ["BF16's own trajectories, replayed: both models read the same canvas at every step."]
    title = "Fidelity on replayed trajectories"
    return ReportSection(title, columns, rows, lines, notes, ("kl", "routing"))


def _routing_lines(name: str, replay: Content) -> list[str]:
    """Return sentences on the experts that a replay's routers chose; [] without any."""
    if not (shares := replay.get("routing_overlap")):
        return []
    listed = ", ".join(f"{share:.3f}" for share in shares)
    lines = [f"{name}, share of BF16's experts that the router chooses too, by layer: {listed}."]
    if figures := replay.get("routing"):  # a run from before has none
        hit, moved = figures["experts_hit"], max(figures["moved"])
        lines.append(
            f"{name}, worst layers: a tenth of the tokens keep at most {min(figures['p10']):.0%} of "
            f"their experts, and {moved:.1%} of the routing weight moved. Experts hit in a layer by a "
            f"canvas, BF16 and quantized: {hit['bf16']['step']:.1f} and {hit['quantized']['step']:.1f} "
            f"at a step, {hit['bf16']['canvas']:.1f} and {hit['quantized']['canvas']:.1f} in all steps."
        )
    return lines


def routing_cost_lines(fidelity: Content) -> list[str]:
    """Return a sentence, in a list, on what other choices of experts cost; [] if not measured."""
    if not (cost := fidelity.get("routing_cost")):
        return []
    names = ("as_it_is", "with_bf16_choices", "bf16_with_its_choices")
    plain, held, swapped = (cost[name]["mean"] for name in names)
    added, (low, high) = cost["choices_add"]["mean"], cost["choices_add"]["interval"]
    share = f", {added / plain:.0%} of it" if plain > 0 else ""
    return [
        f"Of the KL of {plain:.4f} nats ({cost['activations']}), choosing other experts, or other "
        f"weights for them, adds {added:.4f} [{low:.4f}, {high:.4f}]{share}: with BF16's choices it is "
        f"{held:.4f}. BF16 itself, made to take the quantized model's choices, is {swapped:.4f} away."
    ]


def _largest_lines(replays: Sequence[Any], count: int | None) -> list[str]:
    """Return a sentence, in a list, on how much of each mean KL two trajectories make."""
    shares = [
        f"{100 * share:.0f} % ({name})"
        for name, replay, _ in replays
        if (share := replay["kl_nats"].get("two_largest")) is not None
    ]
    of = f" of {count}" if count else ""
    return [f"Of the mean KL the two largest trajectories{of} make {', '.join(shares)}."] * bool(
        shares
    )


def ranges_lines(fidelity: Content) -> list[str]:
    """Return a sentence, in a list, on input ranges that too few tokens reached; [] without any."""
    ranges = (fidelity.get("linears") or {}).get("ranges", {})
    if not (unchecked := ranges.get("unchecked")):
        return []
    experts = list(dict.fromkeys(module.rpartition(".")[0] for module in unchecked))
    named = f"{', '.join(experts[:8])}{' ...' if len(experts) > 8 else ''}"
    return [
        f"Input ranges: {ranges['checked']:,} checked, {len(unchecked):,} not, since too few tokens of "
        f"the replay reach their experts: {named}."
    ]


def kinds_text(kinds: Sequence[Content]) -> str:
    """Return a replay's KL by kind of prompt as text, "" if there are fewer than two kinds."""
    by_kind = [
        f"{k['kind']} {_mean(k['kl_nats'])} ({k['trajectories']} trajectories)" for k in kinds
    ]
    return "; ".join(by_kind) if len(by_kind) > 1 else ""


def _by_entropy(fidelity: Content) -> ReportSection:
    rows = [
        (mode, str(e["nats_from"]), f"{e['positions']:,}", f"{e['kl_nats']:.4f}",
         f"{e['top1_agreement']:.4f}")
        for mode, figures in fidelity["activations"].items()
        for e in figures["by_entropy"]
    ]  # fmt: skip
    columns = ("activations", "nats from", "positions", "KL, nats", "top-1 agreement")
    lines = ["Positions by BF16's own entropy."]
    return ReportSection("Where BF16 is unsure", columns, rows, lines)


def _mean(entry: Content) -> str:
    low, high = entry["interval"]
    return f"{entry['mean']:.4f} [{low:.4f}, {high:.4f}]"


def _coverage(coverage: Content | None) -> list[str]:
    if coverage is None:
        return []
    fallbacks = coverage["fallbacks"]
    named = f": {', '.join(fallbacks[:8])}{' ...' if len(fallbacks) > 8 else ''}" * bool(fallbacks)
    return [
        f"Tokens routed to each of {coverage['experts']} experts while calibrating: least "
        f"{coverage['least_tokens']:,}, median {coverage['median_tokens']:,}, most "
        f"{coverage['most_tokens']:,}. Fell back to their layer's maximum: {len(fallbacks)}{named}."
    ]


def _machine(content: Content) -> list[str]:
    hardware = content["hardware"]
    return [
        ", ".join(f"{name} {version}" for name, version in content["versions"].items()),
        f"{hardware['cpu']}, {hardware['cores']} cores; GPUs: {', '.join(hardware['gpus']) or 'none'}. "
        f"Model fingerprint {content['model']['fingerprint']}.",
        f"Scores: {'; '.join(scored_with(content['tasks']))}.",
    ]
