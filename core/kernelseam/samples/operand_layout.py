"""The memory layout of a case's operand."""

from __future__ import annotations

from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class OperandLayout:
    """How [batch, head, row, column] data lies in memory."""

    order: str = "bhr"
    """Axes, outermost first: "bhr" head-major, "brh" token-major; columns are innermost unless "c"
    is named elsewhere."""
    gaps: tuple[int, int, int] = (0, 0, 0)
    """Elements left free after every batch, head and row."""
    aligned: bool = True
    """Each stride is rounded up so that every row starts at a multiple of 16 bytes; else there is
    no padding."""
    offset: int = 0
    """Elements before the first."""
    broadcast: str = ""
    """Axes with stride 0."""

    def strides(self, shape: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
        """(batch, head, row) strides in elements for data of ``shape`` [batch, head, row,
        column]."""
        batch, head, row, _ = self.plane(shape, itemsize)
        return batch, head, row

    def plane(self, shape: tuple[int, ...], itemsize: int) -> tuple[int, int, int, int]:
        """The same with the column's stride: 1, unless ``order`` names its axis, "c", elsewhere or
        it is broadcast."""
        unit = max(16 // itemsize, 1) if self.aligned else 1
        size, strides = 0, dict.fromkeys(self.broadcast, 0)
        for axis in reversed(self.order if "c" in self.order else self.order + "c"):
            if axis not in self.broadcast:
                i = "bhrc".index(axis)
                # The innermost axis is contiguous.
                strides[axis] = -(-(size + (*self.gaps, 0)[i]) // unit) * unit if size else 1
                size = strides[axis] * max(shape[i], 1)
        return strides["b"], strides["h"], strides["r"], strides["c"]
