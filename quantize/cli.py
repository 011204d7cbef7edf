"""The command line: parse, call one function each, map errors to exit codes.

Heavy imports (torch, transformers) stay inside the commands: `quantize --help` answers at once.
"""

import errno
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantize import __version__
from quantize.errors import LONGEST, QuantizeError, unexpected_in
from quantize.stage import STAGES, Stage

if TYPE_CHECKING:
    from quantize.recipe import ActivationMode

RUN_FOLDER = click.argument("run", type=click.Path(path_type=Path))
GPU_MEMORY = click.option(
    "--gpu-memory", type=click.FloatRange(min=0, min_open=True), metavar="GB",
    callback=lambda _, __, gb: None if gb is None else gb * 1e9,
    help="Of the GPU, at most; weights that do not fit are streamed. Else all that is free.",
)  # fmt: skip
REAL_MODEL = "google/diffusiongemma-26B-A4B-it"
EXIT_CODES = """\b
Exit codes:
  0  done, and the gate passed
  1  the gate or the verification failed
  2  usage or bad input
  3  environment: missing GPU, memory, disk, token or dataset
  4  inconclusive, or not comparable
  70 a fault of ours; the message names the file with the traceback
"""


class _InOrder(click.Group):
    """Lists commands in the order of the pipeline, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="quantize")
def cli() -> None:
    """Quantize DiffusionGemma to FP8 or NVFP4, and prove that it still thinks.

    \b
    Start here (the bundled model, a few minutes on a CPU):
      quantize run --recipe nvfp4
    The real model (BF16 weights on disk or on the Hub):
      quantize plan --recipe nvfp4 --model google/diffusiongemma-26B-A4B-it
      quantize run  --recipe nvfp4 --model google/diffusiongemma-26B-A4B-it

    A run lies in outputs/RECIPE-HASH/. A run that was interrupted, or whose files were changed, goes
    on with --resume: what is done and stands is kept.
    """


def _model_options(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--revision", help="Revision of a Hub model: branch, tag or commit."),
        click.option(
            "--model",
            help="Checkpoint folder or Hub id (ORG/NAME@REVISION); else the bundled model.",
        ),
        click.option(
            "--recipe", "recipe", default="nvfp4", show_default=True, help="Name or YAML file."
        ),
    ):
        command = option(command)
    return command


def _scoring_options(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option(
            "--in-flight", type=click.IntRange(min=1), default=8, show_default=True,
            help="Requests to a server at once.",
        ),
        click.option("--base-server-revision", help="The same of the one with the BF16 model."),
        click.option(
            "--server-revision",
            help="What the server serves, where it does not tell a fingerprint.",
        ),
        click.option("--base-server", help="URL of one with the BF16 model."),
        click.option(
            "--server", help="URL of an OpenAI-compatible server with the quantized model."
        ),
        click.option(
            "--batch-size", type=click.IntRange(min=1),
            help="Problems at once, in place of the recipe's number.",
        ),
        click.option(
            "--noise-floor", is_flag=True,
            help="Score BF16 once more with another seed: what no quantization at all looks like.",
        ),
        click.option(
            "--data-dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Folder with TASK.jsonl files, in place of data sets on the Hub.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@cli.command()
@_model_options
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True,
    help="Folder that holds the runs.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=2), help="Score only the first N problems a task.")
@click.option(
    "--until",
    type=click.Choice([stage.name for stage in STAGES]),
    default="report",
    help="Stop after it.",
)
@_scoring_options
@GPU_MEMORY
@click.option("--resume", is_flag=True, help="Continue this run, or show it when it is complete.")
def run(
    recipe: str,
    model: str | None,
    revision: str | None,
    out: Path,
    limit: int | None,
    until: str,
    resume: bool,
    gpu_memory: float | None,
    **scoring: Any,
) -> int:
    """Do everything: plan, calibrate, convert, verify, replay, evaluate, report, gate."""
    from quantize.pipeline import advance, started

    with started(
        recipe,
        model,
        out,
        resume=resume,
        revision=revision,
        limit=limit,
        gpu_memory=gpu_memory,
        **scoring,
    ) as found:
        return advance(found, until)


@click.command()
@_model_options
@GPU_MEMORY
def plan(recipe: str, model: str | None, revision: str | None, gpu_memory: float | None) -> None:
    """Show what a recipe would do: modules, schemes, bytes, GPU memory. Reads no weights.

    --model may also be a config.json: the plan then comes from the config alone. Exits 3 when a
    stage does not fit --gpu-memory; without it, GPUs of 24 to 141 GB are shown.
    """
    from quantize.pipeline import show_plan

    show_plan(recipe, model, revision, gpu_memory)


@cli.command()
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the recipes that ship with quantize, or print one: `quantize recipes nvfp4`."""
    from quantize.recipe import load_recipe, shipped_recipes

    shipped = shipped_recipes()
    if name is not None:
        load_recipe(name)  # an unknown name is an error that lists the known ones
        click.echo(shipped[name], nl=False)
        return
    for known, text in shipped.items():
        purpose = text.splitlines()[0].lstrip("# ")
        click.echo(f"{known:14} {purpose}")


