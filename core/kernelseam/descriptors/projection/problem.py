"""Problems and specs of the projections before and after an attention. They hold no pointers and
check nothing.

Rows of [batch, row, column] operands are written [batch, 1, row, column], so that all operands have
the same axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelseam.contract import OperandRule
from kernelseam.descriptors.cache.problem import PagedCacheProblem, PagedCacheSpec
from kernelseam.descriptors.gemm.problem import HeadsProblem, HeadsSpec
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

APPENDED = {"k": "k_pages", "v": "v_pages", "q": "q_out"}
"""Operand of a projection → operand of its append."""
_ALIGNMENT = 256


@dataclass(frozen=True)
class QkvProjectionSpec:
    """What shapes the binary of the projection to q, k and v. ``vector_*``: as in GemmSpec;
    ``vector_out`` is that of q, k and v alike."""

    dtype: DType
    dtype_out: DType
    bias: DType | None = None
    heads: HeadsSpec = HeadsSpec()
    vector_input: int = 16
    vector_weight: int = 16
    vector_out: int = 16
    append: PagedCacheSpec | None = None
    """Of the launch that writes k and v to pages; None: the product writes them."""

    operation = "qkv_projection"

    def __str__(self) -> str:
        h = self.heads
        options = ["bias"] * bool(self.bias) + ([f"rotary={h.rotary}"] if h.rotary else [])
        options += ["positions"] * h.positions + ["paged"] * h.paged
        options += [] if self.append is None else [f"then {self.append}"]
        return " ".join((f"{self.operation} {self.dtype}→{self.dtype_out}", *options))


@dataclass(frozen=True)
class OutputProjectionSpec:
    """What shapes the binary of the projection of an attention's result."""

    dtype: DType
    dtype_out: DType
    bias: DType | None = None
    residual: DType | None = None
    apart: bool = False
    """Whether the heads of a token lie apart from each other; else they are one row."""
    vector_attn_out: int = 16
    vector_weight: int = 16
    vector_out: int = 16
    vector_residual: int = 16

    operation = "output_projection"

    def __str__(self) -> str:
        options = [n for n in ("bias", "residual") if getattr(self, n)] + [
            "heads apart"
        ] * self.apart
        return " ".join((f"{self.operation} {self.dtype}→{self.dtype_out}", *options))


class ProjectionProblem(ABC):
    """A frozen dataclass with a spec; its operands' rules are computed once."""

    spec: Any

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        return tuple(self._operands())

    @abstractmethod
    def _operands(self) -> Iterator[OperandRule]:
        """The rules, in order."""

    @property
    def compute_dtype(self) -> DType:
        dtype: DType = self.spec.dtype
        return dtype


