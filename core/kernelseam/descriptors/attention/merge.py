"""Merging partial attentions: the same queries over different keys (split-KV)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernelseam.contract import ArrayInfo, Device, Runtime
from kernelseam.descriptors.attention.merge_problem import MergeProblem, MergeSpec
from kernelseam.descriptors.common.operands import (
    check_layout,
    describe_all,
    dtype_of,
    left_out,
    pointer,
    required,
    resolve,
    without_arrays,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import (
    extent,
    flag,
    packed,
    stride,
    three,
    vector_bytes,
)
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property

_AXES = {
    "outs": ("part", "batch", "head", "row"),
    "lses": ("part", "batch", "head"),
    "out": ("batch", "head", "row"),
    "lse": ("batch", "head"),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class MergeStates:
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
    _problem: MergeProblem = field(init=False, repr=False)
    _arrays: Mapping[str, ArrayInfo] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        for name in _AXES:
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
        s = {name: self._strides(name, shape, dtype) for name, shape in shapes.items()}
        wide = (
            vector_bytes(dtype_out, shapes["out"], s["out"], pointer("out", self.out, infos)) == 16
        )
        vector = 16 if wide else dtype_out.itemsize
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
        check_layout(problem.operands, infos, self._packed_strides)
        object.__setattr__(self, "_problem", problem)
        object.__setattr__(self, "_arrays", infos)

    @cached_property
    def _packed_strides(self) -> dict[str, bool]:
        return left_out({n: self._given(n) for n in _AXES})

    def _given(self, name: str) -> list[int | None]:
        return [getattr(self, f"stride_{name}_{axis}") for axis in _AXES[name]]

    def _strides(self, name: str, shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
        kind = dtype.accumulator if name in ("lses", "lse") else dtype
        known = [
            None if v is None else stride(f"stride_{name}_{axis}", v, kind)
            for v, axis in zip(self._given(name), _AXES[name], strict=True)
        ]
        return packed(shape, [*known, 1])[:-1]

    @property
    def device(self) -> Device | None:
        """The device of the arrays; None without arrays."""
        return next((i.device for i in self._arrays.values()), None)

    def problem(self) -> MergeProblem:
        """The hashable part, without pointers."""
        return self._problem

    def operands(self) -> dict[str, object]:
        """outs, lses, out and lse, as far as they are given."""
        return {n: v for n in _AXES if (v := getattr(self, n)) is not None}

    def without_arrays(self) -> MergeStates:
        """The same over the addresses of its arrays: it keeps no memory alive."""
        spec = self._problem.spec
        return without_arrays(self, self._arrays, dtype=spec.dtype, dtype_out=spec.dtype_out)

    def simplified(self) -> tuple[MergeStates, str]:
        """Itself: there is no simpler descriptor."""
        return self, ""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Addresses of the operands. Raises InvalidValue where an array does not fit the
        problem."""
        return resolve(self._problem.operands, operands, self._arrays, self._packed_strides, device)


def _four(x: tuple[int, ...]) -> tuple[int, int, int, int]:
    a, b, c, d = x
    return a, b, c, d
