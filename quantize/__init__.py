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
from typing import TYPE_CHECKING, Any

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
    """Finds `quantize.recovery` in a checkout, where pyproject.toml's package-dir places it."""

    evaluation = Path(__file__).parents[1] / "evaluation"

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where that package lies; None for every other name."""
        if name != "quantize.recovery":
            return None
        file = cls.evaluation / "recovery" / "__init__.py"
        return spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])


if (_Checkout.evaluation / "recovery").is_dir():  # not in a wheel
    sys.meta_path.insert(0, _Checkout)


def __getattr__(name: str) -> Any:
    """Return a name of `quantize.api`, which is imported only now: `import quantize` stays cheap."""
    if name not in __all__:
        raise AttributeError(f"module 'quantize' has no attribute {name!r}")
    return getattr(import_module("quantize.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
