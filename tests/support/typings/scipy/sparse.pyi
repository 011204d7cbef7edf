from typing import Any

class csr_array:  # noqa: N801
    def __init__(self, arg1: Any, shape: tuple[int, ...] | None = None) -> None: ...
