"""``bind(check=True)`` of attentions and their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.descriptors.attention.merge_problem import MergeProblem
from kernelseam.descriptors.attention.options import ScoreNumbers, ScoreOperands
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.options import operands_of, scalars_of
from kernelseam.frozen import dataclass
from kernelseam.oracle import check, formulas, sampled_gradients
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Variant
from kernelseam.oracle.operands import Array, Operands
from kernelseam.oracle.sampled_gradients import Forward, Numbers, SampledGradient
from kernelseam.oracle.sampling import sampled
from kernelseam.oracle.scaled_rows import scaled_rows
from kernelseam.oracle.verifier import Verifier

WITHOUT_FUNCTIONS = (
    "the oracle calls a score_mod and a mask_mod themselves, and a plan has no functions"
)
MOST_OPERATIONS = 1e11
"""Limit for one element of dbias, which may be a sum over all axes: beyond it the oracle would take
minutes."""


@dataclass(frozen=True)
class _Memory:
    """An attention's operands in memory, and the queries and keys of each entry."""

    arrays: Mapping[str, Array]
    q_lengths: Sequence[int] | None
    k_lengths: Sequence[int] | None

    @classmethod
    def read(cls, p: AttentionProblem, arrays: Mapping[str, Array]) -> _Memory:
        q_lengths = np.diff(arrays["cu_seqlens_q"]).tolist() if p.spec.q_view == "packed" else None
        k_lengths = np.diff(arrays["cu_seqlens_k"]).tolist() if p.spec.kv_view == "packed" else None
        if p.spec.lengths:
            k_lengths = arrays["kv_lengths"].tolist()
        return cls(arrays, q_lengths, k_lengths)

    def rows(self, operands: Operands, p: AttentionProblem, name: str, like: str = "") -> Array:
        """An operand with rows, [batch, head, row, column]."""
        lengths = self.k_lengths if (like or name) in "kv" else self.q_lengths
        return operands.attention_rows(p, name, self.arrays, lengths, like)

    def variant(self, p: AttentionProblem) -> Variant:
        """The options of the attention beyond softmax(scale·q·kᵀ)·v."""
        s, x = p.spec, self.arrays
        operands = {n: x[n] for n in operands_of(ScoreOperands) if n in x}
        given: dict[str, Any] = {**operands, "kv_lengths": self.k_lengths}
        given |= {n: getattr(p, n) for n in scalars_of(ScoreNumbers) if getattr(s, n)}
        return Variant(
            window=(p.left, p.right) if s.window else (None, None),
            q_lengths=self.q_lengths,
            q_scales=self._query_scales(p),
            k_scales=self._scales(p, "k_scales"),
            v_scales=self._scales(p, "v_scales"),
            rounded_keys=p.spec.row_scale_block is not None,
            **given,
        )

    def _query_scales(self, p: AttentionProblem) -> Array | None:
        """The scale of every query, [batch, head, query]; those after an entry's length are 0."""
        if p.spec.q_scales is None:
            return None
        x = self.arrays["q_scales"]
        whole: Array = np.zeros((p.batch, p.num_heads, p.S_q), np.float32)
        if not p.q_scale_block:
            whole += np.repeat(x, p.head_group, axis=1)
            return whole
        for b in range(p.batch):
            n = p.S_q if self.q_lengths is None else self.q_lengths[b]
            packed = self.q_lengths is not None
            outer, first = (0, int(self.arrays["cu_seqlens_q"][b])) if packed else (b, 0)
            for i in range(n):
                whole[b, :, i] = x[outer, :, (first + i) // p.q_scale_block]
        return whole

    def _scales(self, p: AttentionProblem, name: str) -> Array | None:
        """The scale of every key, [batch, KV head, key]; those after an entry's length are 0."""
        if p.spec.kv_scales is None:
            return None
        x, whole = self.arrays[name], np.zeros((p.batch, p.kv_heads, p.S_k), np.float32)
        if not p.scale_block:
            return whole + x
        for b in range(p.batch):
            n = p.S_k if self.k_lengths is None else self.k_lengths[b]
            for j in range(n):
                outer, row = b, j
                if p.spec.kv_view == "paged":
                    outer, row = self.arrays["block_table"][b, j // p.page_size], j % p.page_size
                elif p.spec.kv_view == "packed":
                    outer, row = 0, self.arrays["cu_seqlens_k"][b] + j
                whole[b, :, j] = x[outer, :, row // p.scale_block]
        return whole


class AttentionVerifier(Verifier[AttentionProblem]):
    """Of large results some rows."""

    def refuse(self, problem: AttentionProblem) -> str | None:
        if problem.spec.expression is None:
            return None
        return WITHOUT_FUNCTIONS

    def verdict(
        self, problem: AttentionProblem, operands: Operands, kept: dict[str, Array], flushed: bool
    ) -> Verdict:
        p, s = problem, problem.spec
        memory = _Memory.read(
            p, {r.name: operands.strided(r, p.batch) for r in p.operands if r.dtype is not None}
        )
        rows = {name: memory.rows(operands, p, name) for name in ("q", "k", "v", "out")}
        if s.row_scale_block:
            rows["k"], rows["v"] = scaled_rows(rows["k"], s.value_dim, s.row_scale_block)
        return check.attention(
            **rows,
            lse=memory.rows(operands, p, "lse") if s.lse else None,
            causal=s.causal,
            scale=p.scale,
            rows=sampled(4 * p.S_k * (s.head_dim + s.value_dim)),
            flushed=flushed,
            variant=memory.variant(p),
            precision=s.precision,
        )


class AttentionBwdVerifier(Verifier[AttentionBwdProblem]):
    """Of large gradients some rows, of dbias some columns too; all of dsinks. Computed from the
    given out and lse."""

    def refuse(self, problem: AttentionBwdProblem) -> str | None:
        if problem.spec.forward.expression is not None:
            return WITHOUT_FUNCTIONS
        if not problem.spec.bias_gradient:
            return None
        needed = _per_pair(problem) * _pairs_of_one(problem)
        if needed <= MOST_OPERATIONS:
            return None
        return (
            f"one element of dbias takes {needed:.1e} operations, and the oracle does up to "
            f"{MOST_OPERATIONS:.0e}"
        )

    def verdict(
        self,
        problem: AttentionBwdProblem,
        operands: Operands,
        kept: dict[str, Array],
        flushed: bool,
    ) -> Verdict:
        p = problem.forward
        arrays = {r.name: operands.strided(r, _outer(r.name, r.shape, p)) for r in problem.operands}
        memory = _Memory.read(p, arrays)
        x = Forward(
            **{name: memory.rows(operands, p, name) for name in ("q", "k", "v", "out", "lse")},
            dout=memory.rows(operands, p, "dout", "out"),
            causal=p.spec.causal,
            scale=p.scale,
            variant=memory.variant(p),
        )
        per_pair = _per_pair(problem)

        def sample(total: int, pairs: int) -> Numbers:
            numbers = formulas.sample_rows(total, sampled(per_pair * pairs))
            return np.arange(total) if numbers is None else numbers

        results = {f"d{n}": memory.rows(operands, p, f"d{n}", n) for n in ("q", "k", "v")}
        results |= {n: arrays[n] for n in ("dbias", "dsinks") if n in arrays}
        with np.errstate(all="ignore"):
            dk, dv = sampled_gradients.of_keys(x, sample)
            expected = {"dq": sampled_gradients.of_queries(x, sample), "dk": dk, "dv": dv}
            if "dbias" in results:
                expected["dbias"] = _dbias(problem, x)
            if "dsinks" in results:
                expected["dsinks"] = sampled_gradients.of_sinks(x)
        return check.sampled_gradients(
            expected, p.spec.dtype, results, flushed=flushed, precision=p.spec.precision
        )


def _outer(name: str, shape: tuple[int, ...], p: AttentionProblem) -> int:
    """The first extent of an operand that has no elements."""
    return shape[0] if name in ("dbias", "dsinks", "sinks") else p.batch


def _per_pair(problem: AttentionBwdProblem) -> int:
    """Operations of the oracle for one query and one key: products, their magnitudes, five sums."""
    s = problem.forward.spec
    return 12 * (s.head_dim + s.value_dim)


def _pairs_of_one(problem: AttentionBwdProblem) -> int:
    """Pairs of a query and a key that one element of dbias sums."""
    p = problem.forward
    whole = (p.batch, p.num_heads, p.S_q, p.S_k)
    return math.prod(n for n, m in zip(whole, problem.dbias_shape, strict=True) if m == 1)


def _dbias(problem: AttentionBwdProblem, x: Forward) -> SampledGradient:
    """As many rows and, where rows are long, as many columns as the oracle may compute."""
    shape, of_one = problem.dbias_shape, _per_pair(problem) * _pairs_of_one(problem)
    rows = formulas.sample_rows(math.prod(shape[:3]), sampled(of_one * shape[3]))
    rows = np.arange(math.prod(shape[:3])) if rows is None else rows
    columns = formulas.sample_rows(shape[3], sampled(of_one * len(rows)))
    columns = np.arange(shape[3]) if columns is None else columns
    return sampled_gradients.of_bias(x, shape, rows, columns)


class MergeVerifier(Verifier[MergeProblem]):
    """All that ``MergeStates`` describes."""

    def refuse(self, problem: MergeProblem) -> str | None:
        # A step of an attention with split keys, whose problem does not name lists and offsets.
        if problem.spec.pointers or problem.spec.packed:
            return "a merge into lists or packed rows is verified as part of its attention alone"
        return None

    def verdict(
        self, problem: MergeProblem, operands: Operands, kept: dict[str, Array], flushed: bool
    ) -> check.Verdict:
        x = {r.name: operands.strided(r, r.shape[0]) for r in problem.operands}
        return check.merge_states(**x, flushed=flushed)
