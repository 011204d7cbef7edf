"""The lint of names: what is stored says what it holds, and no two classes bear one name.

    python tests/support/names.py     lists what is refused; ends with 1 if anything is

A name is stored where it is assigned, a parameter, or the variable of a loop. `UNCLEAN` are the folders
that still have refused names: take one off once it has none, and never add one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("quantize", "recipes", "kernels", "evaluation")
REFUSED = frozenset({"own", "found", "each", "left", "told", "stand"})
UNCLEAN = (
    "quantize/checkpoints", "quantize/hub", "quantize/serve", "quantize/stages",
)  # fmt: skip


def files() -> list[Path]:
    """Return the product's Python files."""
    return sorted(file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py"))


def stored(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each place where a name is stored: assignments, loops, parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr.lstrip("_"), node.lineno


def refused(folder: Path) -> list[str]:
    """Return the places below `folder` where a refused name is stored, except in UNCLEAN folders."""
    places: list[str] = []
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(ROOT)
        if not any(path.is_relative_to(unclean) for unclean in UNCLEAN):
            for name, line in stored(ast.parse(file.read_text("utf-8"))):
                if name in REFUSED:
                    places.append(f"{path}:{line}: {name!r} does not say what it holds")
    return places


def classes() -> dict[str, list[str]]:
    """Return each class name of the product, without a leading _, and the files that define it."""
    homes: dict[str, list[str]] = {}
    for file in files():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                path = str(file.relative_to(ROOT))
                homes.setdefault(node.name.lstrip("_"), []).append(f"{path}:{node.lineno}")
    return homes


def faults() -> list[str]:
    """Return everything that is refused, and every exception that is needed no longer."""
    lines = [place for folder in PRODUCT for place in refused(ROOT / folder)]
    twice = {name: places for name, places in classes().items() if len(places) > 1}
    lines += [
        f"{', '.join(places)}: several classes are called {name}"
        for name, places in sorted(twice.items())
    ]
    for folder in UNCLEAN:
        trees = [ast.parse(file.read_text("utf-8")) for file in (ROOT / folder).rglob("*.py")]
        if not any(name in REFUSED for tree in trees for name, _ in stored(tree)):
            lines.append(f"names.py: {folder} is in UNCLEAN, and has no refused name")
    return lines


if __name__ == "__main__":
    refusals = faults()
    print("\n".join(refusals) or "names: nothing is refused")
    sys.exit(bool(refusals))
