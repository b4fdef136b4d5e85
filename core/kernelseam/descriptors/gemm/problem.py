"""A batched GEMM's problem and spec: the hashable part of its descriptors. They hold no pointers
and check nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelseam.contract import OperandRule
from kernelseam.descriptors.common.captured import captured_rules
from kernelseam.descriptors.common.extents import distinct
from kernelseam.dtypes import DType
from kernelseam.expressions.epilogues import EpilogueStructure, epilogue_of
from kernelseam.expressions.reductions import Reduction, reduction
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class HeadsSpec:
    """The part of a GEMM's spec for products whose columns are heads of q, k and v."""

    rotary: str = ""
    """Rotary embedding of q and k: "halves" (half-split: i with i + n/2), "pairs" (interleaved: 2i
    with 2i + 1), "" none."""
    positions: bool = False
    """Whether rows have positions in memory; else they are numbered."""
    paged: bool = False
    """Whether k and v are written into pages, at the rows' positions."""


EXTRAS = (
    *("scales", "bias", "residual", "summed", "row_sums", "segmented", "heads", "joined"),
    *("epilogue", "preactivation"),
)
"""Fields of a GemmSpec that make it more than a plain product."""


@dataclass(frozen=True)
class GemmSpec:
    """The compile-time parameters of a batched GEMM.

    ``vector_*``: bytes of the widest access that every row's start allows, 16 or the element size.
    """

    dtype: DType
    dtype_c: DType
    dtype_acc: DType
    a_transposed: bool = False
    b_transposed: bool = False
    view: str = "strided"
    """"strided" or "pointers"."""
    vector_a: int = 16
    vector_b: int = 16
    vector_c: int = 16
    bias: DType | None = None
    """The dtype of the bias, which is added by column; None without one."""
    residual: DType | None = None
    vector_r: int = 16
    """Access width of the residual's rows."""
    summed: bool = False
    """Whether products of several batches or heads are summed into one C."""
    row_sums: DType | None = None
    """The dtype of the stored row sums of op(A). This and the next two are used by projections
    alone."""
    segmented: bool = False
    """Whether A's heads are those of three operands."""
    heads: HeadsSpec | None = None
    """Whether C's columns are heads of three operands."""
    joined: str | None = None
    """The axis that all heads' elements are together, in one product instead of one a head: "a",
    C's rows, the heads A's; "b", C's columns, the heads B's; "k", what is summed over, the heads
    A's. Projections alone ask for it."""
    precision: str | None = None
    """How float32 is multiplied: None as IEEE arithmetic says; "tf32" rounded to TF32 first;
    "tf32x3" split into two such parts."""

    scales: bool = False
    """Whether rows of A and columns of B, of 8 bits, have scales."""
    scale_block: tuple[int, int, int] | None = None
    """How many rows of op(A), columns of op(B) and values of k share a scale; None: a row or a
    column has one."""

    epilogue: str | None = None
    """The text of an epilogue (``kernelseam.expressions.epilogues``)."""
    preactivation: bool = False
    """Whether what the epilogue is of is written too, in C's dtype."""
    vector_p: int = 16
    """Access width of its rows."""

    operation = "gemm"

    @cached_property
    def epilogue_structure(self) -> EpilogueStructure | None:
        return None if self.epilogue is None else epilogue_of(self.epilogue)

    @cached_property
    def pairs(self) -> str:
        """How the epilogue pairs columns; "" where it does not."""
        return "" if self.epilogue is None else epilogue_of(self.epilogue).pairs

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The epilogue's sums and maxima."""
        return () if self.epilogue is None else epilogue_of(self.epilogue).reductions

    @property
    def plain(self) -> bool:
        """Whether it is alpha·op(A)·op(B) + beta·C and nothing more."""
        return not self.extras

    @property
    def extras(self) -> list[str]:
        """What it is more, of ``EXTRAS``, in that order."""
        return [name for name in EXTRAS if getattr(self, name)]

    def __str__(self) -> str:
        ops = ("T" if self.a_transposed else "N") + ("T" if self.b_transposed else "N")
        more = self.extras + [f"precision={self.precision}"] * bool(self.precision)
        if self.epilogue is not None:
            more[more.index("epilogue")] = f"epilogue={epilogue_of(self.epilogue).key}"
        if self.scale_block:
            more.append(f"scale_block={'×'.join(map(str, self.scale_block))}")
        return " ".join((f"gemm {self.dtype}→{self.dtype_c} {ops} {self.view}", *more))


