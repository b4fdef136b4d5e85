"""Merging partial attentions: the same queries over different keys (split-KV)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from kernelseam.descriptors.attention.merge_problem import MergeProblem, MergeSpec
from kernelseam.descriptors.common.operands import (
    describe_all,
    dtype_of,
    pointer,
    required,
)
from kernelseam.descriptors.common.strided import StridedDescriptor
from kernelseam.descriptors.common.validation import (
    extent,
    flag,
    three,
)
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class MergeStates(StridedDescriptor[MergeProblem]):
    """out = Σ_n e^(s_n − s)·o_n with s = ln Σ_n e^(s_n): what attention over all keys would have
    given, from the results o_n and log-sum-exps s_n of attentions over parts of them.

    ``outs`` [parts, batch, num_heads, rows, value_dim], ``lses`` [parts, batch, num_heads, rows],
    ``out`` [batch, num_heads, rows, value_dim], ``lse`` [batch, num_heads, rows], optional: s. LSEs
    are float32, float64 where outs are; all is computed in that. Arrays, addresses, or None until
    ``bind``; ``return_lse`` says that an lse will be bound. A part whose s_n is −inf saw no key and
    is not read; where all are, out is 0 and s −inf.

    Strides in elements, columns (and the rows of lses and lse) contiguous; those left out pack
    row-major. ``dtype`` is that of outs, ``dtype_out`` (default: the same) that of out. Raises
    InvalidValue.
    """

    parts: int
    batch: int
    num_heads: int
    rows: int
    value_dim: int
    outs: object = field(default=None, repr=False)
    lses: object = field(default=None, repr=False)
    out: object = field(default=None, repr=False)
    lse: object = field(default=None, repr=False)
    return_lse: bool = False
    dtype: DType | str | None = None
    dtype_out: DType | str | None = None
    stride_outs_part: int | None = None
    stride_outs_batch: int | None = None
    stride_outs_head: int | None = None
    stride_outs_row: int | None = None
    stride_lses_part: int | None = None
    stride_lses_batch: int | None = None
    stride_lses_head: int | None = None
    stride_out_batch: int | None = None
    stride_out_head: int | None = None
    stride_out_row: int | None = None
    stride_lse_batch: int | None = None
    stride_lse_head: int | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "outs": ("part", "batch", "head", "row"),
        "lses": ("part", "batch", "head"),
        "out": ("batch", "head", "row"),
        "lse": ("batch", "head"),
    }

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        for name in self.AXES:
            pointer(name, getattr(self, name), infos)
        dtype = required("dtype", dtype_of("dtype", self.dtype, infos, ("outs",)), "outs")
        dtype_out = dtype_of("dtype_out", self.dtype_out, infos, ("out",)) or dtype
        parts, batch, heads = (extent(n, getattr(self, n)) for n in ("parts", "batch", "num_heads"))
        rows, dim = extent("rows", self.rows), extent("value_dim", self.value_dim)
        lse = flag("return_lse", self.return_lse) or self.lse is not None
        shapes = {
            "outs": (parts, batch, heads, rows, dim),
            "lses": (parts, batch, heads, rows),
            "out": (batch, heads, rows, dim),
            "lse": (batch, heads, rows),
        }
        kinds = {"lses": dtype.accumulator, "lse": dtype.accumulator}
        s = {n: self._strides_of(n, shape, kinds.get(n, dtype)) for n, shape in shapes.items()}
        vector = self._vector("out", shapes["out"], s["out"], dtype_out, infos)
        problem = MergeProblem(
            MergeSpec(dtype, dtype_out, dim, lse, vector),
            parts,
            batch,
            heads,
            rows,
            _four(s["outs"]),
            three(s["lses"]),
            three(s["out"]),
            (s["lse"][0], s["lse"][1]) if lse else (0, 0),
        )
        self._keep(problem, infos)

    def _found(self) -> dict[str, object]:
        spec = self._problem.spec
        return {"dtype": spec.dtype, "dtype_out": spec.dtype_out}


def _four(x: tuple[int, ...]) -> tuple[int, int, int, int]:
    a, b, c, d = x
    return a, b, c, d
