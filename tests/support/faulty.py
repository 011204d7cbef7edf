"""400 scored answers, and the same with a fault in every so many of them."""

from dataclasses import replace
from typing import Any

from quantize.recovery.rows import Row, Scoring


def scoring(**fault: Any) -> Scoring:
    """400 answers of which 4 of 5 are right; `fault` changes every `every`-th row."""
    every, from_ = fault.pop("every", 5), fault.pop("from_", 0)
    rows = [
        Row(i, 0, str(i), "p", "7", "7", {"exact": float(i % 5 > 0)}, 0, "#### 7", 60, [9], False)
        for i in range(400)
    ]
    rows = [replace(row, **fault) if fault and row.doc_id % every == from_ else row for row in rows]
    return Scoring("t", rows, {"sampler": {"max_denoising_steps": 48}}, {"model": "m"})
