"""Attention forward on the host: the implementation, and its distribution over threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts
from kernelseam.costs import roofline
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.reference.attention_block import QUERIES, Head, in_place, scratch_sizes
from kernelseam.reference.attention_scores import Array
from kernelseam.reference.attention_views import Views
from kernelseam.reference.scratch import carve, scratch_bytes

_SERIAL = 2e7  # operations below which starting a thread costs more than it gains
_MOST_THREADS = 16

Task = tuple[int, int, int]
"""(batch, KV head, part of its queries)"""


SUPPORTED = frozenset(
    {
        "causal",
        "window",
        "prefix",
        "alibi",
        "softcap",
        "bias",
        "mask",
        "sinks",
        "q_view",
        "kv_view",
        "lengths",
        "dtype_out",
        "batch_invariant",
        "dtype_kv",
        "kv_scales",
        "dtype_q",
        "q_scales",
    }
)
"""Options of a spec. All rows are batch-invariant: a row's work depends on its own sequence
alone."""


class NumpyAttention:
    """Every dtype (8 and 16 bits computed in float32, float64 in float64), any sizes, strides and
    views."""

    name, backend, operation = "numpy", "numpy", "attention"

    def supports(self, problem: AttentionProblem, device: Device) -> str | None:
        if unknown := problem.spec.options - SUPPORTED:
            return f"it does not know {', '.join(sorted(unknown))}"
        return None

    def cost(self, problem: AttentionProblem, device: Device) -> Cost:
        return roofline(problem, device.limits, 0.5)

    def build(self, problem: AttentionProblem, device: Device) -> PlanParts:
        step = _AttentionStep(problem, device)
        return PlanParts((step,), step.threads * step.bytes)


class _AttentionStep:
    """Each thread computes one KV head after another, or interleaved blocks of their queries where
    heads are few."""

    def __init__(self, problem: AttentionProblem, device: Device) -> None:
        p = self.problem = problem
        self.dtype = p.spec.dtype.accumulator
        self.keep = in_place(p)
        blocks = -(-p.S_q // QUERIES)
        written = p.num_heads and p.S_q and (p.spec.value_dim or p.spec.lse)
        # operands may be missing where there is nothing to write
        self.batch = p.batch if written else 0
        heads = self.batch * p.kv_heads
        threads = min(device.limits.compute_units, _MOST_THREADS) if p.operations > _SERIAL else 1
        # two tasks per thread balance the load
        per_head = 1 if threads == 1 else -(-2 * threads // max(heads, 1))
        self.parts = min(per_head, blocks)
        self.threads = max(min(threads, heads * self.parts), 1)
        self.sizes = scratch_sizes(p, self.keep)
        self.bytes = scratch_bytes(self.sizes, self.dtype)
        self.record = LaunchRecord(
            "numpy_attention", (blocks, p.num_heads, p.batch), (1, 1, 1), 0, device.arch
        )

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p, views = self.problem, Views(self.problem, pointers)
        pieces = [
            carve(workspace + i * self.bytes, self.sizes, self.dtype) for i in range(self.threads)
        ]

        def work(scratch: list[Array], tasks: Iterator[Task]) -> None:
            head = Head(p, self.keep, scratch)
            with np.errstate(all="ignore"):
                for b, g, part in tasks:
                    own = views.sequence(b)
                    starts = range(part * QUERIES, own.S_q, self.parts * QUERIES)
                    if not starts:
                        continue
                    head.load(
                        views.keys("k", b, g, own),
                        views.keys("v", b, g, own),
                        *(views.key_scales(name, b, g, own) for name in "kv"),
                    )
                    for h in range(g * p.head_group, (g + 1) * p.head_group):
                        scores, lse = views.scores(b, h, own), views.lse(b, h, own)
                        q, out = views.queries("q", b, h, own), views.queries("out", b, h, own)
                        q_scales = views.query_scales(b, h, own)
                        for i in starts:
                            rows = slice(i, i + QUERIES)
                            head.block(
                                q[rows],
                                i,
                                scores,
                                out[rows],
                                None if lse is None else lse[rows],
                                None if q_scales is None else q_scales[rows],
                            )

        def launch(stream: int) -> None:
            tasks = itertools.product(range(self.batch), range(p.kv_heads), range(self.parts))
            if self.threads == 1:
                work(pieces[0], tasks)
                return
            with ThreadPoolExecutor(self.threads) as pool:
                for done in [pool.submit(work, scratch, tasks) for scratch in pieces]:
                    done.result()

        return launch
