"""Checks that this GPU multiplies correctly, by comparing its products with torch's in float64.

Shapes are the real model's for one canvas, so a later run launches the kernels that are checked here.
"""

from collections.abc import Callable
from functools import partial

import torch

from fused_dequant import reference, weights
from fused_dequant.operations import linear, routed_experts
from fused_dequant.tune import cases
from fused_dequant.tune.candidates import product_of
from fused_dequant.weights import tuning
from fused_dequant.weights.tuning import Config

ROWS, EXPERTS, TOPK = 256, 8, 2  # two of the experts get no token
LARGEST_ERROR = 3e-2  # rounding costs 2e-3, and 1.3e-2 where hidden rows have 8 bits


def relative_error(scheme: str, device: torch.device) -> float:
    """Return the larger of two relative errors, of a dense product and of experts; NaN if one is."""
    place = str(device)
    x = cases.random_tokens(ROWS, cases.HIDDEN, place)
    dense = cases.random_weight(scheme, 1, 4096, cases.HIDDEN, place)
    rows = cases.rounded(x, dense.scheme)
    exact = rows @ weights.dequantize(dense, torch.float64)[0].T
    errors = [reference.relative_error(linear(x, dense), exact)]
    up = cases.random_weight(scheme, EXPERTS, 2 * cases.INNER, cases.HIDDEN, place)
    down = cases.random_weight(scheme, EXPERTS, cases.HIDDEN, cases.INNER, place, seed=5)
    ids, share = cases.random_routing(ROWS, EXPERTS, TOPK, place, used=EXPERTS - 2)
    y = routed_experts(x, None, ids, share, up, down)
    exact = reference.experts(
        x.double(), *(weights.dequantize(weight, torch.float64) for weight in (up, down)),
        ids, share, torch.float64,
        activation=lambda rows: cases.rounded(rows.to(torch.bfloat16), up.scheme),
    )  # fmt: skip
    errors.append(reference.relative_error(y.double().sum(1), exact))
    return max(errors, key=lambda error: float("inf") if error != error else error)


def fault(scheme: str, device: torch.device) -> str | None:
    """Return what is wrong with products of `scheme` on a GPU, as a predicate; None if nothing is."""
    return describe(partial(relative_error, scheme, device))


def launch_fault(layout: str, device: torch.device) -> str | None:
    """Return which launch configuration of a user's table is wrong for `layout`, and how; or None.

    Those that ship have been checked for each release; `fault` launches some of either.
    """
    checked: list[tuple[str, Config]] = []
    for key, M, config in tuning.of_user(layout, device):
        if (key, config) in checked:
            continue
        checked.append((key, config))
        from fused_dequant.tune import launches  # triton comes with it

        product = product_of(key, M)
        if why := describe(partial(launches.relative_error, product, config, device)):
            return f"{key} M={M} {config}: products {why}"
    return None


def describe(relative_error: Callable[[], float]) -> str | None:
    """Return how what has this error fails, as a predicate of a sentence; None if it does not."""
    try:
        error = relative_error()
    except Exception as failure:  # of a compiler or a driver: then this kernel is not used
        return f"do not run with {compiler()}: {one_line(failure)}"
    return None if error <= LARGEST_ERROR else f"are wrong: a relative error of {error:.1e}"


def one_line(failure: BaseException) -> str:
    """Return in one line why a launch failed: its first cause, without the source Triton quotes."""
    while failure.__cause__:
        failure = failure.__cause__
    reason = getattr(failure, "error_message", None) or str(failure) or "?"
    return f"{type(failure).__name__}: {' '.join(str(reason).split())[:200]}"


def compiler() -> str:
    """Return the name and version of what compiles kernels, whatever distribution it came in."""
    try:
        import triton

        return f"triton {triton.__version__}"
    except (ImportError, AttributeError):  # the latter of a folder that one uninstalled left
        return "no triton"
