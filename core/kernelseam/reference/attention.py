"""Attention forward on the host: the implementation, and its work shared out to threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts, host_array
from kernelseam.descriptors.attention_problem import AttentionProblem
from kernelseam.dispatch import roofline
from kernelseam.reference.attention_block import QUERIES, Array, Head, scratch_sizes
from kernelseam.reference.scratch import carve, scratch_bytes

_SERIAL = 2e7  # operations below which starting a thread costs more than it gains
_MOST_THREADS = 16

Task = tuple[int, int, int]
"""(batch, KV head, part of its queries)"""


class NumpyAttention:
    """Every dtype (16 bits computed in float32, float64 in float64), any sizes and strides."""

    name, backend, operation = "numpy", "numpy", "attention"

    def supports(self, problem: AttentionProblem, device: Device) -> str | None:
        return None

    def cost(self, problem: AttentionProblem, device: Device) -> Cost:
        return roofline(problem, device.limits, 0.5)

    def build(self, problem: AttentionProblem, device: Device) -> PlanParts:
        step = _AttentionStep(problem, device)
        return PlanParts((step,), step.threads * step.bytes)


class _AttentionStep:
    """Each thread takes KV heads one after the other, or interleaved blocks of their queries where heads are few."""

    def __init__(self, problem: AttentionProblem, device: Device) -> None:
        p = self.problem = problem
        self.dtype = p.spec.dtype.accumulator
        self.keep = tuple(
            # Whether BLAS can walk the operand where it lies: else it is copied, one head at a time.
            p.spec.dtype is self.dtype and strides[2] >= columns
            for strides, columns in ((p.k_strides, p.spec.head_dim), (p.v_strides, p.spec.value_dim))
        )
        # Queries before ``first`` see no key.
        self.first = p.S_q if p.S_k == 0 else min(p.S_q, max(0, p.S_q - p.S_k)) if p.spec.causal else 0
        blocks = -(-(p.S_q - self.first) // QUERIES)
        heads = p.batch * p.kv_heads
        threads = min(device.limits.compute_units, _MOST_THREADS) if p.operations > _SERIAL else 1
        wanted = 1 if threads == 1 else -(-2 * threads // max(heads, 1))  # two tasks a thread even out the end
        self.parts = min(wanted, blocks)
        self.threads = max(min(threads, heads * self.parts), 1)
        self.sizes = scratch_sizes(p, self.keep)
        self.bytes = scratch_bytes(self.sizes, self.dtype)
        self.record = LaunchRecord("numpy_attention", (blocks, p.num_heads, p.batch), (1, 1, 1), 0, device.arch)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p = self.problem
        q, k, v, out, *rest = (
            host_array(pointers.get(r.name, 0), r.shape, r.strides, r.dtype or self.dtype) for r in p.operands
        )
        lse = rest[0] if rest else None
        pieces = [carve(workspace + i * self.bytes, self.sizes, self.dtype) for i in range(self.threads)]

        def work(scratch: list[Array], tasks: Iterator[Task]) -> None:
            head = Head(p, self.keep, scratch)
            with np.errstate(all="ignore"):
                for b, g, part in tasks:
                    head.load(k[b, g], v[b, g])
                    for h in range(g * p.head_group, (g + 1) * p.head_group):
                        for i in range(self.first + part * QUERIES, p.S_q, self.parts * QUERIES):
                            rows = slice(i, i + QUERIES)
                            head.block(q[b, h, rows], i, out[b, h, rows], None if lse is None else lse[b, h, rows])

        def launch(stream: int) -> None:
            out[:, :, : self.first] = 0
            if lse is not None:
                lse[:, :, : self.first] = -np.inf
            # ``k`` has no batch where no result reads it.
            tasks = itertools.product(range(len(k)), range(p.kv_heads), range(self.parts))
            if self.threads == 1:
                work(pieces[0], tasks)
                return
            with ThreadPoolExecutor(self.threads) as pool:
                for done in [pool.submit(work, scratch, tasks) for scratch in pieces]:
                    done.result()

        return launch
