"""`quantize generate`, `bench`, `tune` and `export`; `serve`, of this group, has its own file."""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from quantize.cli.options import REAL_MODEL, STEPS, served_name, with_options
from quantize.cli.serve import serve as serve
from quantize.schemes.modes import ActivationMode


@click.command()
@with_options("checkpoint")
@click.argument("prompt")
@click.option(
    "--image", "pictures", multiple=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A picture shown before the prompt; repeatable.",
)  # fmt: skip
@click.option(
    "--image-tokens", "soft_tokens", type=int, default=280, show_default=True,
    help="Most tokens per picture: 70, 140, 280, 560 or 1120.",
)  # fmt: skip
@click.option("--thinking", is_flag=True, help="Let the model think before it answers.")
@click.option("--steps", type=STEPS, metavar="T", help="Most denoising steps per canvas.")
@click.option("--seed", default=0, show_default=True, help="Seed of the sampling noise.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1),
    help="Most tokens of the answer, rounded up to whole canvases.",
)  # fmt: skip
@with_options("activations", "gpu-memory")
@click.option(
    "--plain", is_flag=True,
    help="Write finished canvases and draw no steps; the default if stderr is no terminal.",
)  # fmt: skip
def generate(
    checkpoint: str, prompt: str, activations: ActivationMode | None, gpu_memory: float | None,
    plain: bool, **options: Any,
) -> None:  # fmt: skip
    """Answer one prompt and show the canvas denoise: quantize generate CHECKPOINT "prompt".

    CHECKPOINT is a folder or a Hub id, BF16 or quantized; `bundled` is the model that ships. The
    answer goes to stdout, and thoughts to stderr. --plain writes each canvas when it is finished.
    """
    from quantize.checkpoints.reader import resolve
    from quantize.cli.canvas_view import watch
    from quantize.host.processes import best_device
    from quantize.runtime import Placement

    where = Placement(best_device(), gpu_memory, activations)
    plain = plain or not sys.stderr.isatty()
    write = partial(click.echo, nl=False)
    watch(resolve(checkpoint), prompt, where=where, plain=plain, write=write, **options)


