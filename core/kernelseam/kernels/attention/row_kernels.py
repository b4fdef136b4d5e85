"""The base class of small kernels over rows, and those of an attention's gradients: row_delta.h,
sink_gradient.h, sum_axes.h."""

from __future__ import annotations

import math
from typing import Any

from kernelseam.contract import ArchRow, Device
from kernelseam.costs import Work
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.config import Constants
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up
from kernelseam.kernels.signature import Signature, Structure

WARPS = 4


@dataclass(frozen=True)
class RowTile:
    """One tile for all archs."""

    warps: int = WARPS


class SmallKernel(KernelDefinition):
    """A kernel with one tile, static shared memory alone, and one grid for the whole problem.

    Unless they say otherwise, such kernels are launched only as part of other operations.
    """

    operation = ""
    operands = {"offsets": "cu_seqlens_q"}
    entry: str
    source: str
    pointer_names: tuple[str, ...]
    stride_names: tuple[str, ...]
    int_names: tuple[str, ...]
    float_names: tuple[str, ...] = ()
    structures: tuple[tuple[str, Structure], ...] = ()
    """Parameters after the pointers, strides and numbers."""
    shared = 0

    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        return None

    def tiles(self, spec: Any, row: ArchRow) -> tuple[Any, ...]:
        return (RowTile(),)

    def signature(self, spec: Any) -> Signature:
        return Signature(
            (
                *((p, "pointer") for p in self.pointer_names),
                *((s, "i64") for s in self.stride_names),
                *((i, "i32") for i in self.int_names),
                *((f, "f32") for f in self.float_names),
                *self.structures,
            ),
            flat=bool(self.structures),
        )

    def shared_bytes(self, spec: Any, tile: Any) -> int:
        return self.shared

    def work(self, problem: Any, tile: Any, device: Device) -> Work:
        """Bound by memory: each operand is read or written once."""
        return Work(self.bytes_moved(problem, tile))

    def bytes_moved(self, problem: Any, tile: Any) -> int:
        """Bytes read and written."""
        return int(problem.bytes_moved)

    def _values(self, strides: tuple[int, ...], ints: tuple[int, ...]) -> dict[str, int | float]:
        return {
            **dict(zip(self.stride_names, strides, strict=True)),
            **dict(zip(self.int_names, ints, strict=True)),
        }


@dataclass(frozen=True)
class DeltaSpec:
    """The compile-time options of row_delta.h."""

    dtype: DType
    value_dim: int
    packed: bool


@dataclass(frozen=True)
class DeltaProblem:
    """delta [batch, head, row] of dout and out [batch, head, row, value_dim]; strides (batch, head,
    row)."""

    spec: DeltaSpec
    batch: int
    num_heads: int
    rows: int
    dout_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    delta_strides: tuple[int, int]
    sequences: int
    zero_bytes: int = 0
    """Bytes of `zeros`, a multiple of 16, which the kernel sets to 0 for later launches that add to
    them."""

    @property
    def lines(self) -> int:
        return self.batch * self.num_heads * self.rows

    @property
    def bytes_moved(self) -> int:
        return (
            self.lines * (2 * self.spec.value_dim * self.spec.dtype.itemsize + 4) + self.zero_bytes
        )


