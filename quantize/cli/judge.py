"""`quantize judge`, `compare`, `baseline` and `search`: measure what quantized models lose."""

from pathlib import Path
from typing import Any

import click

from quantize.cli.options import remember_command, with_options

PACK = click.argument("pack", type=click.Path(path_type=Path, dir_okay=False))


@click.command()
@with_options("checkpoint")
@click.option(
    "--against", metavar="BF16",
    help="Folder or Hub id of the BF16 model; by default the bundled model.",
)  # fmt: skip
@with_options("recipe", "out", "task", "limit")
@click.option(
    "--fine-tuned", is_flag=True,
    help="Weights differ from BF16's on purpose: do not compare them, and say so in the report.",
)  # fmt: skip
@with_options("scoring", "machine", "resume")
def judge(checkpoint: str, against: str | None, recipe: str, out: Path, **options: Any) -> int:
    """Judge a checkpoint that others built: inspect, compare weights, replay, evaluate, report, gate.

    CHECKPOINT is a folder or a Hub id (NVIDIA's, RedHatAI's, a fine-tuned model's); the recipe's tasks
    and gate judge it. BF16's answers and recorded trajectories are those of other runs in --out, if
    there are any; in the replay BF16 reads the trajectories again. `quantize compare` compares the
    resulting folder with one of `quantize run`.
    Exit codes are those of `quantize run`.
    """
    from quantize.pipeline.judge import judging
    from quantize.pipeline.run import advance

    with judging(checkpoint, against, recipe, out, **options) as judged:
        remember_command(judged.folder)
        return advance(judged)


@click.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option(
    "--questions", type=click.IntRange(min=0), default=20, show_default=True,
    help="Most questions to list per task.",
)  # fmt: skip
def compare(run_a: Path, run_b: Path, questions: int) -> int:
    """Compare the quantized models of two runs, question by question.

    Lists the questions that only one run got right, or that both got wrong with different answers.
    A private task's questions are shown as hashes. The exit code is 4 if scores are not comparable:
    both runs must have the same tasks, as many questions and repeats, the same seed, prompts and
    sampler. If a run has fewer questions, judge or run it again with the other's --limit. The exit
    code is 2 if a run has no scores yet, or if they are stale.
    """
    from quantize.api import compare as compare_runs
    from quantize.host.progress import say, screen
    from quantize.reports.compare import comparison_table, question_tables

    comparison = compare_runs(run_a, run_b)
    table = comparison_table(comparison, run_a, run_b)
    screen().print(table, *question_tables(comparison, questions))
    if comparison.not_comparable:
        say(f"NOT COMPARABLE: {comparison.not_comparable}")
        return 4
    return 0


@click.group()
def baseline() -> None:
    """Take BF16's answers from one machine to another.

    BF16's answers do not depend on the recipe. On a small GPU, making them takes most of the time
    of an evaluation. Once a pack of answers is imported, `run` and `evaluate` ask only the
    quantized model; the report and the card name the pack's origin.
    """


@baseline.command("export")
@with_options("run")
@PACK
def export_(run: Path, pack: Path) -> None:
    """Write the answers of a run's BF16 model to the file PACK, without questions."""
    from quantize.runs.folder import existing_run
    from quantize.stages.evaluate.baseline_pack import export_pack

    click.echo(f"{pack}: {export_pack(existing_run(run), pack)}")


@baseline.command("import")
@PACK
@with_options("out")
def import_(pack: Path, out: Path) -> None:
    """Let the runs in the folder --out take BF16's answers from the file PACK.

    A run ignores packs of other BF16 weights. A pack fits if it and the run have the same sampler,
    data, seed, tokenizer and versions of the packages that decide answers. If a run finds packs of
    its weights, but none fits, the run stops and says what differs.
    """
    from quantize.stages.evaluate.baseline_pack import import_pack

    pack_read = import_pack(pack, out)
    click.echo(f"{pack_read.path}: {pack_read}")