@click.command()
@click.argument("checkpoint", required=False)
@click.option(
    "--random-weights", "random", metavar="MIX",
    help="Random weights of the exact 26B shape instead: bf16, fp8, int8, nvfp4 or nvfp4_fp8.",
)  # fmt: skip
@click.option(
    "--steps", multiple=True, default=("16",), show_default=True, metavar="N|adaptive",
    help="Denoising steps per canvas: a number, or adaptive (the checkpoint decides). Repeatable.",
)  # fmt: skip
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(1, 64), default=(1,),
    show_default=True, help="Canvases denoised together. Repeatable.",
)  # fmt: skip
@click.option(
    "--context", type=click.IntRange(1), default=1024, show_default=True,
    help="Tokens before each canvas.",
)  # fmt: skip
@click.option(
    "--canvases", type=click.IntRange(1), default=5, show_default=True,
    help="Canvases measured per row; their median is shown.",
)  # fmt: skip
@click.option(
    "--autoregressive", is_flag=True,
    help="Also measure the same weights without canvases, writing one token per forward.",
)  # fmt: skip
@with_options("hourly-price", "measured")
@click.option(
    "--stops", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="JSON list of the numbers of steps that canvases of adaptive rows take, in turn.",
)  # fmt: skip
@with_options("activations", "gpu-memory")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def bench(
    checkpoint: str | None, activations: ActivationMode | None, gpu_memory: float | None,
    measured: Path | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Measure how fast a checkpoint denoises on this GPU, against the least time that is possible.

    CHECKPOINT is a folder or a Hub id; leave it out with --random-weights, which hit every expert or as
    many as --measured says. Shows ms per forward and per canvas, tokens/s, time to the first canvas,
    memory, and where a step's time goes. If the driver reports energy, each row is measured for 10 s or
    more, and also shows mean W, J per forward, tokens per joule, MHz, and how often the power limit
    held the clock down.

    \b
      quantize bench outputs/nvfp4-3f2a91c/checkpoint --steps 10 --steps adaptive --batch 1 --batch 4
      quantize bench --random-weights nvfp4 --batch 1 --batch 4 --autoregressive --hourly-price 3
    """
    from quantize.bench.speed import bench as measure
    from quantize.bench.speed import tables
    from quantize.checkpoints.reader import known_config, resolve
    from quantize.host.progress import screen
    from quantize.runtime import Placement
    from quantize.stages.plan.measured import measured_denoising

    if (checkpoint is None) == (options["random"] is None):
        raise click.UsageError("name a CHECKPOINT, or a mix of --random-weights")
    if checkpoint is not None and measured is not None:
        raise click.UsageError("--measured needs --random-weights: a checkpoint's routers choose")
    folder = None if checkpoint is None else resolve(checkpoint)
    place = Placement("cuda", gpu_memory, activations)
    config = known_config(REAL_MODEL) or {}
    hit_by = measured_denoising(measured, config).hit_by
    result = measure(folder, config=config, place=place, hit_by=hit_by, **options)
    if as_json:
        click.echo(json.dumps(asdict(result), indent=1))
    else:
        screen().print(*tables(result))


@click.command()
@click.option(
    "--only", default="", metavar="REGEX",
    help="Tune only products whose key matches, such as linear/fp8/4096x2816 M=256.",
)  # fmt: skip
@with_options("measured")
def tune(only: str, measured: Path | None) -> None:
    """Measure the kernels' launch configurations on this GPU and keep the fastest.

    Every matrix product of the 26B model is timed in every configuration, at 64 to 8,192 tokens.
    Products of more tokens use the fastest for 8,192. Tuning products of 64, 256 and 1,024 tokens
    takes about two minutes on an H200. The table goes into the user's cache folder, from which
    generate, bench, serve and all stages take it. Prints how much each product gained.
    """
    from quantize.bench.tune import gains_table, tune_gpu
    from quantize.checkpoints.reader import known_config
    from quantize.host.progress import screen
    from quantize.stages.plan.measured import measured_denoising

    hit_by = measured_denoising(measured, known_config(REAL_MODEL) or {}).hit_by
    screen().print(gains_table(tune_gpu(only, hit_by)))


@click.command()
@with_options("checkpoint")
@click.option("--to", "format_", type=click.Choice(["gguf"]), required=True, help="Format of OUT.")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--type", "kept_as", type=click.Choice(["bf16", "q8_0"]), default="bf16", show_default=True,
    help="Type in OUT of the matrices that the checkpoint holds in BF16.",
)  # fmt: skip
def export(checkpoint: str, format_: str, out: Path, kept_as: Any) -> None:
    """Write a checkpoint in another format: quantize export CHECKPOINT --to gguf OUT.gguf

    CHECKPOINT is a run, a folder or a Hub id, BF16 or quantized to NVFP4; `bundled` is the model that
    ships. GGUF is for llama.cpp: text only, with tokenizer and chat template (docs/exports.md).
    Interrupted? The same command goes on.
    """
    from quantize.checkpoints.reader import Checkpoint, resolve
    from quantize.exports.gguf_file import export_gguf
    from quantize.host.progress import say
    from quantize.runs.folder import RunDir

    run = RunDir(Path(checkpoint))
    source = run.checkpoint if run.manifest_json.is_file() else None
    folder = source or resolve(checkpoint)
    name = served_name(str(folder) if source else checkpoint, folder)
    done = export_gguf(Checkpoint.open(folder), out, name=name, kept_as=kept_as.upper())
    types = ", ".join(f"{count} {kind}" for kind, count in done.types.items())
    say(f"{out}: {done.bytes_out:,} bytes ({types}) from {done.bytes_in:,}; no vision tower")
