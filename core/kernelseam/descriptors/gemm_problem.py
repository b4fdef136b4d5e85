"""A batched GEMM's problem and spec: the hashable half of its descriptors. They hold no pointers and check nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelseam.contract import OperandRule
from kernelseam.descriptors.attention_problem import distinct
from kernelseam.dtypes import DType


@dataclass(frozen=True)
class GemmSpec:
    """What shapes the binary of a batched GEMM.

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

    operation = "gemm"

    def __str__(self) -> str:
        ops = ("T" if self.a_transposed else "N") + ("T" if self.b_transposed else "N")
        return f"gemm {self.dtype}→{self.dtype_c} {ops} {self.view}"


@dataclass(frozen=True)
class GemmProblem:
    """C[b,h] = alpha·op(A[b,h])·op(B[b,h // b_head_group]) + beta·C[b,h]. Strides in elements.

    With pointer lists the batch and head strides are 0 and each list has batch·num_heads entries.
    """

    spec: GemmSpec
    M: int
    N: int
    K: int
    batch: int
    num_heads: int
    a_strides: tuple[int, int, int]
    """(batch, head, row); so for B and C."""
    b_strides: tuple[int, int, int]
    c_strides: tuple[int, int, int]
    b_head_group: int = 1
    alpha: float = 1.0
    beta: float = 0.0

    operation = "gemm"

    @property
    def matrices(self) -> int:
        """batch·num_heads."""
        return self.batch * self.num_heads

    @property
    def matrix_strides(self) -> tuple[int, int, int] | None:
        """One stride over all batch·num_heads matrices for A, B and C, as the vendors' libraries take it; None where
        batch and head are not evenly spaced."""
        found = []
        for (batch, head, _), group in ((self.a_strides, 1), (self.b_strides, self.b_head_group), (self.c_strides, 1)):
            if group == self.num_heads:
                head = 0  # every head shares one matrix
            elif group != 1:
                return None
            if self.num_heads == 1:
                found.append(batch)
            elif self.batch == 1 or batch == head * self.num_heads:
                found.append(head)
            else:
                return None
        return found[0], found[1], found[2]

    @property
    def reads_inputs(self) -> bool:
        """False where alpha or K is 0: then C = beta·C."""
        return self.alpha != 0 and self.K > 0

    @property
    def a_shape(self) -> tuple[int, int]:
        """(rows, columns) of one A as it lies in memory."""
        return (self.K, self.M) if self.spec.a_transposed else (self.M, self.K)

    @property
    def b_shape(self) -> tuple[int, int]:
        """(rows, columns) of one B as it lies in memory."""
        return (self.N, self.K) if self.spec.b_transposed else (self.K, self.N)

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        spec = self.spec
        live = self.M > 0 and self.N > 0 and self.matrices > 0
        reads = int(live and self.reads_inputs)
        if spec.view == "pointers":
            n = self.matrices
            return (
                OperandRule("A_ptrs", None, (n * reads,), (1,), 8),
                OperandRule("B_ptrs", None, (n * reads,), (1,), 8),
                OperandRule("C_ptrs", None, (n * int(live),), (1,), 8),
            )
        h = self.num_heads

        def rule(name: str, dtype: DType, vector: int, heads: int, shape: tuple[int, int],
                 strides: tuple[int, int, int], used: int, written: bool = False) -> OperandRule:
            return OperandRule(
                name, dtype, (self.batch * used, heads, *shape), (*strides, 1), max(vector, dtype.itemsize), written
            )

        return (
            rule("A", spec.dtype, spec.vector_a, h, self.a_shape, self.a_strides, reads),
            rule("B", spec.dtype, spec.vector_b, h // self.b_head_group, self.b_shape, self.b_strides, reads),
            rule("C", spec.dtype_c, spec.vector_c, h, (self.M, self.N), self.c_strides, int(live), True),
        )

    @property
    def operations(self) -> int:
        return 2 * self.matrices * self.M * self.N * self.K if self.reads_inputs else 0

    @property
    def bytes_moved(self) -> int:
        size, c_size = self.spec.dtype.itemsize, self.spec.dtype_c.itemsize
        a = distinct(self.batch, self.a_strides[0]) * distinct(self.num_heads, self.a_strides[1]) * self.M * self.K
        heads = self.num_heads // self.b_head_group
        b = distinct(self.batch, self.b_strides[0]) * distinct(heads, self.b_strides[1]) * self.N * self.K
        if self.spec.view == "pointers":
            a, b = self.matrices * self.M * self.K, self.matrices * self.N * self.K
        c = self.matrices * self.M * self.N
        return (a + b) * size * int(self.reads_inputs) + c * c_size * (2 if self.beta else 1)

    @property
    def compute_dtype(self) -> DType:
        return self.spec.dtype

    def __str__(self) -> str:
        return f"{self.spec} batch={self.batch} heads={self.num_heads} {self.M}×{self.N}×{self.K}"
