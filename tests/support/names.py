"""The lint of names: what is stored says what it holds, and no two classes bear one name.

    python -m tests.support.names     lists what is refused; ends with 1 if anything is

A name is stored where it is assigned, a parameter, or the variable of a loop.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("quantize", "recipes", "kernels", "evaluation")
REFUSED = frozenset({"own", "found", "each", "left", "told", "stand"})


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
    """Return the places below `folder` where a refused name is stored."""
    places: list[str] = []
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(ROOT)
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
    """Return everything that is refused."""
    lines = [place for folder in PRODUCT for place in refused(ROOT / folder)]
    twice = {name: places for name, places in classes().items() if len(places) > 1}
    lines += [
        f"{', '.join(places)}: several classes are called {name}"
        for name, places in sorted(twice.items())
    ]
    return lines


if __name__ == "__main__":
    refusals = faults()
    print("\n".join(refusals) or "names: nothing is refused")
    sys.exit(bool(refusals))
