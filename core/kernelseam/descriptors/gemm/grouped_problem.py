"""A grouped GEMM's problem and spec: the hashable part of its descriptor. They hold no pointers and
check nothing."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.contract import OperandRule
from kernelseam.descriptors.common.captured import captured_rules
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, scale_rules
from kernelseam.dtypes import DType
from kernelseam.expressions.epilogues import EpilogueStructure
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

AXES = ("m", "n", "k")
"""Axes along which offsets divide operands into groups."""
STACKED = {"m": ("B",), "n": ("A",), "k": ("C",)}
"""Operands with one matrix a group, by the axis of the groups; the other two are divided."""
INDICES = ("a_indices", "c_indices", "c_factors")
"""Operands that say, of each row of a product along "m", which row of A it reads, which of C it is
written to, and what it is multiplied by."""


@dataclass(frozen=True)
class GroupedGemmSpec:
    """The compile-time parameters of a grouped GEMM."""

    along: str
    """"m", "n" or "k": the axis of the groups."""
    product: GemmSpec
    """Of each group's product, whose widest accesses are those of whole operands' rows: within them
    a group may begin at any element."""
    indices: tuple[str, ...] = ()
    """Those of ``INDICES`` that there are, in that order."""

    operation = "grouped_gemm"

    @property
    def dtype(self) -> DType:
        """Of A and B."""
        return self.product.dtype

    @property
    def by_elements(self) -> GemmSpec:
        """The product of kernels that begin where a group does: where that is within an operand's
        rows, by accesses of elements."""
        product, size = self.product, self.product.dtype.itemsize

        def narrowed(vector: int, size: int, columns: str) -> int:
            return size if columns == self.along else vector

        return replace(
            product,
            vector_a=narrowed(product.vector_a, size, "m" if product.a_transposed else "k"),
            vector_b=narrowed(product.vector_b, size, "k" if product.b_transposed else "n"),
            vector_c=narrowed(product.vector_c, product.dtype_c.itemsize, "n"),
        )

    @property
    def epilogue_structure(self) -> EpilogueStructure | None:
        return self.product.epilogue_structure

    def __str__(self) -> str:
        return " with ".join((f"{self.product} grouped along {self.along}", *self.indices))


@dataclass(frozen=True)
class GroupedGemmProblem:
    """C_g = alpha·op(A_g)·op(B_g) + beta·C_g for each group g, whose part of the axis
    ``spec.along`` is from offsets[g − 1] (0 for the first) to offsets[g].

    M, N and K are whole extents; the grouped one is a capacity, of which the last offset may leave
    a rest. Strides in elements; a group's is 0 where an operand is divided.
    """

    spec: GroupedGemmSpec
    groups: int
    M: int
    N: int
    K: int
    a_strides: tuple[int, int]
    """(group, row); so for B and C."""
    b_strides: tuple[int, int]
    c_strides: tuple[int, int]
    alpha: float = 1.0
    beta: float = 0.0
    a_scale_strides: tuple[int, int] = (0, 0)
    """(group, row of op(A)); 0 where one scale serves all."""
    b_scale_strides: tuple[int, int] = (0, 0)
    """(group, column of op(B))."""
    scale_k_strides: tuple[int, int] = (0, 0)
    """Of A's scales and of B's, from one block of k to the next."""
    a_rows: int = 0
    """Of A, where ``a_indices`` say which of them are multiplied; so of C."""
    c_rows: int = 0
    preactivation_strides: tuple[int, int] = (0, 0)
    captured_numbers: tuple[float, ...] = ()
    """What the epilogue captured, as in ``GemmProblem``."""
    captured_extents: tuple[tuple[int, ...], ...] = ()
    captured_strides: tuple[tuple[int, ...], ...] = ()

    operation = "grouped_gemm"

    @property
    def reads_inputs(self) -> bool:
        """False where alpha or K is 0: then C = beta·C."""
        return self.alpha != 0 and self.K > 0

    @property
    def a_shape(self) -> tuple[int, int]:
        """(rows, columns) of A in memory."""
        if "a_indices" in self.spec.indices:
            return self.a_rows, self.K
        return (self.K, self.M) if self.spec.product.a_transposed else (self.M, self.K)

    @property
    def b_shape(self) -> tuple[int, int]:
        """(rows, columns) of B in memory."""
        return (self.N, self.K) if self.spec.product.b_transposed else (self.K, self.N)

    @property
    def c_shape(self) -> tuple[int, int]:
        """(rows, columns) of C in memory."""
        return self._c_rows, self.c_columns

    @property
    def _c_rows(self) -> int:
        return self.c_rows if "c_indices" in self.spec.indices else self.M

    @property
    def c_columns(self) -> int:
        """Of C: N, or half as many where the epilogue is of pairs."""
        return self.N // 2 if self.spec.product.pairs else self.N

    def matrices(self, name: str) -> int:
        """How many matrices an operand has, A, B or C: one a group, or one that is divided."""
        return self.groups if name in STACKED[self.spec.along] else 1

    @property
    def scale_extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(group, row) of A's scales and (group, column) of B's, and of blocks, last, blocks of k.
        Scales of what is divided along that axis have no groups."""
        along, block = self.spec.along, self.spec.product.scale_block
        of_a, of_b = (1 if along == axis else self.groups for axis in "mn")
        rows = self.a_rows if "a_indices" in self.spec.indices else self.M
        if block is None:
            return (of_a, rows), (of_b, self.N)
        m, n, k = block
        blocks = -(-self.K // k)
        return (of_a, -(-rows // m), blocks), (of_b, -(-self.N // n), blocks)

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        product = self.spec.product
        live = int(self.M > 0 and self.N > 0 and self.groups > 0)
        reads = live * int(self.reads_inputs)

        def rule(
            name: str, dtype: DType, vector: int, shape: tuple[int, int], strides: tuple[int, int]
        ) -> OperandRule:
            written = name in ("C", "preactivation")
            extents = (self.matrices(name) * (live if written else reads), *shape)
            alignment = max(vector, dtype.itemsize)
            return OperandRule(name, dtype, extents, (*strides, 1), alignment, written)

        rules = [
            rule("A", product.dtype, product.vector_a, self.a_shape, self.a_strides),
            rule("B", product.dtype, product.vector_b, self.b_shape, self.b_strides),
            rule("C", product.dtype_c, product.vector_c, self.c_shape, self.c_strides),
            OperandRule("offsets", DType.int32, (self.groups * live,), (1,), 4),
        ]
        for name in self.spec.indices:
            dtype = DType.float32 if name == "c_factors" else DType.int32
            rows = self.M * (reads if name == "a_indices" else live)
            rules.append(OperandRule(name, dtype, (rows,), (1,), 4))
        rules += scale_rules(self, product, reads)
        if product.preactivation:
            shape, steps = (self._c_rows, self.N), self.preactivation_strides
            rules.append(rule("preactivation", product.dtype_c, product.vector_p, shape, steps))
        if (expression := product.epilogue_structure) is not None:
            rules += captured_rules(self, expression.arrays, live)
        return tuple(rules)

    @property
    def even(self) -> GemmProblem:
        """A batched GEMM of as many products, the grouped axis divided evenly: what the choice of
        an implementation and a tile is made for, as nobody knows the offsets."""
        along, groups = self.spec.along, max(self.groups, 1)
        parts = {
            axis: -(-n // groups) if axis == along else n
            for axis, n in zip(AXES, (self.M, self.N, self.K), strict=True)
        }
        m, n, k = parts.values()

        def walk(name: str, strides: tuple[int, int], outer: int) -> tuple[int, int, int]:
            group = strides[0] if self.matrices(name) > 1 else outer * strides[1]
            return group, 0, strides[1]

        product = self.spec.product
        return GemmProblem(
            product,
            m,
            n,
            k,
            self.groups,
            1,
            walk("A", self.a_strides, k if product.a_transposed else m),
            walk("B", self.b_strides, n if product.b_transposed else k),
            walk("C", self.c_strides, m),
            alpha=self.alpha,
            beta=self.beta,
            captured_numbers=self.captured_numbers,
            captured_extents=self.captured_extents,
            captured_strides=self.captured_strides,
            preactivation_strides=walk("preactivation", self.preactivation_strides, m),
        )

    @cached_property
    def operations(self) -> int:
        """Where the last offset is the capacity."""
        parts = self.M * self.N * self.K * (self.groups > 0)
        return 2 * parts if self.reads_inputs else 0

    @cached_property
    def bytes_moved(self) -> int:
        product = self.spec.product
        a, b = (
            self.matrices(n) * x[0] * x[1] * product.dtype.itemsize
            for n, x in (("A", self.a_shape), ("B", self.b_shape))
        )
        element = self.matrices("C") * self.M * product.dtype_c.itemsize
        c = element * self.c_columns * (2 if self.beta else 1)
        return (a + b) * int(self.reads_inputs) + c + element * self.N * product.preactivation

    @property
    def compute_dtype(self) -> DType:
        return self.spec.dtype

    def __str__(self) -> str:
        return f"{self.spec} groups={self.groups} {self.M}×{self.N}×{self.K}"
