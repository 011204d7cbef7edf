"""Compiles a form in another process first: some small forms take all memory, or hours.

llguidance limits what a form's text costs, but not all of what its compilation does (`multipleOf` with
a large number, `allOf` over many alternatives). It cannot be interrupted. So a child process compiles
each form under a limit of CPU time and of memory. Only a form that the child could compile is compiled
in the server. The child lives on until a form ends it; the next form starts another.

    parent: one line of JSON with the tokenizer's text and ends, then one line with each grammar
    child:  a line as soon as it is ready, then one line with the fault of each grammar, or null
"""

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SECONDS, MEGABYTES = 0.5, 128  # of the child's CPU time, and of memory, for one form
INTERNALS = r": \((?=[A-Z])| \d+ \| \w+: | Enable '"  # trees, rules and options of the library
UNREAD, UNHELD = "a pattern cannot be read: ", "no answer can be held to"
AROUND = f"{UNHELD} look-around: (?=a), (?!a), (?<=a), (?<!a), \\b, or ^ and $ inside a pattern"
IN_OWN_WORDS = {"lookarounds not supported": AROUND, f"{UNREAD}look-around": AROUND,
                f"{UNREAD}backrefe": f"{UNHELD} a pattern's back reference to a group"}  # fmt: skip
PATIENCE = 60.0  # seconds that a busy machine may take for these
TOO_MUCH = (
    f"compiling it takes more than {SECONDS:g} s of a processor or {MEGABYTES} MB; make it smaller"
)
# All copies of a matcher share its lexer's states, each of up to 2 kB. No message quotes an answer.
LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


def compiled(tokenizer: LLTokenizer, grammar: str) -> tuple[Any, str | None]:
    """Return the matcher of a grammar, and what is wrong with the grammar or None."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        return matcher, None
    fault = " ".join(matcher.get_error().split()).removesuffix("<non-verbose/>").strip()
    if fault.startswith("panic"):  # of the library, at a size that it does not check
        fault = "it is too large"
    fault = re.sub(r"Unimplemented keys: \[(.*)\]", rf"{UNHELD} \1; leave it out", fault)
    fault = re.sub(r"^at \d+\(\d+\): | \(in regex\)", "", fault)  # places in its own grammar
    if "regex parse error: " in fault:  # and the whole pattern, however long
        fault = UNREAD + fault.rpartition(" error: ")[2]
    fault = next((words for construct, words in IN_OWN_WORDS.items() if construct in fault), fault)
    return matcher, re.split(INTERNALS, fault)[0][:300]


class Trial:
    """Tries grammars in a child process for the tokenizer of `text` (its JSON); not thread-safe."""

    def __init__(self, text: str, ends: Sequence[int]) -> None:
        self._setting = {"tokenizer": text, "ends": list(ends)}
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Return the child, started if there is none."""
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-m", "quantize.serve.trial"]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._child = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
            if self._ask(self._child, self._setting) != "ready":
                self.close()
                raise RuntimeError("the process that tries forms cannot be started")
        return self._child

    def fault(self, grammar: str) -> str | None:
        """Return what is wrong with a grammar, None if it can be compiled within the limits."""
        return self._ask(self.start(), grammar)

    def _ask(self, child: subprocess.Popen[bytes], question: Any) -> str | None:
        assert child.stdin is not None
        assert child.stdout is not None
        line = b""
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            if select.select([child.stdout], [], [], PATIENCE)[0]:
                line = child.stdout.readline()
        if line:
            return json.loads(line)
        self.close()
        return TOO_MUCH

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            self._child = None


def main(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer a parent's questions until it closes the pipe; a form past the limits ends the process."""

    def answer(said: str | None) -> None:
        answers.write(json.dumps(said).encode() + b"\n")
        answers.flush()

    setting = json.loads(questions.readline())
    tokenizer = LLTokenizer(setting["tokenizer"], eos_token=setting["ends"])
    os.nice(5)  # canvases come first
    answer("ready")
    for question in questions:
        grammar = json.loads(question)
        _limit_memory()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        fault = compiled(tokenizer, grammar)[1]
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer(fault)


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # where there is no /proc the time alone limits
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (MEGABYTES << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    main(sys.stdin.buffer, sys.stdout.buffer)
