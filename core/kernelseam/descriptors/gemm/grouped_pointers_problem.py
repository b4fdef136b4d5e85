"""The problem and spec of a grouped GEMM over lists of addresses: the hashable part of its
descriptor. They hold no pointers and check nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import OperandRule
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

TABLE = "table"
"""The operand that has the groups' extents and row strides: six int32 a group, M, N, K and those of
A, B and C. The descriptor makes it."""
Three = tuple[int, int, int]


@dataclass(frozen=True)
class GroupedGemmPointersSpec:
    """The compile-time parameters of a grouped GEMM over lists."""

    product: GemmSpec
    """Of each group's product."""
    listed: bool = True
    """Sizes are listed: what tells it, by its fields, from a batched GEMM over lists."""

    operation = "grouped_gemm_pointers"

    @property
    def dtype(self) -> DType:
        """Of A and B."""
        return self.product.dtype

    def __str__(self) -> str:
        return f"{self.product} of groups of their own sizes"


@dataclass(frozen=True)
class GroupedGemmPointersProblem:
    """C[g] = alpha·op(A[g])·op(B[g]) + beta·C[g] of matrices of any sizes, at listed addresses."""

    spec: GroupedGemmPointersSpec
    sizes: tuple[Three, ...]
    """(M, N, K) of each group."""
    row_strides: tuple[Three, ...]
    """(A, B, C) of each group, in elements."""
    alpha: float = 1.0
    beta: float = 0.0

    operation = "grouped_gemm_pointers"

    @classmethod
    def of(
        cls,
        spec: GroupedGemmPointersSpec,
        table: npt.NDArray[np.int64],
        alpha: float,
        beta: float,
    ) -> GroupedGemmPointersProblem:
        """Of ``table``'s numbers."""
        sizes = tuple(map(tuple, table[:, :3].tolist()))
        problem = cls(spec, sizes, tuple(map(tuple, table[:, 3:].tolist())), alpha, beta)
        problem.__dict__["table"] = table
        return problem

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """[groups, 6]: M, N and K of each group, and the row strides of A, B and C."""
        rows = [(*x, *steps) for x, steps in zip(self.sizes, self.row_strides, strict=True)]
        return np.array(rows, np.int64).reshape(-1, 6)

    @cached_property
    def groups(self) -> int:
        """How many there are."""
        return len(self.sizes)

    @cached_property
    def most(self) -> Three:
        """The largest M, N and K."""
        m, n, k = self.table[:, :3].max(0, initial=0).tolist()
        return m, n, k

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of so many rows and columns of all groups' C."""
        m, n = self.table[:, 0], self.table[:, 1]
        return int((-(-m // rows) * -(-n // columns)).sum())

    @property
    def reads_inputs(self) -> bool:
        """False where alpha or every K is 0: then C = beta·C."""
        return self.alpha != 0 and self.most[2] > 0

    def written(self, g: int) -> bool:
        """Whether group g has a C of any elements."""
        m, n, _ = self.sizes[g]
        return m > 0 and n > 0

    def read(self, g: int) -> bool:
        """Whether group g's A and B are read."""
        return self.written(g) and self.sizes[g][2] > 0 and self.alpha != 0

    def a_shape(self, g: int) -> tuple[int, int]:
        """(rows, columns) of a group's A in memory."""
        m, _, k = self.sizes[g]
        return (k, m) if self.spec.product.a_transposed else (m, k)

    def b_shape(self, g: int) -> tuple[int, int]:
        """(rows, columns) of a group's B in memory."""
        _, n, k = self.sizes[g]
        return (n, k) if self.spec.product.b_transposed else (k, n)

    def rule(self, name: str, g: int) -> OperandRule:
        """The rule of group g's A, B or C, without groups."""
        product, (m, n, _) = self.spec.product, self.sizes[g]
        shape = {"A": self.a_shape(g), "B": self.b_shape(g), "C": (m, n)}[name]
        row = self.row_strides[g]["ABC".index(name)]
        dtype = product.dtype_c if name == "C" else product.dtype
        used = self.written(g) if name == "C" else self.read(g)
        shape = (shape[0] * used, shape[1])
        return OperandRule(name, dtype, shape, (row, 1), dtype.itemsize, name == "C")

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        live = self.groups if any(map(self.written, range(self.groups))) else 0
        reads = live if any(map(self.read, range(self.groups))) else 0
        lists = (("A_ptrs", reads), ("B_ptrs", reads), ("C_ptrs", live))
        return (
            *(OperandRule(name, None, (entries,), (1,), 8) for name, entries in lists),
            OperandRule(TABLE, DType.int32, (6 * live,), (1,), 4),
        )

    @cached_property
    def even(self) -> GemmProblem:
        """A batched GEMM of nearly as many operations, of the size that they are mostly of: what
        the choice of a tile is made for."""
        sizes: npt.NDArray[Any] = self.table[:, :3]
        most = max(1, *self.most)
        if most**4 * max(self.groups, 1) >= 2**63:
            sizes = sizes.astype(object)
        work = sizes[:, 0] * sizes[:, 1] * np.maximum(sizes[:, 2], 1)
        whole = max(int(work.sum()), 1)
        m, n, k = (-(-int(x) // whole) for x in work @ sizes)
        a, b, c = self.table[:, 3:].max(0, initial=0).tolist()
        batch = max(-(-whole // max(m * n * max(k, 1), 1)), 1)
        return GemmProblem(
            self.spec.product,
            m,
            n,
            k,
            batch,
            1,
            (0, 0, a),
            (0, 0, b),
            (0, 0, c),
            alpha=self.alpha,
            beta=self.beta,
        )

    @cached_property
    def operations(self) -> int:
        return 2 * sum(m * n * k for m, n, k in self.sizes) if self.reads_inputs else 0

    @cached_property
    def bytes_moved(self) -> int:
        product = self.spec.product
        inputs = sum(m * k + k * n for m, n, k in self.sizes) * product.dtype.itemsize
        results = sum(m * n for m, n, _ in self.sizes) * product.dtype_c.itemsize
        return inputs * int(self.reads_inputs) + results * (2 if self.beta else 1)

    @property
    def compute_dtype(self) -> DType:
        return self.spec.dtype

    def __str__(self) -> str:
        shown = [f"{m}×{n}×{k}" for m, n, k in self.sizes[:4]]
        more = ["…"] * (self.groups > len(shown))
        return f"{self.spec} groups={self.groups} {', '.join((*shown, *more))}"
