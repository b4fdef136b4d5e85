"""``bind(check=True)``: the numbers that a call leaves behind, held against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Device, OperandRule, Runtime
from kernelseam.descriptors.attention_problem import AttentionProblem
from kernelseam.descriptors.gemm_problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.errors import WrongResult
from kernelseam.parity import check
from kernelseam.parity.run import flushes
from kernelseam.planning import Plan
from kernelseam.plugins import plugins

ORACLE_OPERATIONS = 2e9
"""How much the oracle computes; of a larger problem it computes some rows."""

ORACLE_ROWS = 20_000

Array = npt.NDArray[Any]


def sampled(operations_per_row: int) -> int:
    """How many rows the oracle may compute."""
    return int(min(max(ORACLE_OPERATIONS / max(operations_per_row, 1), 64), ORACLE_ROWS))


class Verification:
    """One run of a call: made before it, as it may read what it overwrites, and asked for a verdict after it.

    Both copy whole operands to the host, which waits for the device. Bounds are those of ``docs/accuracy.md`` for data
    of any mean. Operations without an oracle pass.
    """

    def __init__(self, plan: Plan, pointers: dict[str, int], runtime: Runtime) -> None:
        self._plan, self._memory = plan, _Memory(pointers, runtime, plan.device)
        p = plan.problem
        self._before = self._memory.gemm(p, "C") if isinstance(p, GemmProblem) and p.beta != 0 else None

    def require(self) -> None:
        """Raises WrongResult where a number is beyond its tolerance."""
        plan, problem = self._plan, self._plan.problem
        flushed = flushes(plugins().backend(plan.device.backend), plan.device)
        if isinstance(problem, GemmProblem):
            verdict = self._gemm(problem, flushed)
        elif isinstance(problem, AttentionProblem) and problem.spec.options <= {"causal"}:
            verdict = self._attention(problem, flushed)
        else:
            return
        if not verdict.passed:
            finding = f"{verdict.message}, the worst of {verdict.checked} elements"
            raise WrongResult(plan.implementation, str(plan.device), problem, finding)

    def _gemm(self, p: GemmProblem, flushed: bool) -> check.Verdict:
        a, b, c = (self._memory.gemm(p, name) for name in "ABC")
        return check.gemm(
            a, b, c, self._before, alpha=p.alpha, beta=p.beta, a_transposed=p.spec.a_transposed,
            b_transposed=p.spec.b_transposed, rows=sampled(4 * p.N * p.K), zero_mean=False, flushed=flushed,
        )

    def _attention(self, p: AttentionProblem, flushed: bool) -> check.Verdict:
        found = {rule.name: self._memory.strided(rule, p.batch) for rule in p.operands}
        return check.attention(
            found["q"], found["k"], found["v"], found["out"], found.get("lse"), causal=p.spec.causal, scale=p.scale,
            rows=sampled(4 * p.S_k * (p.spec.head_dim + p.spec.value_dim)), flushed=flushed,
        )


class _Memory:
    """The operands' memory on the host, as [batch, head, row, column]."""

    def __init__(self, pointers: dict[str, int], runtime: Runtime, device: Device) -> None:
        self._pointers, self._runtime, self._device = pointers, runtime, device

    def strided(self, rule: OperandRule, batch: int) -> Array:
        """An operand as its rule walks over it; of one that is never read, which may have no memory, zeros."""
        dtype = rule.dtype or DType.float64
        if not rule.span:
            return np.broadcast_to(np.zeros((), dtype.numpy), (batch, *rule.shape[1:]))
        return self._walk(self._pointers[rule.name], rule.shape, rule.strides, dtype)

    def gemm(self, p: GemmProblem, name: str) -> Array:
        """A, B or C, by strides or by its list."""
        heads = p.num_heads // p.b_head_group if name == "B" else p.num_heads
        rows, columns = {"A": p.a_shape, "B": p.b_shape, "C": (p.M, p.N)}[name]
        row = {"A": p.a_strides, "B": p.b_strides, "C": p.c_strides}[name][2]
        dtype = p.spec.dtype_c if name == "C" else p.spec.dtype
        rules = {rule.name: rule for rule in p.operands}
        if name in rules:
            return self.strided(rules[name], p.batch)
        shape = (p.batch, heads, rows, columns)
        if not rules[f"{name}_ptrs"].span:
            return np.broadcast_to(np.zeros((), dtype.numpy), shape)
        places = self._walk(self._pointers[f"{name}_ptrs"], (p.matrices,), (1,), DType.float64).view(np.uint64)
        return np.stack([self._walk(int(at), (rows, columns), (row, 1), dtype) for at in places]).reshape(shape)

    def _walk(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType) -> Array:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = self._runtime.read(pointer, span * dtype.itemsize, self._device).view(dtype.numpy)
        return np.lib.stride_tricks.as_strided(flat, shape, [s * dtype.itemsize for s in strides], writeable=False)
