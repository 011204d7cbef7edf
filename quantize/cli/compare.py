"""`quantize compare`: two runs, question by question."""

from pathlib import Path

import click


@click.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option(
    "--questions", type=click.IntRange(min=0), default=20, show_default=True,
    help="Most differing questions to list a task.",
)  # fmt: skip
def compare(run_a: Path, run_b: Path, questions: int) -> int:
    """Compare the quantized models of two runs, question by question.

    It lists the questions that B lost or won against A, for a private task their hashes. It exits
    with 4 when the scores are not comparable.
    """
    from rich.console import Console

    from quantize.host.progress import say
    from quantize.reports.compare import compare_runs, comparison_table, question_tables
    from quantize.runs.folder import existing_run

    a, b = existing_run(run_a), existing_run(run_b)
    found = compare_runs(a, b)
    Console().print(comparison_table(found, a, b), *question_tables(found, questions))
    if found.not_comparable:
        say(f"NOT COMPARABLE: {found.not_comparable}")
        return 4
    return 0
