"""The command line: a command parses and calls one function; `main` turns errors into exit codes.

Each group of commands has a file, named after the first word of the group's title (`GROUPS`). A new
command is a function in its group's file, and a name in `GROUPS`. Heavy imports (torch,
transformers) stay inside the functions, so that `quantize --help` answers at once.
"""

import difflib
import errno
import gc
import os
import shlex
import signal
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import click

from quantize import __version__
from quantize.cli.examples import with_examples
from quantize.cli.options import continuing
from quantize.errors import LONGEST, QuantizeError, unexpected_in
from quantize.host.locks import refuse_several
from quantize.pipeline.stages import STAGES

GROUPS = {
    "Run": ("run", "rehearse", "status"),
    "Stages of a run, one by one": tuple(stage.name for stage in STAGES),
    "Look": ("recipes", "tasks", "inspect", "measure", "doctor"),
    "Judge": ("judge", "compare", "baseline", "search"),
    "Use": ("generate", "serve", "bench", "tune", "export"),
    "Ship": ("adopt", "card", "bundle", "push", "verify-signature"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
EXIT_CODES = """\b
Exit codes:
  0  done, and the gate passed
  1  the gate, the verification, the replay, `inspect` or a signature's check failed
  2  usage or bad input
  3  environment: missing GPU, memory, disk, token or dataset
  4  inconclusive, or not comparable
  70 a fault of ours; the message names the file with the traceback
  130 interrupted; the message says what goes on
"""


class _Commands(click.Group):
    """Lists commands by purpose, and imports a command's module only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(n.ljust(width), c.get_short_help_str(200)) for n, c in commands if c]
                )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:  # a shell completes the line: there is nothing to say
                return None
            close = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise click.UsageError(f"no such command {cmd_name!r}{hint}", ctx)
        group = next(title for title, names in GROUPS.items() if cmd_name in names)
        module = import_module(f"quantize.cli.{group.split()[0].lower()}")
        return with_examples(getattr(module, cmd_name.replace("-", "_")), cmd_name)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="quantize")
@click.pass_context
def cli(context: click.Context) -> None:
    """Quantize DiffusionGemma to FP8, INT8, NVFP4 or MXFP4, and measure what that costs.

    \b
    Start here (the bundled model, a few minutes on a CPU):
      quantize run --recipe nvfp4
    The real model (BF16 weights on disk or on the Hub):
      quantize plan --recipe nvfp4 --model google/diffusiongemma-26B-A4B-it
      quantize run  --recipe nvfp4 --model google/diffusiongemma-26B-A4B-it

    A run is a folder, outputs/RECIPE-HASH/. If a run was interrupted, or its files were changed,
    --resume continues the run and keeps all results that are still valid.
    """
    command = context.invoked_subcommand
    if command not in [stage.name for stage in STAGES if stage.shares_work]:
        refuse_several(str(command))


def main() -> None:
    """Run the command line and exit with the code that the outcome calls for."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a cancelled job ends as by Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    code = _exit_code()
    gc.freeze()  # else Python's last collection walks all objects, for seconds after the last line
    sys.exit(code)


def _interrupt(*_: object) -> None:
    """Say that the command stops, and stop it by KeyboardInterrupt; the next signal ends it at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)
    line = (
        "stopping: what is being computed or written ends first; press Ctrl-C again to stop at once"
    )
    os.write(2, f"{line}\n".encode())  # a stream may be in the middle of a line's writing
    raise KeyboardInterrupt


def _end_at_once(*_: object) -> None:
    os.write(2, f"error: {_interrupted()}\n".encode())
    os._exit(130)  # files are written aside and renamed, so none is left half-written


def _interrupted() -> str:
    return f"interrupted{_going_on()}"


# Libraries' own bars and messages would cut into ours; set these variables to see them again.
QUIET = {
    "TQDM_DISABLE": "1",
    "LLM_COMPRESSOR_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}


def _exit_code() -> int:
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        with unexpected_in(Path(tempfile.gettempdir(), f"quantize-{os.getpid()}.log")):
            return cli.main(prog_name="quantize", standalone_mode=False) or 0
    except QuantizeError as error:
        return _complain(str(error), error.exit_code)
    except click.ClickException as error:
        return _misused(error)
    except (KeyboardInterrupt, click.Abort):
        return _complain(_interrupted(), 130)
    except OSError as error:
        full = f"the disk is full; free some space{_going_on()}"
        what = full if error.errno == errno.ENOSPC else error.strerror or error
        return _complain(f"{error.filename or 'the output folder'}: {what}", 3)
    except (MemoryError, RuntimeError) as error:  # torch's error for a GPU is a RuntimeError
        text = " ".join(str(error).split())[:LONGEST]
        return _complain(f"out of memory ({text}); free some, or use a larger machine", 3)


def _going_on() -> str:
    """Return "; `COMMAND` goes on" with the command that continues this one, "" if none can."""
    words = continuing(sys.argv[1:])
    known = {"run", "rehearse", "judge", "search", "measure", "push", "export"}
    known |= {stage.name for stage in STAGES}
    return f"; `{shlex.join(['quantize', *words])}` goes on" if known & set(words[:1]) else ""


def _misused(error: click.ClickException) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # `quantize` alone shows the help
        error.show()
        return 2
    message = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    place = context.command_path if context else "quantize"
    return _complain(f"{message[0].lower()}{message[1:].rstrip('.')}; see `{place} --help`", 2)


def _complain(message: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    return code
