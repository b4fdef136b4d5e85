"""The problem and spec of joining partial attentions of the same queries over different keys."""

from __future__ import annotations

from kernelseam.contract import OperandRule
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class MergeSpec:
    """What shapes the binary: the element types of the parts and of the result, the value dim,
    whether an LSE is written, how wide rows may be accessed, and whether the result is a list of
    matrices."""

    dtype: DType
    dtype_out: DType
    value_dim: int
    lse: bool = True
    vector: int = 16
    pointers: bool = False
    packed: bool = False

    operation = "merge_states"

    @property
    def dtype_lse(self) -> DType:
        """The element type of the LSEs: what an attention whose results are of ``dtype`` gives."""
        return self.dtype.accumulator


@dataclass(frozen=True)
class MergeProblem:
    """out = Σ_n e^(s_n − s)·o_n with s = ln Σ_n e^(s_n), o_n the results of ``parts`` attentions
    and s_n their LSEs.

    Strides in elements: (part, batch, head, row) of the parts, (part, batch, head) of their LSEs,
    whose rows are contiguous. A part whose LSE is −inf is not read.
    """

    spec: MergeSpec
    parts: int
    batch: int
    num_heads: int
    rows: int
    outs_strides: tuple[int, int, int, int]
    lses_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int] = (0, 0)
    sequences: int = 0
    """Of packed rows: how many sequences cu_seqlens_q tells of."""

    operation = "merge_states"

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        s, b, h, kind = self.spec, self.batch, self.num_heads, self.spec.dtype_lse

        def align(dtype: DType) -> int:
            return max(min(s.vector, 4 * dtype.itemsize), dtype.itemsize)

        rules = [
            OperandRule(
                "outs",
                s.dtype,
                (self.parts, b, h, self.rows, s.value_dim),
                (*self.outs_strides, 1),
                s.dtype.itemsize,
            ),
            OperandRule(
                "lses", kind, (self.parts, b, h, self.rows), (*self.lses_strides, 1), kind.itemsize
            ),
            OperandRule(
                "out",
                s.dtype_out,
                (b, h, self.rows, s.value_dim),
                (*self.out_strides, 1),
                align(s.dtype_out),
                True,
            ),
        ]
        if s.lse:
            rules.append(
                OperandRule(
                    "lse", kind, (b, h, self.rows), (*self.lse_strides, 1), kind.itemsize, True
                )
            )
        return tuple(rules)

    @property
    def operations(self) -> int:
        return 2 * self.parts * self.batch * self.num_heads * self.rows * self.spec.value_dim

    @property
    def bytes_moved(self) -> int:
        s, lines = self.spec, self.batch * self.num_heads * self.rows
        lse = s.dtype_lse.itemsize
        read, written = (
            s.value_dim * s.dtype.itemsize + lse,
            s.value_dim * s.dtype_out.itemsize + lse * s.lse,
        )
        return lines * (self.parts * read + written)

    @property
    def compute_dtype(self) -> DType:
        return self.spec.dtype_lse

    def __str__(self) -> str:
        s = self.spec
        return (
            f"merge_states {s.dtype}→{s.dtype_out} parts={self.parts} batch={self.batch} "
            f"heads={self.num_heads} "
            f"rows={self.rows} dim={s.value_dim}"
        )