@cli.command()
@click.argument("checkpoint")
@click.option(
    "--repair", "out", type=click.Path(path_type=Path),
    help="Write a corrected copy to this folder, where there is one right correction.",
)  # fmt: skip
def inspect(checkpoint: str, out: Path | None) -> int:
    """Show what is in a checkpoint, quantized or not, and what is wrong.

    Reads headers, and the scales of whole matrices. CHECKPOINT is a folder or a Hub id. Exits 1 when
    something is wrong, and not repaired.
    """
    from rich.console import Console

    from quantize.checkpoints.inspect import inspect as inspect_checkpoint
    from quantize.checkpoints.inspect import inspection_table
    from quantize.checkpoints.reader import resolve
    from quantize.checkpoints.repair import repair
    from quantize.progress import say

    folder = resolve(checkpoint)
    found = inspect_checkpoint(folder)
    Console().print(inspection_table(found))
    for problem in found.problems:
        say(f"problem: {problem}")
    if out is None:
        return 1 if found.problems else 0
    for correction in repair(folder, out):
        say(f"repaired: {correction}")
    return 0


@click.command()
@RUN_FOLDER
@click.option(
    "--activations", "modes", multiple=True,
    type=click.Choice(["none", "per_expert", "per_layer"]),
    help="Score this way of rounding activations too; may be given several times.",
)  # fmt: skip
@_scoring_options
@click.option(
    "--gguf", type=click.Path(path_type=Path),
    help="Score the exported file too, in llama.cpp, with the same prompts and noise.",
)  # fmt: skip
@click.option(
    "--llama-cpp", type=click.Path(path_type=Path), metavar="PROGRAM",
    help="Its llama-diffusion-gemma-server, for --gguf.",
)  # fmt: skip
@GPU_MEMORY
def evaluate(run: Path, modes: tuple[str, ...], gpu_memory: float | None, **options: Any) -> None:
    """Score BF16 and quantized with the same prompts and seeds: what is not scored yet.

    \b
    On several GPUs, with the scores of one:
      torchrun --nproc-per-node 8 -m quantize evaluate RUN
    """
    from quantize.pipeline import opened, run_alone
    from quantize.stage import evaluate_more

    (stage,) = (stage for stage in STAGES if stage.name == "evaluate")
    with opened(run, gpu_memory) as found:
        run_alone(found, stage, partial(evaluate_more, modes=modes, **options))


def _command_of(stage: Stage) -> click.Command:
    """Return the command that runs one stage of a run folder again."""

    @click.command(name=stage.name, help=stage.summary)
    @RUN_FOLDER
    def command(run: Path, gpu_memory: float | None = None) -> int:
        from quantize.pipeline import opened, run_alone

        with opened(run, gpu_memory) as found:
            return run_alone(found, stage)

    return GPU_MEMORY(command) if stage.runs_models else command


for _stage in STAGES:
    cli.add_command({"plan": plan, "evaluate": evaluate}.get(_stage.name) or _command_of(_stage))


@cli.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
def compare(run_a: Path, run_b: Path) -> int:
    """Compare the quantized models of two runs, question by question.

    Exits 4 when their scores are not comparable.
    """
    from rich.console import Console

    from quantize.progress import say
    from quantize.reports.compare import compare_runs, comparison_table
    from quantize.run_dir import RunDir

    a, b = RunDir(run_a), RunDir(run_b)
    found = compare_runs(a, b)
    Console().print(comparison_table(found, a, b))
    if found.not_comparable:
        say(f"NOT COMPARABLE: {found.not_comparable}")
        return 4
    return 0