@dataclass(frozen=True)
class Segment:
    """Consecutive heads of A in one place."""

    heads: int
    strides: tuple[int, int, int]
    """(batch, head, row)."""


@dataclass(frozen=True)
class HeadsProblem:
    """Where the columns of C go: heads of q first, then of k, then of v, each of ``head_dim``
    columns.

    Row i of a matrix is token i % ``tokens`` of batch entry batch + i // ``tokens``. Element d of
    head h of that token lies at batch·stride + h·stride + token·stride + d of its operand. Where k
    and v are paged, a token of position p goes to row p % ``page_size`` of page table[entry, p //
    ``page_size``], and their batch stride is that between pages.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    q_strides: tuple[int, int, int]
    """(batch, head, token); so for k and v."""
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    rotary_dim: int = 0
    """Elements of a head that are rotated, from the first on."""
    rotary_stride: int = 0
    """From a position's cosines to the next's, and so for the sines."""
    first_position: int = 0
    """Of every entry's first token, where positions are not in memory."""
    positions_strides: tuple[int, int] = (0, 0)
    """(batch, token)."""
    page_size: int = 1
    table_stride: int = 0
    """From an entry's row of the block table to the next."""

    @property
    def columns(self) -> int:
        """Of C: all heads'."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim


def scale_rules(problem: Any, spec: GemmSpec, reads: int) -> Iterator[OperandRule]:
    """Those of the scales of a product, or of groups."""
    for name, extents, walk, step in zip(
        ("a_scales", "b_scales"),
        problem.scale_extents,
        (problem.a_scale_strides, problem.b_scale_strides),
        problem.scale_k_strides,
        strict=True,
    ):
        if spec.scales:
            whole = (*walk, step)[: len(extents)]
            yield OperandRule(name, DType.float32, (extents[0] * reads, *extents[1:]), whole, 4)


@dataclass(frozen=True)
class GemmProblem:
    """C[b', h'] = alpha·Σ op(A[b,h])·op(B[b,h // b_head_group]) + beta·C[b', h'] + bias[b', h'] +
    residual[b', h'], the sum over those (b, h) with b // c_batch_group = b' and h // c_head_group =
    h'; and of these the epilogue, where there is one. With scales a number x of row m of op(A)
    stands for a_scales[m]·x, one of column n of op(B) for b_scales[n]·x; those of blocks are
    counted by blocks of rows or columns, and of k. Strides in elements.

    With pointer lists the batch and head strides are 0; the lists of A and B have batch·num_heads
    entries, the others one for each C.
    """

    spec: GemmSpec
    M: int
    N: int
    K: int
    batch: int
    num_heads: int
    a_strides: tuple[int, int, int]
    """(batch, head, row); so for B, C and the residual."""
    b_strides: tuple[int, int, int]
    c_strides: tuple[int, int, int]
    b_head_group: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    c_batch_group: int = 1
    """Consecutive batches whose products are summed into one C."""
    c_head_group: int = 1
    bias_strides: tuple[int, int] = (0, 0)
    """(batch, head)."""
    residual_strides: tuple[int, int, int] = (0, 0, 0)
    sums_strides: tuple[int, int] = (0, 0)
    """(batch, head) of the row sums, by C's batches and heads; each M long."""
    segments: tuple[Segment, ...] = ()
    """Three where the spec says so, in place of ``a_strides``."""
    heads: HeadsProblem | None = None
    """Where the spec says so, in place of ``c_strides``."""
    joined_heads: int = 0
    """Where the spec joins heads: how many there are; ``num_heads`` is 1."""
    a_scale_strides: tuple[int, int, int] = (0, 0, 0)
    """(batch, head, row of op(A)); 0 where one scale serves all."""
    b_scale_strides: tuple[int, int, int] = (0, 0, 0)
    """(batch, head of B, column of op(B))."""
    scale_k_strides: tuple[int, int] = (0, 0)
    """Of A's scales and of B's, from one block of k to the next."""
    captured_numbers: tuple[float, ...] = ()
    """What the epilogue captured: numbers, and extents and strides of arrays, the operands
    captured_0, captured_1, …"""
    captured_extents: tuple[tuple[int, ...], ...] = ()
    captured_strides: tuple[tuple[int, ...], ...] = ()
    preactivation_strides: tuple[int, int, int] = (0, 0, 0)
    reduction_strides: tuple[tuple[int, ...], ...] = ()
    """Of the arrays that the epilogue's sums and maxima are written to, by their axes: the operands
    reduction_0, reduction_1, …"""
    whole_lines: bool = False
    """Of lists: whether all matrices are known to begin with a line of the cache. It concerns time
    alone: a plan serves lists that do not."""

    operation = "gemm"

    @property
    def matrices(self) -> int:
        """Products: batch·num_heads."""
        return self.batch * self.num_heads

    @property
    def summed(self) -> int:
        """Products that are summed into one C."""
        return self.c_batch_group * self.c_head_group

    @property
    def results(self) -> int:
        """C's."""
        return (self.batch // self.c_batch_group) * (self.num_heads // self.c_head_group)

    @property
    def matrix_strides(self) -> tuple[int, int, int] | None:
        """One stride over all batch·num_heads matrices for A, B and C, as the vendors' libraries
        take it; None where batch and head are not evenly spaced."""
        strides = []
        for (batch, head, _), group in (
            (self.a_strides, 1),
            (self.b_strides, self.b_head_group),
            (self.c_strides, 1),
        ):
            if group == self.num_heads:
                head = 0  # every head shares one matrix
            elif group != 1:
                return None
            if self.num_heads == 1:
                strides.append(batch)
            elif self.batch == 1 or batch == head * self.num_heads:
                strides.append(head)
            else:
                return None
        return strides[0], strides[1], strides[2]

    @property
    def c_columns(self) -> int:
        """Of C: N, or half as many where the epilogue is of pairs."""
        return self.N // 2 if self.spec.pairs else self.N

    @property
    def reads_inputs(self) -> bool:
        """False where alpha or K is 0: then C = beta·C."""
        return self.alpha != 0 and self.K > 0

    @property
    def a_shape(self) -> tuple[int, int]:
        """(rows, columns) of one A in memory."""
        return (self.K, self.M) if self.spec.a_transposed else (self.M, self.K)

    @property
    def b_shape(self) -> tuple[int, int]:
        """(rows, columns) of one B in memory."""
        return (self.N, self.K) if self.spec.b_transposed else (self.K, self.N)

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        spec = self.spec
        live = self.M > 0 and self.N > 0 and self.results > 0
        reads = int(live and self.matrices > 0 and self.reads_inputs)
        added = [n for n in ("bias", "residual") if getattr(spec, n)]
        if spec.view == "pointers":
            products, c = self.matrices * reads, self.results * int(live)
            lists = (
                ("A_ptrs", products),
                ("B_ptrs", products),
                ("C_ptrs", c),
                *((f"{n}_ptrs", c) for n in added),
                *((f"{n}_ptrs", products) for n in ("a_scales", "b_scales") if spec.scales),
                *((("preactivation_ptrs", c),) if spec.preactivation else ()),
            )
            rules = [OperandRule(name, None, (entries,), (1,), 8) for name, entries in lists]
            return (*rules, *self._captured_rules(live))

        def rule(
            name: str,
            dtype: DType,
            vector: int,
            shape: tuple[int, ...],
            strides: tuple[int, ...],
            used: int,
            written: bool = False,
        ) -> OperandRule:
            return OperandRule(
                name,
                dtype,
                (shape[0] * used, *shape[1:]),
                (*strides, 1),
                max(vector, dtype.itemsize),
                written,
            )

        c_lead = self.batch // self.c_batch_group, self.num_heads // self.c_head_group
        b_lead = self.batch, self.num_heads // self.b_head_group
        of_a, of_b = (self.batch, self.num_heads, *self.a_shape), (*b_lead, *self.b_shape)
        of_c = *c_lead, self.M, self.c_columns
        rules = [
            rule("A", spec.dtype, spec.vector_a, of_a, self.a_strides, reads),
            rule("B", spec.dtype, spec.vector_b, of_b, self.b_strides, reads),
            rule("C", spec.dtype_c, spec.vector_c, of_c, self.c_strides, int(live), True),
        ]
        rules += scale_rules(self, spec, reads)
        if spec.bias:
            rules.append(
                rule("bias", spec.bias, 0, (*c_lead, self.N), self.bias_strides, int(live))
            )
        if spec.residual:
            shape = (*c_lead, self.M, self.N)
            added_to = rule(
                "residual", spec.residual, spec.vector_r, shape, self.residual_strides, int(live)
            )
            rules.append(added_to if self.beta else replace(added_to, may_alias="C"))
        if spec.preactivation:
            shape = (*c_lead, self.M, self.N)
            steps, live_c = self.preactivation_strides, int(live)
            rules.append(
                rule("preactivation", spec.dtype_c, spec.vector_p, shape, steps, live_c, True)
            )
        return (*rules, *self._captured_rules(live))

    def _captured_rules(self, live: bool) -> Iterator[OperandRule]:
        if (expression := self.spec.epilogue_structure) is not None:
            yield from captured_rules(self, expression.arrays, int(live))
        # written also where there are no elements
        for i, (x, strides) in enumerate(
            zip(self.reduction_shapes, self.reduction_strides, strict=True)
        ):
            dtype = self.spec.dtype_acc
            yield OperandRule(reduction(i), dtype, x, strides, dtype.itemsize, True)

    @property
    def reduction_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the epilogue's sums and maxima."""
        return tuple(x.shape(self.results, self.M, self.c_columns) for x in self.spec.reductions)

    @property
    def scale_extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(batch, head, row) of A's scales and (batch, head, column) of B's; with blocks of those
        and, last, blocks of k."""
        lead, lead_b = (
            (self.batch, self.num_heads),
            (self.batch, self.num_heads // self.b_head_group),
        )
        if self.spec.scale_block is None:
            return (*lead, self.M), (*lead_b, self.N)
        m, n, k = self.spec.scale_block
        blocks = -(-self.K // k)
        return (*lead, -(-self.M // m), blocks), (*lead_b, -(-self.N // n), blocks)

    @property
    def operations(self) -> int:
        return 2 * self.matrices * self.M * self.N * self.K if self.reads_inputs else 0

    @cached_property
    def bytes_moved(self) -> int:
        size, c_size = self.spec.dtype.itemsize, self.spec.dtype_c.itemsize
        a = (
            distinct(self.batch, self.a_strides[0])
            * distinct(self.num_heads, self.a_strides[1])
            * self.M
            * self.K
        )
        heads = self.num_heads // self.b_head_group
        b = (
            distinct(self.batch, self.b_strides[0])
            * distinct(heads, self.b_strides[1])
            * self.N
            * self.K
        )
        if self.spec.view == "pointers":
            a, b = self.matrices * self.M * self.K, self.matrices * self.N * self.K
        c = self.results * self.M * self.N
        added = (c * c_size if self.spec.preactivation else 0) + (
            c * self.spec.residual.itemsize if self.spec.residual else 0
        )
        return (
            (a + b) * size * int(self.reads_inputs)
            + self.results * self.M * self.c_columns * c_size * (2 if self.beta else 1)
            + added
        )

    @property
    def compute_dtype(self) -> DType:
        return self.spec.dtype

    def __str__(self) -> str:
        return f"{self.spec} batch={self.batch} heads={self.num_heads} {self.M}×{self.N}×{self.K}"
