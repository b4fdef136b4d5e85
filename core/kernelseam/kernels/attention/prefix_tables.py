"""Kernel definitions of common_pages.h and prefix_groups.h: a block table in what groups of entries
share at the front and what is left to each."""

from __future__ import annotations

from kernelseam.contract import Device
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.row_kernels import RowTile, SmallKernel
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import divide_up

_INTS = ("batch", "S_q", "S_k", "page_size", "width")


@dataclass(frozen=True)
class TableSpec:
    """What shapes both binaries."""

    packed: bool


@dataclass(frozen=True)
class TableProblem:
    """A block table [batch, width] whose rows lie ``table_row`` apart, of entries with S_q queries
    and S_k keys at most, ``total`` rows of queries in all; at most so many ``groups``."""

    spec: TableSpec
    batch: int
    S_q: int
    S_k: int
    page_size: int
    width: int
    table_row: int
    total: int
    groups: int

    @property
    def sequences(self) -> int:
        """Of the shared part: groups, and the rows before, between and behind them."""
        return 2 * self.groups + 1

    @property
    def bytes_moved(self) -> int:
        return 8 * self.batch * self.width


class TableKernel(SmallKernel):
    """A warp an entry."""

    operands = {"offsets": "cu_seqlens_q", "table": "block_table", "lengths": "kv_lengths"}
    stride_names = ("table_row",)

    def constants(self, spec: TableSpec, tile: RowTile, row: object) -> Constants:
        return {"PACKED": spec.packed, "WARPS": tile.warps}

    def grid(self, problem: TableProblem, tile: RowTile, device: Device) -> int:
        return divide_up(problem.batch, tile.warps)

    def values(
        self, problem: TableProblem, tile: RowTile, device: Device
    ) -> dict[str, int | float]:
        return self._values(
            (problem.table_row,), tuple(getattr(problem, n) for n in self.int_names)
        )


class CommonPages(TableKernel):
    """What entries have in common with the one before."""

    entry, source = "common_pages", "attention/common_pages.h"
    pointer_names = ("table", "lengths", "offsets", "common")
    int_names = _INTS


class PrefixTables(TableKernel):
    """The rows, lengths and tables of the shared part, the lengths and tables of the own."""

    entry, source = "prefix_groups", "attention/prefix_groups.h"
    pointer_names = (
        *("table", "lengths", "offsets", "common"),
        *("shared_rows", "shared_lengths", "shared_table", "own_lengths", "own_table"),
    )
    int_names = (*_INTS, "total", "groups")


COMMON_PAGES, PREFIX_TABLES = CommonPages(), PrefixTables()
