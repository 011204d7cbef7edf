"""A kept tensor that holds NaN is refused with the rows in which it was found."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantize.errors import InputError
from quantize.stages.convert.shard_pieces import Quantizer


def test_the_first_and_last_row_of_a_refused_part_are_named() -> None:
    source: Any = SimpleNamespace(
        tensors={"norm": SimpleNamespace(file="a.safetensors", name="norm")},
        read_rows=lambda name, start, stop: torch.full((stop - start, 2), torch.nan),
    )
    target: Any = SimpleNamespace(name="norm")
    with pytest.raises(InputError, match=r"'norm' holds NaN or infinity in rows 4 to 6; "):
        Quantizer(source, "memoryless_minmax", {})._copy(target, 4, 7)


def test_rows_that_are_kept_are_shown_as_they_are_encoded() -> None:
    rows, shown = torch.arange(6.0).view(3, 2), list[Any]()
    source: Any = SimpleNamespace(read_rows=lambda name, start, stop: rows)
    target: Any = SimpleNamespace(name="norm")
    look = lambda *part: shown.append(part)  # noqa: E731
    encoded = Quantizer(source, "memoryless_minmax", {}, look=look)._copy(target, 4, 7)
    assert shown == [(target, 4, 7, encoded)]
    assert encoded.view(torch.float32).tolist() == rows.flatten().tolist()
