"""``bind(check=True)``: the numbers that a call leaves behind, held against the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Device, OperandRule, Runtime
from kernelseam.descriptors.attention.merge_problem import MergeProblem
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.errors import WrongResult
from kernelseam.parity import check
from kernelseam.parity.oracle import Variant
from kernelseam.parity.run import flushes
from kernelseam.planning import Plan
from kernelseam.plugins import plugins
from kernelseam.verification_projection import Projection, projection

ORACLE_OPERATIONS = 2e9
"""How much the oracle computes; of a larger problem it computes some rows."""

ORACLE_ROWS = 20_000

Array = npt.NDArray[Any]


def sampled(operations_per_row: int) -> int:
    """How many rows the oracle may compute."""
    return int(min(max(ORACLE_OPERATIONS / max(operations_per_row, 1), 64), ORACLE_ROWS))


class Verification:
    """One run of a call: made before it, as it may read what it overwrites, and asked for a verdict
    after it.

    Both copy whole operands to the host, which waits for the device. Bounds are those of
    ``docs/accuracy.md`` for data of any mean. What is not held against an oracle passes: packed
    merges and those over lists, and an attention's gradients, whose oracle makes the result and LSE
    that it starts from by itself.
    """

    def __init__(self, plan: Plan, pointers: dict[str, int], runtime: Runtime) -> None:
        self._plan, self._memory = plan, _Memory(pointers, runtime, plan.device)
        p = plan.problem
        self._before: dict[str, Array] = {}
        if isinstance(p, GemmProblem):  # the residual may be C
            kept = (("C", p.beta != 0), ("residual", p.spec.residual is not None))
            self._before = {name: self._memory.gemm(p, name) for name, read in kept if read}
        elif isinstance(p, Projection):
            self._before = {
                r.name: self._memory.strided(r, p.batch) for r in p.operands if r.may_be
            }

    def require(self) -> None:
        """Raises WrongResult where a number is beyond its tolerance."""
        plan, problem = self._plan, self._plan.problem
        flushed = flushes(plugins().backend(plan.device.backend), plan.device)
        if isinstance(problem, GemmProblem):
            verdict = self._gemm(problem, flushed)
        elif not any(rule.written and rule.span for rule in problem.operands):
            return
        elif isinstance(problem, AttentionProblem):
            verdict = self._attention(problem, flushed)
        elif isinstance(problem, MergeProblem) and not (
            problem.spec.pointers or problem.spec.packed
        ):
            found = {
                rule.name: self._memory.strided(rule, problem.batch) for rule in problem.operands
            }
            verdict = check.merge_states(**found, flushed=flushed)
        elif isinstance(problem, Projection):
            found = {
                rule.name: self._memory.strided(rule, 1 if rule.name == "weight" else problem.batch)
                for rule in problem.operands
            }
            verdict = projection(problem, {**found, **self._before}, sampled, flushed)
        else:
            return
        if not verdict.passed:
            finding = f"{verdict.message}, the worst of {verdict.checked} elements"
            raise WrongResult(plan.implementation, str(plan.device), problem, finding)

    def _gemm(self, p: GemmProblem, flushed: bool) -> check.Verdict:
        a, b, c = (self._memory.gemm(p, name) for name in "ABC")
        return check.gemm(
            a,
            b,
            c,
            self._before.get("C"),
            alpha=p.alpha,
            beta=p.beta,
            a_transposed=p.spec.a_transposed,
            b_transposed=p.spec.b_transposed,
            bias=self._memory.gemm(p, "bias") if p.spec.bias else None,
            residual=self._before.get("residual"),
            batch_group=p.c_batch_group,
            head_group=p.c_head_group,
            rows=sampled(4 * p.N * p.K * p.summed),
            zero_mean=False,
            flushed=flushed,
            precision=p.spec.precision,
        )

    def _attention(self, p: AttentionProblem, flushed: bool) -> check.Verdict:
        s, found = (
            p.spec,
            {r.name: self._memory.strided(r, p.batch) for r in p.operands if r.dtype is not None},
        )
        q_lengths = np.diff(found["cu_seqlens_q"]).tolist() if s.q_view == "packed" else None
        k_lengths = np.diff(found["cu_seqlens_k"]).tolist() if s.kv_view == "packed" else None
        if s.lengths:
            k_lengths = found["kv_lengths"].tolist()
        rows = {
            name: self._memory.attention_rows(p, name, found, q_lengths) for name in ("q", "out")
        }
        rows |= {
            name: self._memory.attention_rows(p, name, found, k_lengths) for name in ("k", "v")
        }
        lse = self._memory.attention_rows(p, "lse", found, q_lengths) if s.lse else None
        variant = Variant(
            (p.left, p.right) if s.window else (None, None),
            found["prefix_lengths"].tolist() if s.prefix else None,
            p.softcap if s.softcap else None,
            found.get("alibi_slopes"),
            found.get("bias"),
            found.get("mask"),
            found.get("sinks"),
            q_lengths,
            k_lengths,
        )
        return check.attention(
            **rows,
            lse=lse,
            causal=s.causal,
            scale=p.scale,
            rows=sampled(4 * p.S_k * (s.head_dim + s.value_dim)),
            flushed=flushed,
            variant=variant,
        )


class _Memory:
    """The operands' memory on the host, as [batch, head, row, column]."""

    def __init__(self, pointers: dict[str, int], runtime: Runtime, device: Device) -> None:
        self._pointers, self._runtime, self._device = pointers, runtime, device

    def strided(self, rule: OperandRule, batch: int) -> Array:
        """An operand as its rule walks over it; of one that is never read, which may have no
        memory, zeros."""
        dtype = rule.dtype or DType.float64
        if not rule.span:
            return np.broadcast_to(np.zeros((), dtype.numpy), (batch, *rule.shape[1:]))
        return self._walk(self._pointers[rule.name], rule.shape, rule.strides, dtype)

    def gemm(self, p: GemmProblem, name: str) -> Array:
        """One of its operands, by strides or by its list; a bias as [batch, head, column]."""
        spec, c = p.spec, (p.M, p.N)
        lead = (
            (p.batch, p.num_heads)
            if name in "AB"
            else (p.batch // p.c_batch_group, p.num_heads // p.c_head_group)
        )
        known: dict[str, tuple[DType | None, tuple[int, ...], int]] = {
            "A": (spec.dtype, p.a_shape, p.a_strides[2]),
            "B": (spec.dtype, p.b_shape, p.b_strides[2]),
            "C": (spec.dtype_c, c, p.c_strides[2]),
            "residual": (spec.residual, c, p.residual_strides[2]),
            "bias": (spec.bias, (p.N,), 0),
        }
        dtype, shape, row = known[name]
        assert dtype is not None
        rules = {rule.name: rule for rule in p.operands}
        if name in rules:
            return self.strided(rules[name], lead[0])
        if not (rule := rules[f"{name}_ptrs"]).span:
            return np.broadcast_to(np.zeros((), dtype.numpy), (*lead, *shape))
        places = self._walk(self._pointers[rule.name], rule.shape, (1,), DType.float64).view(
            np.uint64
        )
        strides = (row, 1)[-len(shape) :]
        return np.stack([self._walk(int(at), shape, strides, dtype) for at in places]).reshape(
            *lead, *shape
        )

    def attention_rows(
        self,
        p: AttentionProblem,
        name: str,
        found: Mapping[str, Array],
        lengths: Sequence[int] | None,
    ) -> Array:
        """q, k, v or out as [batch, head, row, column], or lse without columns, whatever view it is
        given by. Rows that an entry does not have are 0."""
        of_keys = name in "kv"
        view, most = (p.spec.kv_view, p.S_k) if of_keys else (p.spec.q_view, p.S_q)
        if view == "strided" or (view == "pointers" and name == "lse"):
            return found[name]
        heads = p.kv_heads if of_keys else p.num_heads
        dtype = p.spec.out if name == "out" else p.spec.dtype_lse if name == "lse" else p.spec.dtype
        width = p.spec.head_dim if name in "qk" else p.spec.value_dim
        whole = np.zeros((p.batch, heads, most, width)[: 3 if name == "lse" else 4], dtype.numpy)
        rules = {rule.name: rule for rule in p.operands}
        for b in range(p.batch):
            n = most if lengths is None else lengths[b]
            if view == "packed":
                first = int(found["cu_seqlens_k" if of_keys else "cu_seqlens_q"][b])
                whole[b, :, :n] = found[name][0, :, first : first + n]
            elif view == "paged":
                for j in range(0, n, p.page_size):
                    stop, page = min(j + p.page_size, n), found["block_table"][b, j // p.page_size]
                    whole[b, :, j:stop] = found[name][page][:, : stop - j]
            else:
                listed = self._walk(
                    self._pointers[f"{name}_ptrs"], rules[f"{name}_ptrs"].shape, (1,), DType.float64
                )
                row = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides, "out": p.out_strides}[
                    name
                ][2]
                for h in range(heads if n else 0):
                    at = int(listed.view(np.uint64)[b * heads + h])
                    whole[b, h, :n] = self._walk(at, (n, width), (row, 1), dtype)
        return whole

    def _walk(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType
    ) -> Array:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = self._runtime.read(pointer, span * dtype.itemsize, self._device).view(dtype.numpy)
        return np.lib.stride_tricks.as_strided(
            flat, shape, [s * dtype.itemsize for s in strides], writeable=False
        )
