"""What an engine shows to observers while they watch it."""

from collections.abc import Callable

from torch import Tensor

# called with (name of a Linear as on disk, rows that enter it, experts of the rows or None)
Observer = Callable[[str, Tensor, Tensor | None], None]
# called with logits [m, V] that a step draws from, and each row's 1 / T [m] and step [m], from 1
OnLogits = Callable[[Tensor, Tensor, Tensor], object]
