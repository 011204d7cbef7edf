"""The errors that a user may meet, each with the exit code that the command line ends with.

A message is one line: what is wrong, where (file, tensor, key), and what to do next.
"""

import os
import re
import tempfile
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

OUT_OF_MEMORY = "OutOfMemoryError"  # torch's class, a RuntimeError
LONGEST = 200  # characters of a foreign error's text in a message


class QuantizeError(Exception):
    """Base of every error that ends a command with one clear line instead of a traceback.

    Line breaks that a foreign error's text brings into `message` become spaces.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class InputError(QuantizeError):
    """The user's input is wrong: a foreign or damaged checkpoint, an unknown key, a bad option."""


class ResourceError(QuantizeError):
    """The machine or account lacks something: GPU, memory, disk, token, dataset."""

    exit_code = 3


class GateError(QuantizeError):
    """The artifact failed a check that gates its release."""

    exit_code = 1


class UndecidedError(QuantizeError):
    """The verdict is open: inconclusive, or baseline and candidate were not comparable."""

    exit_code = 4


class UnexpectedError(QuantizeError):
    """A fault of this package: the message names the file that holds the traceback."""

    exit_code = 70


@contextmanager
def unexpected_in(log: Path) -> Generator[None]:
    """Append the traceback of an unexpected error to `log`, and raise an UnexpectedError that names it.

    Errors that a user can act on pass unchanged: QuantizeError, click's, OSError, out of memory.
    """
    try:
        yield
    except (QuantizeError, OSError, MemoryError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("click") or type(error).__name__ == OUT_OF_MEMORY:
            raise
        # safetensors names a full disk in its text only
        if number := re.search(r"I/O error: .*\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        try:
            with log.open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        except OSError:
            log = Path(tempfile.gettempdir(), f"quantize-{os.getpid()}.log")
            log.write_text(traceback.format_exc(), "utf-8")
        text = " ".join(str(error).split())[:LONGEST]
        raise UnexpectedError(
            f"unexpected {type(error).__name__}: {text}; the traceback is in {log}"
        ) from error
