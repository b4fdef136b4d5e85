"""Kernel definition of merge.h: partial attentions of the same queries joined in one launch."""

from __future__ import annotations

from kernelseam.contract import ArchRow, Device
from kernelseam.costs import Work
from kernelseam.descriptors.attention.merge_problem import MergeProblem, MergeSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.row_kernels import SmallKernel
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up, refuse_row_strides

__all__ = ["MERGE", "MERGE_TILE", "MergeDefinition", "MergeProblem", "MergeSpec", "MergeTile"]

COLUMNS = 4
"""Of one row, a thread."""
WAITING_SECONDS = 2.3e-7
"""For its cost: the way of the parts from memory, of which its early start hides nearly all (an
H200, random problems)."""


@dataclass(frozen=True)
class MergeTile:
    """The same on every arch: nothing is shared between threads."""

    dtypes: frozenset[DType]
    threads: int


MERGE_TILE = MergeTile(frozenset({DType.float16, DType.bfloat16, DType.float32}), 128)


class MergeDefinition(SmallKernel):
    """A thread a few columns of a row, all rows in one grid."""

    operation = "merge_states"
    entry = "merge_states"
    source = "attention/merge.h"
    any_tile = True
    early = True
    pointer_names = ("outs", "lses", "out", "lse", "offsets")
    stride_names = (
        *(f"{n}_{axis}" for n in ("outs", "lses") for axis in ("part", "batch", "head")),
        *(f"{n}_{axis}" for n in ("out", "lse") for axis in ("batch", "head")),
    )
    int_names = ("outs_row", "out_row", "parts", "num_heads", "rows", "total", "sequences")

    def refuse(self, problem: MergeProblem, row: ArchRow) -> str | None:
        for name, dtype in (("dtype", problem.spec.dtype), ("dtype_out", problem.spec.dtype_out)):
            if dtype not in MERGE_TILE.dtypes:
                return f"{name} = {dtype}: it has none"
        if problem.spec.value_dim < 1:
            return f"value_dim = {problem.spec.value_dim}: it takes 1 and more"
        if (lines := problem.batch * problem.num_heads * problem.rows) >= 2**31:
            return f"it has {lines} rows, not fewer than 2^31"
        return refuse_row_strides(
            stride_outs_row=problem.outs_strides[3], stride_out_row=problem.out_strides[2]
        )

    def tiles(self, spec: MergeSpec, row: ArchRow) -> tuple[MergeTile, ...]:
        return (MERGE_TILE,)

    def constants(self, spec: MergeSpec, tile: MergeTile, row: ArchRow) -> Constants:
        return {
            "T": DEVICE_TYPE[spec.dtype],
            "OUT": DEVICE_TYPE[spec.dtype_out],
            "DV": spec.value_dim,
            **members(spec, "lse", "vector", "pointers", "packed"),
            "THREADS": tile.threads,
        }

    def grid(self, problem: MergeProblem, tile: MergeTile, device: Device) -> int:
        return divide_up(
            self._lines(problem) * divide_up(problem.spec.value_dim, COLUMNS), tile.threads
        )

    def _lines(self, problem: MergeProblem) -> int:
        return problem.batch * problem.num_heads * problem.rows

    def values(
        self, problem: MergeProblem, tile: MergeTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        strides = (*p.outs_strides[:3], *p.lses_strides, *p.out_strides[:2], *p.lse_strides)
        ints = (
            p.outs_strides[3],
            p.out_strides[2],
            p.parts,
            p.num_heads,
            max(p.rows, 1),
            self._lines(p),
            p.sequences,
        )
        return self._values(strides, ints)

    def pointers(self, spec: MergeSpec) -> dict[str, str]:
        return super().pointers(spec) | ({"out": "out_ptrs"} if spec.pointers else {})

    def work(self, problem: MergeProblem, tile: MergeTile, device: Device) -> Work:
        return Work(problem.bytes_moved, waiting=WAITING_SECONDS)


MERGE = MergeDefinition()
