from collections.abc import Callable
from typing import Any

class LinearConstraint:
    def __init__(self, A: Any, lb: Any = ..., ub: Any = ..., keep_feasible: Any = ...) -> None: ...

def milp(
    c: Any,
    *,
    integrality: Any = None,
    bounds: Any = None,
    constraints: Any = None,
    options: Any = None,
) -> Any: ...
def brentq(
    f: Callable[[float], float],
    a: float,
    b: float,
    args: tuple[Any, ...] = ...,
    xtol: float = ...,
    rtol: float = ...,
    maxiter: int = ...,
) -> float: ...
