"""Problems and specs: the hashable halves of descriptors. They hold no pointers and check nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from kernelseam.contract import OperandRule
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
        a = _distinct(self.batch, self.a_strides[0]) * _distinct(self.num_heads, self.a_strides[1]) * self.M * self.K
        heads = self.num_heads // self.b_head_group
        b = _distinct(self.batch, self.b_strides[0]) * _distinct(heads, self.b_strides[1]) * self.N * self.K
        if self.spec.view == "pointers":
            a, b = self.matrices * self.M * self.K, self.matrices * self.N * self.K
        c = self.matrices * self.M * self.N
        return (a + b) * size * int(self.reads_inputs) + c * c_size * (2 if self.beta else 1)

    @property
    def compute_dtype(self) -> DType:
        return self.spec.dtype

    def __str__(self) -> str:
        return f"{self.spec} batch={self.batch} heads={self.num_heads} {self.M}×{self.N}×{self.K}"


@dataclass(frozen=True)
class AttentionSpec:
    """What shapes the binary of an attention forward. ``vector``: as in GemmSpec, one for q, k, v and out."""

    dtype: DType
    head_dim: int
    value_dim: int
    causal: bool = False
    lse: bool = False
    vector: int = 16

    operation = "attention"

    @property
    def dims(self) -> str:
        """The head dims, those of values apart where they differ: "64" or "192/128"."""
        return f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"

    def __str__(self) -> str:
        return f"attention {self.dtype}{' causal' if self.causal else ''} dim={self.dims}"


@dataclass(frozen=True)
class AttentionProblem:
    """out = softmax(scale·q·kᵀ)·v with query head h on KV head h // (num_heads / kv_heads). Strides in elements.

    Causal, aligned at the bottom right: key j is visible to query i iff j ≤ i + (S_k − S_q).
    """

    spec: AttentionSpec
    batch: int
    num_heads: int
    kv_heads: int
    S_q: int
    S_k: int
    q_strides: tuple[int, int, int]
    """(batch, head, row); so for k, v and out."""
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int] = (0, 0)
    """(batch, head); rows are contiguous."""
    scale: float = 1.0

    operation = "attention"

    @property
    def head_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // max(self.kv_heads, 1)

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        s, f32 = self.spec, DType.float32
        b, h, g = self.batch, self.num_heads, self.kv_heads
        align = max(s.vector, s.dtype.itemsize)
        reads = int((b > 0 and h > 0 and self.S_q > 0 and s.value_dim > 0) or s.lse)
        rules = [
            OperandRule("q", s.dtype, (b * reads, h, self.S_q, s.head_dim), (*self.q_strides, 1), align),
            OperandRule("k", s.dtype, (b * reads, g, self.S_k, s.head_dim), (*self.k_strides, 1), align),
            OperandRule("v", s.dtype, (b * reads, g, self.S_k, s.value_dim), (*self.v_strides, 1), align),
            OperandRule("out", s.dtype, (b, h, self.S_q, s.value_dim), (*self.out_strides, 1), align, True),
        ]
        if s.lse:
            rules.append(OperandRule("lse", f32, (b, h, self.S_q), (*self.lse_strides, 1), 4, True))
        return tuple(rules)

    @property
    def visible(self) -> int:
        """Query-key pairs of one head that a causal mask leaves."""
        if not self.spec.causal:
            return self.S_q * self.S_k
        d = self.S_k - self.S_q
        first = max(0, -d)  # queries before it see nothing
        rows = self.S_q - first
        return rows * (first + d + 1) + rows * (rows - 1) // 2 if rows > 0 else 0

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.num_heads * self.visible * (self.spec.head_dim + self.spec.value_dim)

    @property
    def bytes_moved(self) -> int:
        s, b = self.spec, self.batch
        query = b * self.num_heads * self.S_q * (s.head_dim + s.value_dim)
        kv_b, kv_h = _distinct(b, self.k_strides[0]), _distinct(self.kv_heads, self.k_strides[1])
        lse = 4 * b * self.num_heads * self.S_q if s.lse else 0
        return (query + kv_b * kv_h * self.S_k * (s.head_dim + s.value_dim)) * s.dtype.itemsize + lse

    @property
    def compute_dtype(self) -> DType:
        return self.spec.dtype

    def __str__(self) -> str:
        s = self.spec
        heads = f"{self.num_heads}" if self.kv_heads == self.num_heads else f"{self.num_heads}/{self.kv_heads}"
        return (
            f"attention {s.dtype}{' causal' if s.causal else ''} batch={self.batch} heads={heads} "
            f"S_q={self.S_q} S_k={self.S_k} dim={s.dims}"
        )


def _distinct(extent: int, stride: int) -> int:
    """How many different matrices an axis walks over: one where its stride is 0."""
    return min(extent, 1) if stride == 0 else extent


def default_scale(head_dim: int) -> float:
    """1/√D_qk."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