@cli.command()
@click.argument("checkpoint")
@click.argument("prompt")
@click.option(
    "--image", "pictures", multiple=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A picture shown before the prompt; repeatable.",
)  # fmt: skip
@click.option(
    "--image-tokens", "soft_tokens", type=int, default=280, show_default=True,
    help="Most tokens a picture takes: 70, 140, 280, 560 or 1120.",
)  # fmt: skip
@click.option("--thinking", is_flag=True, help="Let the model think before it answers.")
@click.option("--seed", default=0, show_default=True, help="Of the sampling noise.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Rounded up to whole canvases.")
@click.option(
    "--activations", type=click.Choice(["none", "per_expert", "per_layer"]),
    help="How a quantized model's activations are rounded; else as its kernels do, on a CPU not.",
)  # fmt: skip
@click.option(
    "--plain",
    is_flag=True,
    help="Write finished canvases, draw none; so it is, too, where stderr is a pipe.",
)
def generate(
    checkpoint: str,
    prompt: str,
    pictures: tuple[Path, ...],
    soft_tokens: int,
    thinking: bool,
    seed: int,
    max_new_tokens: int | None,
    activations: "ActivationMode | None",
    plain: bool,
) -> None:
    """Answer one prompt and show the canvas denoise: quantize generate CHECKPOINT "prompt".

    CHECKPOINT is a folder or a Hub id, BF16 or quantized; `bundled` is the model that ships. The
    answer goes to stdout, thoughts to stderr; with --plain each canvas as it is finished.
    """
    from quantize.checkpoints.reader import resolve
    from quantize.processes import best_device
    from quantize.watch import watch

    watch(
        resolve(None if checkpoint == "bundled" else checkpoint),
        prompt,
        thinking=thinking,
        seed=seed,
        max_new_tokens=max_new_tokens,
        activations=activations,
        plain=plain or not sys.stderr.isatty(),
        device=best_device(),
        pictures=pictures,
        soft_tokens=soft_tokens,
        write=partial(click.echo, nl=False),
    )


@cli.command()
@click.argument("checkpoint")
@click.option("--host", default="127.0.0.1", show_default=True, help="Elsewhere a key is required.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option("--model-name", help="What clients ask for; else the name of the folder.")
@click.option(
    "--max-num-seqs", type=click.IntRange(1, 64), default=4, show_default=True,
    help="Samples that are denoised together.",
)  # fmt: skip
@click.option(
    "--max-queue", type=click.IntRange(min=1), default=64, show_default=True,
    help="Samples that may wait; more get 429 and Retry-After.",
)  # fmt: skip
@click.option(
    "--max-context", type=click.IntRange(min=1),
    help="Tokens of prompt and answer; else what the model takes, on a GPU at most 8192.",
)  # fmt: skip
@click.option(
    "--batch-invariant", is_flag=True,
    help="On a GPU: a seeded sample has the same text alone and beside others, at a full batch's cost.",
)  # fmt: skip
@click.option(
    "--max-prompt-tokens", type=click.IntRange(min=1), help="Else what the context leaves."
)
@click.option(
    "--max-body-bytes", type=click.IntRange(min=1), default=8 << 20, show_default=True,
    help="Largest request body.",
)  # fmt: skip
@click.option(
    "--request-timeout", type=click.FloatRange(min=0, min_open=True), default=600.0,
    show_default=True, help="Seconds a request may take, waiting included.",
)  # fmt: skip
@click.option(
    "--shutdown-grace", type=click.FloatRange(min=0), default=30.0, show_default=True,
    help="Seconds that running requests get after SIGTERM.",
)  # fmt: skip
@click.option(
    "--activations", type=click.Choice(["none", "per_expert", "per_layer"]),
    help="How a quantized model's activations are rounded; else as its kernels do, on a CPU not.",
)  # fmt: skip
@click.option(
    "--ignore-unsupported", is_flag=True,
    help="Ignore temperature, top_p, penalties and the like, and name them in a header; off, refuse.",
)  # fmt: skip
@click.option(
    "--log-prompts", is_flag=True, help="Log prompts and answers; off, neither is logged."
)
def serve(
    checkpoint: str, model_name: str | None, activations: "ActivationMode | None", **settings: Any
) -> None:
    """Serve a checkpoint as an OpenAI-compatible endpoint: quantize serve CHECKPOINT.

    CHECKPOINT is a folder or a Hub id, BF16 or quantized; `bundled` is the model that ships. Needs
    the extra: pip install 'diffusiongemma-quantize[serve]'.

    \b
      quantize serve bundled                 then open http://127.0.0.1:8000/
      curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "bundled", "messages": [{"role": "user", "content":
        "Anna has 132 cards. Anna picks 94 more. How many cards does Anna have now?"}]}'
      answers 226.

    \b
    Also /v1/completions, /v1/models, /health, /metrics (Prometheus), /version, /docs.
    Honoured: max_tokens, stop, seed, n, stream with stream_options.include_usage,
      image_url parts of a user's message (data URLs of PNG, JPEG or WebP; image_tokens, 70
      to 1120, is the most that one takes; nothing is fetched),
      chat_template_kwargs.enable_thinking (thoughts come back as reasoning_content),
      the sampler's num_inference_steps, entropy_bound, t_min, t_max,
      confidence_threshold, stability_threshold,
      and the canvas: suffix of a completion, pinned [{position, text}], initial_text.
    Anything else is refused with 400, its name and the way out: temperature, say, other than 1;
      with --ignore-unsupported what only steers sampling is ignored and named in a header.
    A stream sends finished canvases; stream_options.include_drafts shows them denoise.

    Clients must send the key in the environment variable QUANTIZE_API_KEY, when there is one.
    Choice j of a request with a seed has the noise of seed + j, whatever else is served meanwhile;
    on a GPU roundings depend on the batch, unless --batch-invariant.
    SIGTERM lets running requests finish and refuses those that wait.
    """
    from quantize.checkpoints.reader import Checkpoint, resolve
    from quantize.errors import ResourceError
    from quantize.manifest import fingerprint
    from quantize.processes import best_device

    try:
        from quantize.serve.options import KEY_VARIABLE, Options
        from quantize.serve.server import serve as serve_checkpoint
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "prometheus_client", "starlette"):
            raise
        raise ResourceError(
            f"serve needs {error.name}: pip install 'diffusiongemma-quantize[serve]'"
        ) from error
    folder = resolve(None if checkpoint == "bundled" else checkpoint)
    name = model_name or _served_name(checkpoint, folder)
    options = Options(
        name,
        api_key=os.environ.get(KEY_VARIABLE),
        fingerprint=fingerprint(Checkpoint.open(folder)),
        activations=activations or "as served",
        **settings,
    )
    serve_checkpoint(folder, options, activations=activations, device=best_device())


