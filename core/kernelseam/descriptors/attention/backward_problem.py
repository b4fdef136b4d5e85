"""The problem and spec of an attention's gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernelseam.contract import OperandRule
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

"""Operands of the forward that the gradients read, its results among them."""


@dataclass(frozen=True)
class AttentionBwdSpec:
    """What shapes the binaries: the forward's spec (with its LSE), and which gradients there are
    beside dq, dk, dv."""

    forward: AttentionSpec
    bias_gradient: bool = False
    sink_gradient: bool = False
    deterministic: bool = True
    score_gradient: bool = False
    """Whether the gradient by each score is written: by what a score_mod returned."""

    operation = "attention_bwd"

    @property
    def dtype(self) -> DType:
        return self.forward.dtype


@dataclass(frozen=True)
class AttentionBwdProblem:
    """Gradients of an attention by q, k, v (and bias and sinks), given that by its result. Strides
    as the forward's."""

    spec: AttentionBwdSpec
    forward: AttentionProblem
    dout_strides: tuple[int, int, int]
    dq_strides: tuple[int, int, int]
    dk_strides: tuple[int, int, int]
    dv_strides: tuple[int, int, int]
    dbias_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    """0 where the gradient is summed over an axis along which the bias repeats."""

    operation = "attention_bwd"

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        return tuple(self._operands())

    def _operands(self) -> Iterator[OperandRule]:
        p, rules = self.forward, {r.name: r for r in self.forward.operands}

        def like(name: str, model: str, strides: tuple[int, ...], written: bool) -> OperandRule:
            r = rules[model]
            shape = r.shape
            if model in ("k", "v") and written:  # written whatever is read
                outer = {"packed": int(p.batch > 0)}.get(p.spec.kv_view, p.batch)
                shape = (outer, *r.shape[1:])
            if model == "q" and written:
                shape = (int(p.batch > 0) if p.spec.q_view == "packed" else p.batch, *r.shape[1:])
            return OperandRule(name, r.dtype, shape, (*strides, 1), r.alignment, written)

        for name, rule in rules.items():
            yield OperandRule(name, rule.dtype, rule.shape, rule.strides, rule.alignment)
        yield like("dout", "out", self.dout_strides, False)
        yield like("dq", "q", self.dq_strides, True)
        yield like("dk", "k", self.dk_strides, True)
        yield like("dv", "v", self.dv_strides, True)
        if self.spec.bias_gradient and p.spec.bias:
            yield OperandRule(
                "dbias",
                p.spec.bias,
                self.dbias_shape,
                self.dbias_strides,
                p.spec.bias.itemsize,
                True,
            )
        if self.spec.score_gradient:
            plane = (p.batch, p.num_heads, p.S_q, p.S_k)
            strides = tuple(math.prod(plane[i + 1 :]) for i in range(4))
            kind = p.spec.dtype.accumulator
            yield OperandRule("dscores", kind, plane, strides, kind.itemsize, True)
        if self.spec.sink_gradient:
            yield OperandRule("dsinks", DType.float32, (p.num_heads,), (1,), 4, True)

    @property
    def dbias_shape(self) -> tuple[int, int, int, int]:
        """Of the bias as it lies in memory: 1 along an axis where it repeats, also where that is
        empty."""
        p = self.forward
        b, h, i, j = (
            1 if s == 0 else n
            for n, s in zip((p.batch, p.num_heads, p.S_q, p.S_k), p.bias_strides, strict=True)
        )
        return b, h, i, j

    @property
    def operations(self) -> int:
        """Five products where the forward has two."""
        p, s = self.forward, self.forward.spec
        return 2 * p.batch * p.num_heads * p.visible * (3 * s.head_dim + 2 * s.value_dim)

    @cached_property
    def bytes_moved(self) -> int:
        p = self.forward
        rows = {r.name: r for r in self.operands}

        def size(name: str) -> int:
            r = rows[name]
            n = r.dtype.itemsize if r.dtype else 8
            for extent, stride in zip(r.shape, r.strides, strict=True):
                n *= min(extent, 1) if stride == 0 else extent
            return n

        # Σ dout·out, written and read
        delta = p.batch * p.num_heads * p.S_q * p.spec.dtype.accumulator.itemsize
        return sum(size(r.name) for r in self.operands) + 2 * delta

    @property
    def compute_dtype(self) -> DType:
        return self.forward.spec.dtype

    def __str__(self) -> str:
        return str(self.forward).replace("attention", "attention_bwd", 1)
