"""Where a case's operands lie, and the memory around them: every byte that is no input is a canary.

All memory starts as 0xFF bytes, which are NaN in every dtype. So a result that was never written, a
read beyond an end or in a gap, and a write outside the output each show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernelseam.dtypes import DType
from kernelseam.oracle.formulas import Array
from kernelseam.parity.cases.walk import Walk

GUARD = 16384
"""Canary bytes before and after every block: more than a tile of rows, so that a stray tile lands
there."""
POISON = 0xFF


@dataclass(frozen=True)
class Piece:
    """Rows of one entry of the batch that lie in one stretch, of all its heads: a sequence, or its
    part in a page."""

    batch: int
    first: int
    """Row of the entry that is the piece's first."""
    rows: int
    start: int
    """Element where it lies."""


@dataclass(frozen=True)
class Place:
    """One operand in memory: strided; matrix by matrix where ``starts`` says so; or in ``pieces``,
    which then are all that there is of it. Counts are in elements."""

    block: str
    """Operands of one name share memory (packed q, k and v); others have their own."""
    dtype: DType
    shape: tuple[int, ...]
    """[batch, head, row, column], [batch, head, row], or any where there are neither starts nor
    pieces."""
    strides: tuple[int, ...]
    """One an axis; that of the batch has no meaning where there are pieces."""
    offset: int = 0
    starts: tuple[int, ...] | None = None
    """First element of matrix (batch·heads + head), where the batch and head strides do not say
    it."""
    pieces: tuple[Piece, ...] | None = None
    room: int = 0
    """Elements that the block has at least: some may belong to no piece."""

    @property
    def bytes(self) -> int:
        """From the block's start to the last byte touched."""
        ends = [
            start
            + sum((n - 1) * s for n, s in zip(shape, self.strides[-len(shape) :], strict=True))
            + 1
            for _, start, shape in self._parts()
        ]
        return (self.offset + max(self.room, *ends, 0)) * self.dtype.itemsize

    def _parts(self) -> Iterator[tuple[tuple[slice | int, ...], int, tuple[int, ...]]]:
        """(index into the logical array, first element, shape) of what has elements."""
        if 0 in self.shape:
            return
        if self.pieces is not None:
            for p in self.pieces:
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


def once(shape: tuple[int, ...], walk: Walk) -> tuple[int, ...]:
    """The shape of what differs: 1 along an axis of stride 0, also where that is empty."""
    return tuple(1 if axis in walk.broadcast else n for n, axis in zip(shape, "bhrc", strict=True))


def repeated(x: Array, shape: tuple[int, ...]) -> Array:
    """What ``once`` left out, put back."""
    return np.broadcast_to(x, shape).copy()


def place(name: str, walk: Walk, shape: tuple[int, ...], dtype: DType) -> Place:
    """An operand in memory of its own."""
    return Place(name, dtype, shape, (*walk.strides(shape, dtype.itemsize), 1), walk.offset)


def scattered(name: str, walk: Walk, shape: tuple[int, ...], dtype: DType, seed: int) -> Place:
    """Matrices in a random order with uneven gaps between them, for pointer lists."""
    rng = np.random.default_rng(seed)
    _, head, row = walk.strides(shape, dtype.itemsize)
    unit = max(16 // dtype.itemsize, 1) if walk.aligned else 1
    n = shape[0] * shape[1]
    gaps = rng.integers(1, 4, n) * unit
    starts = (np.arange(n) * head + np.cumsum(gaps))[rng.permutation(n)]
    return Place(name, dtype, shape, (0, 0, row, 1), walk.offset, tuple(int(s) for s in starts))


@dataclass(frozen=True)
class Layout:
    """Every operand's place, and where each block of memory begins in its buffer.

    ``separate``: each block is a buffer of its own that ends with its last element, give or take 4
    bytes (for memory checkers); else one buffer holds them all between guards.
    """

    places: Mapping[str, Place]
    separate: bool = False

    def blocks(self) -> dict[str, tuple[str, int]]:
        """Block → (buffer, byte where it begins)."""
        found: dict[str, tuple[str, int]] = {}
        end = GUARD
        for name, size in self._sizes().items():
            found[name] = (name, 0) if self.separate else ("all", end)
            end += -(-size // 16) * 16 + GUARD
        return found

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for p in self.places.values():
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
        """Put logical arrays where they belong."""
        blocks = self.blocks()
        for name, value in values.items():
            buffer, start = blocks[self.places[name].block]
            for index, view in self.places[name].views(buffers[buffer], start):
                view[...] = value[index]

    def read(self, buffers: Mapping[str, Array], name: str) -> Array:
        """An operand as a logical array, copied; 0 where it has no memory."""
        p = self.places[name]
        buffer, start = self.blocks()[p.block]
        out = np.zeros(p.shape, p.dtype.numpy)
        for index, view in p.views(buffers[buffer], start):
            out[index] = view
        return out

    def stray(
        self, before: Mapping[str, Array], after: Mapping[str, Array], outputs: tuple[str, ...]
    ) -> str:
        """Where bytes changed that belong to no output; "" where none did."""
        blocks = self.blocks()
        for buffer in before:
            changed = before[buffer] != after[buffer]
            for name in outputs:
                p = self.places[name]
                if blocks[p.block][0] == buffer:
                    for _, view in p.views(changed.view(np.uint8), blocks[p.block][1]):
                        # its own bytes may have changed; a float zero is all zero bits
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
    """Which elements still hold the canary, bit for bit."""
    bits = np.dtype(f"u{x.dtype.itemsize}")
    found: npt.NDArray[np.bool_] = x.view(bits) == np.iinfo(bits).max
    return found


def workspace(size: int) -> Array:
    """Bytes for a workspace of so many, canaries too, between guards of −0 in float32: there even
    adding 0 shows."""
    found = np.full(2 * GUARD // 4 + -(-size // 4), -0.0, np.float32).view(np.uint8)
    found[GUARD:-GUARD] = POISON
    return found


def overrun(after: Array) -> str:
    """Where a workspace's guards changed; "" where they did not."""
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
