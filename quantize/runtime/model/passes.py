"""One pass through the layers: its rows, their places in the cache, and the positions they see."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from fused_dequant import Activation
from torch import Tensor

from quantize.runtime.model.choices import Choice, Choices
from quantize.runtime.model.inputs import ProductInputs
from quantize.runtime.prompt.pieces import SoftTokens

Added = tuple[int, int, int]  # slot, first position and number of tokens


@dataclass(frozen=True)
class PassRows:
    """The placement of one pass' rows in the cache; a row is one token.

    B sequences have n rows each. Dict keys: True for sliding-window layers, False for full attention.
    """

    slots: Tensor  # int32 [B], of the sequences
    positions: Tensor  # int32 [B * n], of the rows in their sequences
    # the first and the last position that each row sees, both int32 [B * n]
    visible: dict[bool, tuple[Tensor, Tensor]]
    angles: dict[bool, tuple[Tensor, Tensor]]  # cos and sin of positions, bf16 [B * n, D / 2]

    def copy_(self, other: "PassRows") -> None:
        """Copy the values of another placement of the same shape into this placement's memory."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):  # noqa: SLF001
            mine.copy_(theirs)

    def followed_by(self, other: "PassRows") -> "PassRows":
        """Return the placement of these rows followed by `other`'s; both have n rows per sequence."""
        pairs = zip(self._tensors(), other._tensors(), strict=True)  # noqa: SLF001
        return self._with([torch.cat(pair) for pair in pairs])

    @property
    def rows_each(self) -> int:
        """The number of rows of each sequence."""
        return len(self.positions) // len(self.slots)

    def of(self, sequences: slice) -> "PassRows":
        """Return the placement of the rows of `sequences`, in the same memory."""
        n = self.rows_each
        rows = slice(sequences.start * n, sequences.stop * n)
        return self._with([self.slots[sequences], *(t[rows] for t in self._tensors()[1:])])

    def widened(self, soft: SoftTokens) -> "PassRows":
        """Return a placement in which each soft token also sees its whole picture."""
        visible: dict[bool, tuple[Tensor, Tensor]] = {}
        for kind, (first, last) in self.visible.items():
            begin = torch.minimum(first[soft.rows], soft.first)
            visible[kind] = (
                first.index_copy(0, soft.rows, begin),
                last.index_copy(0, soft.rows, soft.last),
            )
        return replace(self, visible=visible)

    def _tensors(self) -> list[Tensor]:
        pairs = [pair for kinds in (self.visible, self.angles) for pair in kinds.values()]
        return [self.slots, self.positions, *(tensor for pair in pairs for tensor in pair)]

    def _with(self, tensors: list[Tensor]) -> "PassRows":
        """Return a placement of other tensors, in the order of `_tensors`."""
        slots, positions, *rest = tensors
        pairs = iter(zip(rest[::2], rest[1::2], strict=True))
        visible, angles = (
            {kind: next(pairs) for kind in kinds} for kinds in (self.visible, self.angles)
        )
        return PassRows(slots, positions, visible, angles)


@dataclass(eq=False)
class Pass:
    """One pass on its way through the layers, each of which changes `h` and `x`."""

    h: Tensor  # bf16 [M, H], the rows that a layer adds to
    x: Activation  # what the next layer's first product reads: h, normed
    rows: PassRows  # the rows' places in the cache
    decoded: int  # how many rows are the decoder's; these come first
    inputs: ProductInputs | None  # what rounds or shows the rows that enter products
    whole: bool = False  # whether the encoder's rows are needed after the last layer
    real: Tensor | None = None  # int64, the rows that are no padding; None for all
    routed: list[Choice] | None = None  # or a list that gets the choice of each layer's router
    given: Choices | None = None  # what the layers take in place of their routers' choices
    lane: int = 0  # the lane of the slots; slots count from the lane's first slot
    added: Sequence[Added] = ()  # new tokens that stay in the cache
    cells: tuple[Tensor, Tensor] | None = None  # keys and values of the lane's slots at this layer

    @property
    def watched(self) -> bool:
        """Whether observers see the rows of this pass."""
        return self.inputs is not None and self.inputs.shown

    def of(self, sequences: slice) -> "Pass":
        """Return the part of this pass with the rows of `sequences`; no observer may watch the pass."""
        n = self.rows.rows_each
        rows = slice(sequences.start * n, sequences.stop * n)
        (x, scale), given = self.x, self.given
        decoded = len(range(*rows.indices(self.decoded)))
        return replace(
            self, h=self.h[rows], x=(x[rows], None if scale is None else scale[rows]),
            rows=self.rows.of(sequences), decoded=decoded, real=None,
            routed=None if self.routed is None else [],
            given=given and Choices(given.experts[sequences], given.weights[sequences]),
        )  # fmt: skip
