"""What an engine shows to observers while they watch it."""

from collections.abc import Callable

from torch import Tensor

# called with (name of a Linear as on disk, rows that enter it, experts of the rows or None)
Observer = Callable[[str, Tensor, Tensor | None], None]