@dataclass(frozen=True)
class QkvProjectionProblem(ProjectionProblem):
    """q, k, v: the heads of input·weightᵀ + bias, those of q and k rotated where the spec says so.
    Strides in elements.

    With ``append`` the product writes q to its place, and k and v to the workspace, from where
    they are appended to pages; where the append rotates, it rotates q in its place.
    """

    spec: QkvProjectionSpec
    batch: int
    hidden: int
    """Columns of the input."""
    input_strides: tuple[int, int]
    """(batch, row)."""
    weight_stride: int
    heads: HeadsProblem
    max_position: int = 0
    """Positions that the cosines and sines have rows for."""
    pages: int = 0
    table_width: int = 0
    append: PagedCacheProblem | None = None

    operation = "qkv_projection"

    @property
    def rows(self) -> int:
        """Tokens."""
        return self.batch * self.heads.tokens

    @property
    def product(self) -> QkvProjectionProblem:
        """The product alone: k and v are rows."""
        if self.append is None:
            return self
        return replace(self, spec=replace(self.spec, append=None), append=None)

    @property
    def between(self) -> dict[str, int]:
        """Where the rows of k and v lie in the workspace until they are appended, in bytes."""
        return {} if self.append is None else {"k": 0, "v": self.between_bytes // 2}

    @property
    def between_bytes(self) -> int:
        """Bytes of the workspace that hold these rows."""
        if self.append is None:
            return 0
        size = self.rows * self.heads.kv_heads * self.heads.head_dim * self.spec.dtype_out.itemsize
        return 2 * (-(-size // _ALIGNMENT) * _ALIGNMENT)

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        rules = tuple(self._operands())
        if self.append is None:
            return rules
        appended = (
            replace(r, name=next((n for n, x in APPENDED.items() if x == r.name), r.name))
            for r in self.append.operands
            if r.name not in ("q", "k", "v", "q_out")
        )
        own = {r.name: r for r in rules if r.name not in ("k", "v")}
        return tuple({**{r.name: r for r in appended}, **own}.values())

    def _operands(self) -> Iterator[OperandRule]:
        s, h, f32, i32 = self.spec, self.heads, DType.float32, DType.int32
        live = int(self.rows > 0)
        yield matrix(
            "input",
            s.dtype,
            (self.batch, h.tokens, self.hidden),
            self.input_strides,
            s.vector_input,
        )
        yield matrix(
            "weight",
            s.dtype,
            (live, h.columns, self.hidden),
            (0, self.weight_stride),
            s.vector_weight,
        )
        if s.bias:
            yield OperandRule("bias", s.bias, (h.columns * live,), (1,), s.bias.itemsize)
        outer, inner = (self.pages * live, h.page_size) if s.heads.paged else (self.batch, h.tokens)
        for name, lead, count, strides in (
            ("q", (self.batch, h.num_heads), h.tokens, h.q_strides),
            ("k", (outer, h.kv_heads), inner, h.k_strides),
            ("v", (outer, h.kv_heads), inner, h.v_strides),
        ):
            align = max(s.vector_out, s.dtype_out.itemsize)
            yield OperandRule(
                name, s.dtype_out, (*lead, count, h.head_dim), (*strides, 1), align, True
            )
        if s.heads.rotary:
            for name in ("cos", "sin"):
                yield OperandRule(
                    name,
                    f32,
                    (self.max_position * live, h.rotary_dim // 2),
                    (h.rotary_stride, 1),
                    4,
                )
        if s.heads.positions:
            yield OperandRule("positions", i32, (self.batch, h.tokens), h.positions_strides, 4)
        if s.heads.paged:
            yield OperandRule(
                "block_table", i32, (self.batch * live, self.table_width), (h.table_stride, 1), 4
            )

    @property
    def operations(self) -> int:
        product = 2 * self.rows * self.hidden * self.heads.columns
        return product if self.append is None else product + self.append.operations

    @property
    def bytes_moved(self) -> int:
        moved = (self.rows + self.heads.columns) * self.hidden * self.spec.dtype.itemsize
        moved += self.rows * self.heads.columns * self.spec.dtype_out.itemsize
        return moved if self.append is None else moved + self.append.bytes_moved

    def __str__(self) -> str:
        h = self.heads
        return (
            f"{self.spec} batch={self.batch} S={h.tokens} hidden={self.hidden} "
            f"heads={h.num_heads}/{h.kv_heads} "
            f"dim={h.head_dim}"
        )


@dataclass(frozen=True)
class OutputProjectionProblem(ProjectionProblem):
    """out = Σ_h attn_out[h]·weight[:, h]ᵀ + bias + residual. Strides in elements.

    Where the heads of a token lie side by side they are one head: ``num_heads`` is 1 unless the
    spec says apart.
    """

    spec: OutputProjectionSpec
    batch: int
    S: int
    hidden: int
    """Columns of the result."""
    num_heads: int
    head_dim: int
    attn_out_strides: tuple[int, int, int]
    """(batch, head, row)."""
    weight_stride: int
    out_strides: tuple[int, int]
    """(batch, row); so for the residual."""
    residual_strides: tuple[int, int] = (0, 0)

    operation = "output_projection"

    def _operands(self) -> Iterator[OperandRule]:
        s, rows = self.spec, (self.batch, self.S, self.hidden)
        live, width = int(0 not in rows), self.num_heads * self.head_dim
        heads = (self.batch * live, self.num_heads, self.S, self.head_dim)
        align = max(s.vector_attn_out, s.dtype.itemsize)
        yield OperandRule("attn_out", s.dtype, heads, (*self.attn_out_strides, 1), align)
        yield matrix(
            "weight", s.dtype, (live, self.hidden, width), (0, self.weight_stride), s.vector_weight
        )
        if s.bias:
            yield OperandRule("bias", s.bias, (self.hidden * live,), (1,), s.bias.itemsize)
        if s.residual:
            added = matrix("residual", s.residual, rows, self.residual_strides, s.vector_residual)
            yield replace(added, may_alias="out")
        yield matrix("out", s.dtype_out, rows, self.out_strides, s.vector_out, True)

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.S * self.num_heads * self.head_dim * self.hidden

    @property
    def bytes_moved(self) -> int:
        s, rows, width = self.spec, self.batch * self.S, self.num_heads * self.head_dim
        added = s.residual.itemsize if s.residual else 0
        return (rows + self.hidden) * width * s.dtype.itemsize + rows * self.hidden * (
            s.dtype_out.itemsize + added
        )

    def __str__(self) -> str:
        return (
            f"{self.spec} batch={self.batch} S={self.S} heads={self.num_heads} "
            f"dim={self.head_dim} hidden={self.hidden}"
        )


def matrix(
    name: str,
    dtype: DType,
    shape: tuple[int, int, int],
    strides: tuple[int, int],
    vector: int,
    written: bool = False,
) -> OperandRule:
    """The rule of an operand [batch, row, column]."""
    batch, rows, columns = shape
    outer, row = strides
    return OperandRule(
        name,
        dtype,
        (batch, 1, rows, columns),
        (outer, 0, row, 1),
        max(vector, dtype.itemsize),
        written,
    )
