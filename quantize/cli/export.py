"""`quantize export`: a checkpoint in another format."""

from pathlib import Path

import click

from quantize.cli.options import served_name


@click.command()
@click.argument("checkpoint")
@click.option("--to", "format_", type=click.Choice(["gguf"]), required=True, help="Format of OUT.")
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
    from quantize.host.progress import say
    from quantize.runs.folder import RunDir

    run = RunDir(Path(checkpoint))
    source = run.checkpoint if run.manifest_json.is_file() else None
    folder = source or resolve(checkpoint)
    done = export_gguf(
        Checkpoint.open(folder),
        out,
        name=served_name(str(folder) if source else checkpoint, folder),
        kept_as="Q8_0" if kept_as == "q8_0" else "BF16",
    )
    types = ", ".join(f"{count} {kind}" for kind, count in done.types.items())
    say(f"{out}: {done.bytes_out:,} bytes ({types}) from {done.bytes_in:,}; no vision tower")
