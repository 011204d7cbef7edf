"""A candidate that ends its process, for the test of the tuner: importable by a child process."""

import os

from fused_dequant.tune.candidates import Product
from fused_dequant.tune.search import BrokenCandidateError
from fused_dequant.weights.tuning import Config

BROKEN: Config = {"BM": 2}


def time_candidates(product: Product, excluded: list[Config]) -> list[tuple[float, Config]]:
    """Microseconds of {"BM": 3}: this process's id; {"BM": 2} breaks it unless excluded."""
    if BROKEN not in excluded:
        raise BrokenCandidateError(BROKEN, f"an illegal instruction in process {os.getpid()}")
    return [(float(os.getpid()), {"BM": product.M})]