def _served_name(checkpoint: str, folder: Path) -> str:
    """Name a model after its Hub id or folder; every run's folder is called checkpoint."""
    if not Path(checkpoint).is_dir():
        return checkpoint
    path = folder.resolve()
    return path.parent.name if path.name == "checkpoint" else path.name


@cli.command()
@click.argument("checkpoint", required=False)
@click.option(
    "--random-weights", metavar="MIX",
    help="Random weights of the exact 26B shape instead: bf16, fp8, int8, nvfp4 or nvfp4_fp8.",
)  # fmt: skip
@click.option(
    "--steps", multiple=True, default=("16",), show_default=True, metavar="N|adaptive",
    help="Denoising steps of a canvas: fixed, or as the checkpoint stops. Repeatable.",
)  # fmt: skip
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(1, 64), default=(1,),
    show_default=True, help="Canvases denoised together. Repeatable.",
)  # fmt: skip
@click.option(
    "--context",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Tokens before each canvas.",
)
@click.option(
    "--canvases", type=click.IntRange(1), default=5, show_default=True,
    help="Canvases measured for each row; the median counts.",
)  # fmt: skip
@click.option(
    "--experts-hit", type=click.IntRange(8, 128),
    help="With random weights: route to so many experts only.",
)  # fmt: skip
@click.option(
    "--hourly-price", type=float, help="Of the machine: adds the cost of a million tokens."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def bench(
    checkpoint: str | None,
    random_weights: str | None,
    steps: tuple[str, ...],
    batches: tuple[int, ...],
    context: int,
    canvases: int,
    experts_hit: int | None,
    hourly_price: float | None,
    as_json: bool,
) -> None:
    """Measure how fast a checkpoint denoises on this GPU, and how far from the floor.

    CHECKPOINT is a folder or a Hub id; leave it out with --random-weights. Shows ms per forward and
    per canvas, tokens/s, time to the first canvas, memory, and where a step's time goes.

    
      quantize bench outputs/nvfp4-3f2a91c/checkpoint --steps 10 --steps adaptive --batch 1 --batch 4
      quantize bench --random-weights nvfp4 --batch 1 --batch 4
    """
    from rich.console import Console

    from quantize.bench import bench as measure
    from quantize.bench import tables, to_json
    from quantize.checkpoints.reader import known_config, resolve

    if (checkpoint is None) == (random_weights is None):
        raise click.UsageError("name a CHECKPOINT, or a mix of --random-weights")
    result = measure(
        None if checkpoint is None else resolve(None if checkpoint == "bundled" else checkpoint),
        random=random_weights,
        config=known_config(REAL_MODEL),
        steps=steps,
        batches=sorted(set(batches)),
        context=context,
        canvases=canvases,
        experts_hit=experts_hit,
        hourly_price=hourly_price,
    )
    if as_json:
        click.echo(to_json(result))
        return
    for table in tables(result):
        Console().print(table)


@cli.command()
@RUN_FOLDER
@click.option("--repo", required=True, metavar="ORG/NAME", help="Created, private, if it is new.")
@click.option(
    "--to", default="pr", show_default=True, metavar="pr|main|BRANCH",
    help="A pull request, main, or a branch.",
)  # fmt: skip
@click.option("--tag", help="Tag the release, as the last step (not with a pull request).")
@click.option("--public", is_flag=True, help="Make the repository public, once all is verified.")
@click.option(
    "--allow", type=click.Choice(["inconclusive"]),
    help="Publish although the gate could not decide; the model card says so.",
)  # fmt: skip
@click.option(
    "--no-gate", is_flag=True, help="Publish whatever the verdict; the model card says so."
)
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, write nothing.")
@click.option("--yes", is_flag=True, help="Do not ask (for CI).")
def push(
    run: Path,
    repo: str,
    to: str,
    tag: str | None,
    public: bool,
    allow: str | None,
    no_gate: bool,
    dry_run: bool,
    yes: bool,
) -> int:
    """Publish a run whose gate passed to the Hugging Face Hub, with a model card made from it.

    The token comes from HF_TOKEN or from `hf auth login`. Interrupted? The same command goes on.
    """
    from quantize.hub.release import Request
    from quantize.pipeline import push as push_run

    def confirm() -> bool:
        if not (yes or sys.stdin.isatty()):
            raise click.UsageError("nobody to ask here: add --yes, or --dry-run to look only")
        return yes or click.confirm("Upload this?", err=True)

    request = Request(repo, to, tag, public, allow == "inconclusive", no_gate)
    return push_run(run, request, dry_run=dry_run, confirm=confirm)


@cli.command()
@click.argument("checkpoint")
@click.option("--to", "format_", type=click.Choice(["gguf"]), required=True, help="The format.")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--type", "kept_as", type=click.Choice(["bf16", "q8_0"]), default="bf16", show_default=True,
    help="Type of the matrices that the checkpoint holds in BF16.",
)  # fmt: skip
def export(checkpoint: str, format_: str, out: Path, kept_as: str) -> None:
    """Write a checkpoint in another format: quantize export CHECKPOINT --to gguf OUT.gguf

    CHECKPOINT is a run, a folder or a Hub id, BF16 or quantized to NVFP4; `bundled` is the model that
    ships. GGUF is for llama.cpp: text only, tokenizer and chat template inside (docs/exports.md).
    Interrupted? The same command goes on.
    """
    from quantize.checkpoints.reader import Checkpoint, resolve
    from quantize.exports.gguf_file import export_gguf
    from quantize.progress import say
    from quantize.run_dir import RunDir

    run = RunDir(Path(checkpoint))
    source = run.checkpoint if run.manifest_json.is_file() else None
    folder = source or resolve(None if checkpoint == "bundled" else checkpoint)
    done = export_gguf(
        Checkpoint.open(folder),
        out,
        name=_served_name(str(folder) if source else checkpoint, folder),
        kept_as="Q8_0" if kept_as == "q8_0" else "BF16",
    )
    types = ", ".join(f"{count} {kind}" for kind, count in done.types.items())
    say(f"{out}: {done.bytes_out:,} bytes ({types}) from {done.bytes_in:,}; no vision tower")


def main() -> None:
    """Run the command line and exit with the code that the outcome calls for."""
    sys.exit(_exit_code())


# The libraries' own bars and chatter would cut into ours; each can be turned on again from outside.
QUIET = {
    "TQDM_DISABLE": "1",
    "LLM_COMPRESSOR_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}


def _exit_code() -> int:
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        with unexpected_in(Path(tempfile.gettempdir(), f"quantize-{os.getpid()}.log")):
            return cli.main(standalone_mode=False) or 0
    except QuantizeError as error:
        return _complain(str(error), error.exit_code)
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted; --resume continues this run", 130)
    except OSError as error:
        place = error.filename or "the output folder"
        if error.errno == errno.ENOSPC:
            return _complain(f"{place}: the disk is full; free some space, then --resume", 3)
        return _complain(f"{place}: {error.strerror or error}", 3)
    except (MemoryError, RuntimeError) as error:  # torch's, of a GPU, is a RuntimeError
        text = " ".join(str(error).split())[:LONGEST]
        return _complain(f"out of memory ({text}); free some, or use a larger machine", 3)


def _complain(message: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    return code