@baseline.command("push")
@PACK
@click.argument("repo", metavar="ORG/NAME")
@click.option(
    "--sign", metavar="KEY.pem|sigstore",
    help="Sign the pack: with a private key (elliptic curve, PEM), or by Sigstore.",
)  # fmt: skip
def push_(pack: Path, repo: str, sign: str | None) -> None:
    """Upload the file PACK to a dataset repository of the Hub; a new one is private.

    Prints what `quantize baseline pull` takes. No pack is replaced: its name is its sha256.
    """
    from quantize.hub.baselines import push_pack
    from quantize.hub.signing import SIGSTORE
    from quantize.stages.evaluate.baseline_pack import read_pack

    digest, key = read_pack(pack).sha256, Path(sign) if sign not in (None, SIGSTORE) else None
    click.echo(push_pack(pack, digest, repo, signed=sign is not None, key=key))


@baseline.command("pull")
@click.argument("named", metavar="ORG/NAME[@REVISION]")
@click.option("--sha256", "digest", default="", help="Sha256 of the pack, or how it begins.")
@click.option("--key", type=click.Path(path_type=Path), help="The signer's public key, PEM.")
@click.option("--identity", help="With Sigstore: the account that signed.")
@click.option("--issuer", help="With Sigstore: URL of the service where that account logged in.")
@with_options("out")
def pull_(named: str, digest: str, out: Path, **signer: Any) -> None:
    """Download a pack of BF16's answers from the Hub and import it for the runs in the folder --out.

    Without --key or --identity nobody says whose answers they are: `quantize baseline check` asks
    BF16 a sample of them again.
    """
    from quantize.hub.baselines import pull_pack
    from quantize.stages.evaluate.baseline_pack import import_pack

    if (signer["identity"] is None) != (signer["issuer"] is None):
        raise click.UsageError("--identity and --issuer go together")
    path, sha256, hub = pull_pack(named, digest, **signer)
    pack_read = import_pack(path, out, hub, sha256)
    click.echo(f"{pack_read.path}: {pack_read}")


@baseline.command()
@with_options("run")
@click.option(
    "--answers", default=40, show_default=True, type=click.IntRange(min=1),
    help="How many of the run's imported answers BF16 gives again.",
)  # fmt: skip
@click.option("--seed", type=int, help="Draws them; by default one that nobody knows beforehand.")
@with_options("data-dir", "machine")
def check(run: Path, answers: int, seed: int | None, **options: Any) -> None:
    """Ask BF16 a random sample of the answers again that RUN took from a pack.

    Where GPU and packages are the pack's, each answer must be equal in every byte. Elsewhere the
    pack must be as often right, by a sign test. The exit code is 1 if the sample speaks against the
    pack. `quantize report RUN` then says what was found.
    """
    from quantize.pipeline.run import opened
    from quantize.pipeline.stages import check_baseline

    with opened(run, **options) as opened_run:
        check_baseline(opened_run, answers, seed)


@click.command()
@click.argument("recipe")
@click.option(
    "--bytes", "nbytes", type=click.FloatRange(min=0), help="Most bytes of the checkpoint."
)
@click.option("--kl", type=click.FloatRange(min=0), help="Or the largest predicted KL, in nats.")
@click.option(
    "--scheme", "schemes", multiple=True, default=("NVFP4", "NVFP4A16", "FP8_DYNAMIC"),
    show_default=True, help="A scheme that a part may get, besides BF16; repeatable.",
)  # fmt: skip
@with_options("model", "revision", "out", "gpu-memory", "gpu")
def search(recipe: str, model: str | None, out: Path, **options: Any) -> None:
    """Choose a scheme for every layer's attention, MLP and experts, and write the choice as a recipe.

    Quantizes one part of a layer at a time, and measures the model's KL from BF16. Then it measures
    six choices of a scheme or BF16 for every part, and predicts the KL of other choices. The choice
    of least KL within --bytes, or of fewest bytes within --kl, is measured too. RECIPE gives all
    other settings. A second search with the same RECIPE and model reuses the measurements.
    """
    from quantize.pipeline.search import search as search_schemes

    search_schemes(recipe, model, out, **options)
