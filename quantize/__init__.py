"""Quantize DiffusionGemma to FP8, INT8, NVFP4 or MXFP4, and measure what it costs against BF16.

The pipeline runs in the order of `quantize --help`: plan, calibrate, round, convert, verify, fidelity,
evaluate, report, push. docs/structure.md describes each module in one sentence; docs/python.md shows
the functions below, which are imported when they are first used.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from quantize.api import (
        Run,
        compare,
        convert,
        evaluate,
        fidelity,
        judge,
        load,
        open,
        plan,
        report,
        run,
        search,
    )

__version__ = "0.3.0"
__all__ = [
    "Run",
    "compare",
    "convert",
    "evaluate",
    "fidelity",
    "judge",
    "load",
    "open",
    "plan",
    "report",
    "run",
    "search",
]


class _Checkout:
    """Finds the packages of a checkout that pyproject.toml's package-dir places beside `quantize`."""

    root = Path(__file__).parents[1]
    folders: ClassVar = {"quantize.recovery": "evaluation/recovery", "quantize.recipes": "recipes"}

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where such a package lies; None for every other name."""
        if name not in cls.folders:
            return None
        file = cls.root / cls.folders[name] / "__init__.py"
        return spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])


if (_Checkout.root / "evaluation" / "recovery").is_dir():  # not in a wheel
    sys.meta_path.insert(0, _Checkout)


def __getattr__(name: str) -> Any:
    """Return a name of `quantize.api`, which is imported only now: `import quantize` stays cheap."""
    if name not in __all__:
        raise AttributeError(f"module 'quantize' has no attribute {name!r}")
    return getattr(import_module("quantize.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