class RowDelta(SmallKernel):
    """delta of an attention's backward: one warp for each row."""

    entry, source = "row_delta", "attention/row_delta.h"
    pointer_names = ("dout", "out", "delta", "zeros", "offsets")
    stride_names = (
        *(f"{n}_{axis}" for n in ("dout", "out", "delta") for axis in ("batch", "head")),
        "zero_chunks",
    )
    int_names = ("dout_row", "out_row", "num_heads", "rows", "total", "sequences")

    def constants(self, spec: DeltaSpec, tile: RowTile, row: ArchRow) -> Constants:
        return {
            "T": DEVICE_TYPE[spec.dtype],
            "DV": spec.value_dim,
            "PACKED": spec.packed,
            "WARPS": tile.warps,
        }

    def grid(self, problem: DeltaProblem, tile: RowTile, device: Device) -> int:
        return divide_up(problem.lines, tile.warps)

    def values(
        self, problem: DeltaProblem, tile: RowTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        return self._values(
            (*p.dout_strides[:2], *p.out_strides[:2], *p.delta_strides, p.zero_bytes // 16),
            (
                p.dout_strides[2],
                p.out_strides[2],
                p.num_heads,
                max(p.rows, 1),
                p.lines,
                p.sequences,
            ),
        )


@dataclass(frozen=True)
class SinkSpec:
    """The compile-time options of sink_gradient.h."""

    packed: bool


@dataclass(frozen=True)
class SinkProblem:
    """dsinks [head] from lse and delta [batch, head, row]; strides (batch, head)."""

    spec: SinkSpec
    batch: int
    num_heads: int
    rows: int
    lse_strides: tuple[int, int]
    delta_strides: tuple[int, int]
    sequences: int

    @property
    def bytes_moved(self) -> int:
        return 8 * self.batch * self.num_heads * self.rows


class SinkGradient(SmallKernel):
    """The gradient of the sinks: one block for each head."""

    entry, source = "sink_gradient", "attention/sink_gradient.h"
    pointer_names = ("sinks", "lse", "delta", "dsinks", "offsets")
    stride_names = ("lse_batch", "lse_head", "delta_batch", "delta_head")
    int_names = ("batch", "rows", "sequences")
    shared = WARPS * 16

    def constants(self, spec: SinkSpec, tile: RowTile, row: ArchRow) -> Constants:
        return {"PACKED": spec.packed, "WARPS": tile.warps}

    def grid(self, problem: SinkProblem, tile: RowTile, device: Device) -> int:
        return problem.num_heads

    def values(self, problem: SinkProblem, tile: RowTile, device: Device) -> dict[str, int | float]:
        p = problem
        return self._values((*p.lse_strides, *p.delta_strides), (p.batch, p.rows, p.sequences))


_ALONE_ELEMENTS, _FEWEST_ALONE, _MOST_ALONE = 128, 1 << 15, 1 << 12
"""For sums with one lane for each element: elements of a block, the fewest elements that fill a
device, the most terms of an element."""


@dataclass(frozen=True)
class SumSpec:
    """The compile-time options of sum_axes.h. ``alone``: one lane sums an element, else one
    warp."""

    dtype_out: DType
    alone: bool = False


@dataclass(frozen=True)
class SumProblem:
    """out = x summed over the axes whose extent in ``kept`` is 1 and in ``extents`` is not."""

    spec: SumSpec
    extents: tuple[int, int, int, int]
    kept: tuple[int, int, int, int]
    x_strides: tuple[int, int, int, int]
    out_strides: tuple[int, int, int, int]

    @classmethod
    def of(
        cls,
        dtype_out: DType,
        extents: tuple[int, int, int, int],
        kept: tuple[int, int, int, int],
        x_strides: tuple[int, int, int, int],
        out_strides: tuple[int, int, int, int],
    ) -> SumProblem:
        """The sum of a bias's gradient, over four axes. One lane sums an element where there are
        many elements, contiguous ones, and few enough terms that a lane's sum is accurate."""
        total = math.prod(kept)
        alone = kept[3] > 1 and total >= _FEWEST_ALONE
        alone = alone and math.prod(extents) <= _MOST_ALONE * total
        return cls(SumSpec(dtype_out, alone), extents, kept, x_strides, out_strides)

    @property
    def bytes_moved(self) -> int:
        return 4 * math.prod(self.extents) + self.spec.dtype_out.itemsize * math.prod(self.kept)


def _elements(spec: SumSpec, tile: RowTile) -> int:
    """Elements of the sum that a block computes."""
    return _ALONE_ELEMENTS if spec.alone else tile.warps


class SumAxes(SmallKernel):
    """A sum over axes: one lane or one warp for each element."""

    entry, source = "sum_axes", "attention/sum_axes.h"
    pointer_names = ("x", "out")
    stride_names = ("x0", "x1", "x2", "x3", "out0", "out1", "out2", "out3", "total", "summed")
    operands = {"out": "dbias"}
    int_names = ("kept0", "kept1", "kept2", "kept3", "n0", "n1", "n2", "n3")

    def constants(self, spec: SumSpec, tile: RowTile, row: ArchRow) -> Constants:
        elements = _elements(spec, tile)
        return {
            "OUT": DEVICE_TYPE[spec.dtype_out],
            "WARPS": tile.warps,
            "ALONE": spec.alone,
            "ELEMENTS": elements,
        }

    def grid(self, problem: SumProblem, tile: RowTile, device: Device) -> int:
        return divide_up(math.prod(problem.kept), _elements(problem.spec, tile))

    def values(self, problem: SumProblem, tile: RowTile, device: Device) -> dict[str, int | float]:
        p = problem
        total = math.prod(p.kept)
        return self._values(
            (*p.x_strides, *p.out_strides, total, math.prod(p.extents) // max(total, 1)),
            (*p.kept, *p.extents),
        )


ROW_DELTA, SINK_GRADIENT, SUM_AXES = RowDelta(), SinkGradient(), SumAxes()
