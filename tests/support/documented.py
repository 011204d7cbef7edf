"""The commands and programs that README and docs show, block by block."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "kernels/*.md", "quantize/serve/vllm_plugin/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(
    r"(?:<!-- needs (?P<needs>[^>]*?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.S | re.M
)
SHELL = ("", "sh", "bash", "console")
NEEDS = {"a GPU", "the network", "vLLM", "docker", "llama.cpp", "another machine"}


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language, and what it needs that a test has not."""

    place: str
    kind: str
    text: str
    needs: tuple[str, ...]

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, comments and continuations resolved."""
        joined = self.text.replace("\\\n", " ")
        found = (shlex.split(line, comments=True) for line in joined.splitlines())
        return [words for words in found if words]


def blocks(pages: list[Path] = PAGES) -> list[Block]:
    """Every fenced block of the pages."""
    found: list[Block] = []
    for page in pages:
        text = page.read_text("utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            needs = tuple((match["needs"] or "").split(", ")) if match["needs"] else ()
            place = f"{page.relative_to(ROOT)}:{line}"
            found.append(Block(place, match["kind"], match["text"], needs))
    return found
