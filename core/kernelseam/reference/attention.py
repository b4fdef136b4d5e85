"""Attention forward on the host: blocks of queries against blocks of keys, BLAS for both products.

Online softmax in base 2: with s = log2(e)·scale·q·k, the running maximum m, sum l and product of a row take each
block of keys in turn, so that memory does not grow with S_q·S_k. Scores lie keys-first, [keys, queries], because
reductions over keys then run along memory for all queries at once, and BLAS is fastest that way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts, host_array
from kernelseam.descriptors.problems import AttentionProblem
from kernelseam.dispatch import roofline
from kernelseam.dtypes import DType
from kernelseam.reference.scratch import carve, scratch_bytes, shaped

_QUERIES, _KEYS = 256, 2048  # 2 MiB of float32 scores: the fastest of 64…512 × 512…2048 on a core with 1 MiB of L2

Array = npt.NDArray[Any]


class NumpyAttention:
    """Every dtype (16 bits computed in float32, float64 in float64), any sizes and strides."""

    name, backend, operation = "numpy", "numpy", "attention"

    def supports(self, problem: AttentionProblem, device: Device) -> str | None:
        return None

    def cost(self, problem: AttentionProblem, device: Device) -> Cost:
        return roofline(problem, device.limits, 0.5)

    def build(self, problem: AttentionProblem, device: Device) -> PlanParts:
        step = _AttentionStep(problem, device)
        return PlanParts((step,), scratch_bytes(step.sizes, step.dtype))


class _AttentionStep:
    def __init__(self, problem: AttentionProblem, device: Device) -> None:
        p = self.problem = problem
        spec = p.spec
        self.dtype = spec.dtype.accumulator
        queries, keys = min(p.S_q, _QUERIES), min(p.S_k, _KEYS)
        self.keep_k, self.keep_v = self._blas(p.k_strides, spec.head_dim), self._blas(p.v_strides, spec.value_dim)
        self.sizes = (
            keys * queries, queries * spec.head_dim, queries * spec.value_dim, queries * spec.value_dim,
            0 if self.keep_k else p.S_k * spec.head_dim, 0 if self.keep_v else p.S_k * spec.value_dim,
        )
        blocks = -(-p.S_q // _QUERIES)
        self.record = LaunchRecord("numpy_attention", (blocks, p.num_heads, p.batch), (1, 1, 1), 0, device.arch)

    def _blas(self, strides: tuple[int, int, int], columns: int) -> bool:
        """Whether BLAS can walk an operand where it lies: else it is copied, one head at a time."""
        return self.problem.spec.dtype is self.dtype and strides[2] >= columns

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p = self.problem
        views = {
            rule.name: host_array(pointers.get(rule.name, 0), rule.shape, rule.strides, rule.dtype or self.dtype)
            for rule in p.operands
        }
        scratch = carve(workspace, self.sizes, self.dtype)
        heads = _Heads(p, self.dtype, views["out"], views.get("lse"), scratch)
        first = p.S_q if p.S_k == 0 else min(p.S_q, max(0, p.S_q - p.S_k)) if p.spec.causal else 0
        q, k, v = views["q"], views["k"], views["v"]

        def launch(stream: int) -> None:
            with np.errstate(all="ignore"):
                heads.clear(first)
                for b, g in np.ndindex(q.shape[0] and p.batch, p.kv_heads):
                    heads.load(k[b, g], v[b, g], self.keep_k, self.keep_v)
                    for h in range(g * p.head_group, (g + 1) * p.head_group):
                        for i in range(first, p.S_q, _QUERIES):
                            heads.block(q[b, h, i : i + _QUERIES], b, h, i)

        return launch


class _Heads:
    """The state of one launch: the keys and values of one head, and the scratch of one block of queries."""

    def __init__(self, p: AttentionProblem, dtype: DType, out: Array, lse: Array | None, scratch: list[Array]) -> None:
        self.out, self.lse, self.scratch = out, lse, scratch
        self.dtype = np.dtype(dtype.numpy)
        self.factor = p.scale * math.log2(math.e)
        self.causal, self.S_k = p.spec.causal, p.S_k
        self.offset = p.S_k - p.S_q  # query i sees keys j ≤ i + offset

    def clear(self, first: int) -> None:
        """Queries before ``first`` see no key."""
        self.out[:, :, :first] = 0
        if self.lse is not None:
            self.lse[:, :, :first] = -np.inf

    def load(self, k: Array, v: Array, keep_k: bool, keep_v: bool) -> None:
        self.k, self.v = k, v
        if not keep_k:
            self.k = shaped(self.scratch[4], *k.shape)
            np.copyto(self.k, k)
        if not keep_v:
            self.v = shaped(self.scratch[5], *v.shape)
            np.copyto(self.v, v)
        # A hidden value has weight 0, but 0·NaN is NaN: one sum tells whether that can happen at all.
        self.finite = not self.causal or bool(np.isfinite(self.v.sum()))

    def block(self, q: Array, b: int, h: int, i: int) -> None:
        """Attention of a block of queries, the first of which is query ``i``."""
        n = len(q)
        x, acc, product = (shaped(s, n, w) for s, w in zip(
            self.scratch[1:4], (self.k.shape[1], self.v.shape[1], self.v.shape[1]), strict=True
        ))
        np.multiply(q, self.factor, out=x, dtype=self.dtype)
        acc[...] = 0
        total = np.zeros(n, self.dtype)
        top = np.full(n, -np.inf, self.dtype)
        end = min(self.S_k, i + n + self.offset) if self.causal else self.S_k
        clear = i + self.offset + 1 if self.causal else end  # keys before it are seen by all n queries
        for j in range(0, end, _KEYS):
            stop = min(j + _KEYS, end)
            s = shaped(self.scratch[0], stop - j, n)
            np.matmul(self.k[j:stop], x.T, out=s)
            seen = min(max(clear - j, 0), len(s))
            if seen < len(s):
                hidden = np.arange(j + seen, stop)[:, None] > np.arange(i, i + n) + self.offset
                np.copyto(s[seen:], -np.inf, where=hidden)
            before, top = top, np.maximum(top, s.max(axis=0))
            shift = np.where(top == -np.inf, self.dtype.type(0), top)
            np.subtract(s, shift, out=s)
            np.exp2(s, out=s)
            rescale = np.exp2(before - shift)
            total = total * rescale + s.sum(axis=0)
            self._weigh(s, j, seen, i, product)
            acc *= rescale[:, None]
            acc += product
        acc /= total[:, None]
        acc[np.isneginf(top)] = 0  # no score but −inf
        self.out[b, h, i : i + n] = acc
        if self.lse is not None:
            self.lse[b, h, i : i + n] = (np.log2(total, dtype=np.float64) + top) * math.log(2)

    def _weigh(self, p: Array, j: int, seen: int, i: int, product: Array) -> None:
        """product = pᵀ·v, each query over the keys it sees where a hidden value is not finite."""
        v = self.v[j : j + len(p)]
        if self.finite or seen == len(p):
            np.matmul(p.T, v, out=product)
            return
        np.matmul(p[:seen].T, v[:seen], out=product)
        for row in range(p.shape[1]):
            mine = i + row + self.offset + 1 - j
            if mine > seen:
                product[row] += p[seen:mine, row] @ v[seen:mine]
