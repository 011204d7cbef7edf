"""Where the tests get llm-compressor, their oracle: every import of it passes here.

It pins transformers and compressed-tensors, so it cannot stand beside the newest nor the oldest. The
cells of `make test-versions` that are without it say so; only there are its tests skipped.
"""

import os
from importlib import import_module
from typing import Any

import pytest

WITHOUT = "QUANTIZE_TEST_WITHOUT_LLMCOMPRESSOR"


def need_llm_compressor() -> None:
    """Skip the test in a cell of `make test-versions` that is without llm-compressor."""
    if os.environ.get(WITHOUT):
        pytest.skip("llm-compressor cannot stand beside these versions")


def llm_compressor(module: str) -> Any:
    """Return a module of llm-compressor, after `need_llm_compressor`.

    Raises:
        ModuleNotFoundError: it is not installed, and the environment does not say so.
    """
    need_llm_compressor()
    return import_module(f"llmcompressor.{module}")
