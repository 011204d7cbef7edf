"""The errors a user may meet, each with the exit code the command line ends with.

Exit codes: 0 done and gate passed, 1 gate failed, 2 usage or bad input, 3 environment (missing GPU,
memory, disk, token, dataset), 4 inconclusive or not comparable. A message is one line that says what
is wrong, where (file, tensor, key), and what to do next.
"""


class QuantizeError(Exception):
    """Base of every error that ends a command with one clear line instead of a traceback."""

    exit_code = 2


class InputError(QuantizeError):
    """The user's input is wrong: a foreign or damaged checkpoint, an unknown key, a bad option."""

    exit_code = 2


class ResourceError(QuantizeError):
    """The machine or account lacks something: GPU, memory, disk, token, dataset."""

    exit_code = 3


class GateError(QuantizeError):
    """The artifact failed a check that gates its release."""

    exit_code = 1


class UndecidedError(QuantizeError):
    """The evaluation could not decide: inconclusive, or the two sides were not comparable."""

    exit_code = 4
