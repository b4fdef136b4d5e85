"""Kernel definition of bag_sums.h: sums of listed rows, those of a token's experts for example."""

from __future__ import annotations

from kernelseam.contract import ArchRow, Device
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.row_kernels import SmallKernel
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up

CHUNK = 16
"""Bytes of a row, a thread."""


@dataclass(frozen=True)
class BagSumsTile:
    """The same on every arch: nothing is shared between threads."""

    threads: int = 256


@dataclass(frozen=True)
class BagSumsSpec:
    """What shapes the binary. ``vector``: bytes that rows of x and of the result are aligned to."""

    dtype: DType
    vector: int = CHUNK


@dataclass(frozen=True)
class BagSumsProblem:
    """[results, columns] of ``rows`` listed rows of x, which are ``x_row`` elements apart, and of
    [parts, results, columns]."""

    spec: BagSumsSpec
    rows: int
    results: int
    columns: int
    x_row: int
    parts: int = 0

    operation = "bag_sums"

    @property
    def chunks(self) -> int:
        """Of a row."""
        return divide_up(self.columns * self.spec.dtype.itemsize, CHUNK)

    @property
    def bytes_moved(self) -> int:
        rows = self.rows + (self.parts + 1) * self.results
        return rows * self.columns * self.spec.dtype.itemsize


class BagSums(SmallKernel):
    """A thread a chunk of a result's columns."""

    entry, source = "bag_sums", "gemm/bag_sums.h"
    pointer_names = ("x", "rows", "ends", "plus", "out")
    stride_names = ("x_row",)
    int_names = ("results", "parts", "row_columns", "chunks")
    any_tile = True
    early = True

    def refuse(self, problem: BagSumsProblem, row: ArchRow) -> str | None:
        if (chunks := problem.results * problem.chunks) >= 2**31:
            return f"its results have {chunks} chunks, not fewer than 2^31"
        return None

    def tiles(self, spec: BagSumsSpec, row: ArchRow) -> tuple[BagSumsTile, ...]:
        return (BagSumsTile(),)

    def constants(self, spec: BagSumsSpec, tile: BagSumsTile, row: ArchRow) -> Constants:
        return {"T": DEVICE_TYPE[spec.dtype], "VECTOR": spec.vector, "THREADS": tile.threads}

    def grid(self, problem: BagSumsProblem, tile: BagSumsTile, device: Device) -> int:
        return divide_up(problem.results * problem.chunks, tile.threads)

    def values(
        self, problem: BagSumsProblem, tile: BagSumsTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        return self._values((p.x_row,), (p.results, p.parts, p.columns, p.chunks))


BAG_SUMS = BagSums()
