"""A case's memory: operands and the canaries around them.

All memory but the inputs starts as 0xFF bytes, which are NaN in every dtype (but float8_e4m3fnuz,
where they are −240). So results that were
never written, reads beyond an end or in a gap, and writes outside the output are detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.oracle.formulas import Array
from kernelseam.samples.operand_layout import OperandLayout

GUARD = 16384
"""Canary bytes before and after every block: more than a tile of rows, so that a stray tile hits
them."""
POISON = 0xFF


@dataclass(frozen=True)
class RowSpan:
    """Consecutive rows of one batch entry, for all its heads: a sequence, or its part in a page."""

    batch: int
    first: int
    """The entry's row where the span begins."""
    rows: int
    start: int
    """Its first element in the block."""


@dataclass(frozen=True)
class Placement:
    """One operand in memory: strided, or one matrix per entry of ``starts``, or only the rows in
    ``row_spans``. Counts are in elements."""

    block: str
    """The memory block's name. Packed q, k and v share a block; other operands have their own."""
    dtype: DType
    shape: tuple[int, ...]
    """[batch, head, row, column], [batch, head, row], or any shape without starts and row
    spans."""
    strides: tuple[int, ...]
    """One per axis; with row spans the batch stride is unused."""
    offset: int = 0
    starts: tuple[int, ...] | None = None
    """The first element of matrix (batch·heads + head), in place of batch and head strides."""
    row_spans: tuple[RowSpan, ...] | None = None
    min_elements: int = 0
    """The least number of elements of the block: some may be in no row span."""

    @property
    def bytes(self) -> int:
        """Bytes from the block's start to the operand's last element."""
        ends = [
            start
            + sum((n - 1) * s for n, s in zip(shape, self.strides[-len(shape) :], strict=True))
            + 1
            for _, start, shape in self._parts()
        ]
        return (self.offset + max(self.min_elements, *ends, 0)) * self.dtype.itemsize

    def _parts(self) -> Iterator[tuple[tuple[slice | int, ...], int, tuple[int, ...]]]:
        """(index into the logical array, first element, shape) of each part with elements."""
        if 0 in self.shape:
            return
        if self.row_spans is not None:
            for p in self.row_spans:
                if p.rows:
                    index = (p.batch, slice(None), slice(p.first, p.first + p.rows))
                    yield index, p.start, (self.shape[1], p.rows, *self.shape[3:])
        elif self.starts is not None:
            for i, first in enumerate(self.starts):
                yield divmod(i, self.shape[1]), first, self.shape[2:]
        else:
            yield (), 0, self.shape

    def views(self, memory: Array, start: int) -> Iterator[tuple[tuple[slice | int, ...], Array]]:
        """(index into the logical array, view of memory) over a byte array; ``start``: byte where
        the block begins."""
        size = self.dtype.itemsize
        strides = tuple(s * size for s in self.strides)
        for index, first, shape in self._parts():
            at = start + (self.offset + first) * size
            yield index, np.ndarray(shape, self.dtype.numpy, memory, at, strides[-len(shape) :])


def drawn(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: DType,
    kind: str,
    operand_layout: OperandLayout | None = None,
) -> Array:
    """Numbers of a case's ``data``: "integers" −3…3, "positive" U(0,1), "normal" N(0,1), or these
    "tiny" or "huge"; the same along axes that a layout repeats."""
    if operand_layout is not None:
        unrepeated = drawn(rng, unrepeated_shape(shape, operand_layout), dtype, kind)
        return repeated_copy(unrepeated, shape)
    if kind == "integers":
        return rng.integers(-3, 4, shape).astype(dtype.numpy)
    if kind == "positive":
        return rng.random(shape).astype(dtype.numpy)
    factor = {"normal": 1.0, "tiny": 2.0**-12, "huge": 200.0}[kind]
    return (rng.standard_normal(shape) * factor).astype(dtype.numpy)


def unrepeated_shape(shape: tuple[int, ...], operand_layout: OperandLayout) -> tuple[int, ...]:
    """The shape before broadcasting: 1 along an axis of stride 0, also where that is empty."""
    return tuple(
        1 if axis in operand_layout.broadcast else n for n, axis in zip(shape, "bhrc", strict=True)
    )


def repeated_copy(x: Array, shape: tuple[int, ...]) -> Array:
    """A copy of ``x`` broadcast to ``shape``."""
    return np.broadcast_to(x, shape).copy()


def placement(
    name: str, operand_layout: OperandLayout, shape: tuple[int, ...], dtype: DType
) -> Placement:
    """An operand in its own memory block."""
    return Placement(
        name,
        dtype,
        shape,
        (*operand_layout.strides(shape, dtype.itemsize), 1),
        operand_layout.offset,
    )


def scattered(
    name: str, operand_layout: OperandLayout, shape: tuple[int, ...], dtype: DType, seed: int
) -> Placement:
    """Matrices in a random order with uneven gaps between them, for pointer lists."""
    rng = np.random.default_rng(seed)
    _, head, row = operand_layout.strides(shape, dtype.itemsize)
    unit = max(16 // dtype.itemsize, 1) if operand_layout.aligned else 1
    n = shape[0] * shape[1]
    gaps = rng.integers(1, 4, n) * unit
    starts = (np.arange(n) * head + np.cumsum(gaps))[rng.permutation(n)]
    return Placement(
        name, dtype, shape, (0, 0, row, 1), operand_layout.offset, tuple(int(s) for s in starts)
    )


@dataclass(frozen=True)
class Layout:
    """Every operand's placement, and where each block begins in its buffer.

    ``separate``: each block is a buffer of its own that ends with its last element, rounded up to
    4 bytes (for memory checkers); else one buffer holds them all between guards.
    """

    placements: Mapping[str, Placement]
    separate: bool = False

    def blocks(self) -> dict[str, tuple[str, int]]:
        """Block → (buffer, its first byte)."""
        starts: dict[str, tuple[str, int]] = {}
        end = GUARD
        for name, size in self._sizes().items():
            starts[name] = (name, 0) if self.separate else ("all", end)
            end += -(-size // 16) * 16 + GUARD
        return starts

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for p in self.placements.values():
            sizes[p.block] = max(sizes.get(p.block, 0), p.bytes)
        return sizes

    def buffers(self) -> dict[str, Array]:
        """New buffers full of canaries."""
        sizes = self._sizes()
        if not self.separate:
            whole = GUARD + sum(-(-n // 16) * 16 + GUARD for n in sizes.values())
            sizes = {"all": whole}
        return {
            name: np.full(max(-(-n // 4) * 4, 4), POISON, np.uint8) for name, n in sizes.items()
        }

    def write(self, buffers: Mapping[str, Array], values: Mapping[str, Array]) -> None:
        """Write logical arrays to their placements."""
        blocks = self.blocks()
        for name, value in values.items():
            buffer, start = blocks[self.placements[name].block]
            for index, view in self.placements[name].views(buffers[buffer], start):
                view[...] = value[index]

    def read(self, buffers: Mapping[str, Array], name: str) -> Array:
        """A copy of an operand as a logical array; 0 for elements without memory."""
        p = self.placements[name]
        buffer, start = self.blocks()[p.block]
        out = np.zeros(p.shape, p.dtype.numpy)
        for index, view in p.views(buffers[buffer], start):
            out[index] = view
        return out

    def stray(
        self, before: Mapping[str, Array], after: Mapping[str, Array], outputs: tuple[str, ...]
    ) -> str:
        """A message about changed bytes outside the outputs; "" where there are none."""
        blocks = self.blocks()
        for buffer in before:
            changed = before[buffer] != after[buffer]
            for name in outputs:
                p = self.placements[name]
                if blocks[p.block][0] == buffer:
                    for _, view in p.views(changed.view(np.uint8), blocks[p.block][1]):
                        # an output's own bytes may change; a float zero is all zero bits
                        view[...] = 0
            if changed.any():
                at = int(changed.argmax())
                near = min(
                    (b for b in blocks if blocks[b][0] == buffer),
                    key=lambda b: abs(at - blocks[b][1]),
                )
                return (
                    f"{int(changed.sum())} bytes outside the output changed, the first "
                    f"{at - blocks[near][1]} bytes "
                    f"from the start of {near}"
                )
        return ""


def never_written(x: Array) -> npt.NDArray[np.bool_]:
    """Which elements still hold the canary's bits. Of float8_e4m3fnuz they are −240, to which
    results saturate: only whole rows of it count."""
    bits = np.dtype(f"u{x.dtype.itemsize}")
    untouched: npt.NDArray[np.bool_] = x.view(bits) == np.iinfo(bits).max
    if x.dtype == DType.float8_e4m3fnuz.numpy:
        untouched &= untouched.all(axis=-1, keepdims=True)
    return untouched


def workspace(size: int) -> Array:
    """A buffer for a workspace of ``size`` bytes: canaries, between guards of −0 in float32, where
    even adding 0 is detected."""
    buffer = np.full(2 * GUARD // 4 + -(-size // 4), -0.0, np.float32).view(np.uint8)
    buffer[GUARD:-GUARD] = POISON
    return buffer


def overrun(after: Array) -> str:
    """A message about changed guards of a workspace; "" where they did not change."""
    changed = workspace(len(after) - 2 * GUARD) != after
    changed[GUARD:-GUARD] = False
    if not changed.any():
        return ""
    at = int(changed.argmax())
    where = (
        f"{GUARD - at} bytes before its start"
        if at < GUARD
        else f"{at - len(after) + GUARD} bytes after its end"
    )
    return f"{int(changed.sum())} bytes outside the workspace changed, the first {where}"
