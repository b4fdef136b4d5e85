"""An attention's gradients on the host: the implementation, and its work shared out to threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts
from kernelseam.costs import roofline
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.reference.attention_block import in_place
from kernelseam.reference.attention_bwd_block import (
    QUERIES,
    BiasGradient,
    HeadGradients,
    scratch_sizes,
)
from kernelseam.reference.attention_scores import Array
from kernelseam.reference.attention_views import Views
from kernelseam.reference.scratch import carve, scratch_bytes, shaped

_SERIAL = 2e7  # operations below which starting a thread costs more than it gains
_MOST_THREADS = 16

Task = tuple[range, range]
"""(batch, KV heads) that one thread takes in turn."""

KNOWN = frozenset(
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
    }
)
"""Options of the forward's spec."""


class NumpyAttentionBwd:
    """Every dtype (16 bits computed in float32, float64 in float64), any sizes and strides; strided
    and packed rows. The same bits every time, on any number of threads."""

    name, backend, operation = "numpy", "numpy", "attention_bwd"

    def supports(self, problem: AttentionBwdProblem, device: Device) -> str | None:
        spec = problem.spec.forward
        if unknown := spec.options - KNOWN:
            return f"it does not know {', '.join(sorted(unknown))}"
        for name, view in (("q", spec.q_view), ("k and v", spec.kv_view)):
            if view not in ("strided", "packed"):
                return f"{name} are {view}: it takes strided and packed rows"
        return None

    def cost(self, problem: AttentionBwdProblem, device: Device) -> Cost:
        return roofline(problem, device.limits, 0.5)

    def build(self, problem: AttentionBwdProblem, device: Device) -> PlanParts:
        step = _BackwardStep(problem, device)
        return PlanParts((step,), step.shared_bytes + step.threads * step.bytes)


class _BackwardStep:
    """Each thread takes KV heads one after the other; those that add to the same of a bias's
    gradient are one task."""

    def __init__(self, problem: AttentionBwdProblem, device: Device) -> None:
        p, spec = problem.forward, problem.spec
        self.problem, self.dtype, self.keep = problem, p.spec.dtype.accumulator, in_place(p)
        shape = problem.dbias_shape if spec.bias_gradient else (p.batch, p.num_heads, p.S_q, p.S_k)
        self.whole = shape == (p.batch, p.num_heads, p.S_q, p.S_k)
        batches, heads = range(p.batch), range(p.kv_heads)
        self.tasks: list[Task] = list(
            itertools.product(
                [batches] if shape[0] < p.batch else [batches[b : b + 1] for b in batches],
                [heads] if shape[1] < p.num_heads else [heads[g : g + 1] for g in heads],
            )
        )
        threads = (
            min(device.limits.compute_units, _MOST_THREADS) if problem.operations > _SERIAL else 1
        )
        self.threads = max(min(threads, len(self.tasks)), 1)
        self.sizes = scratch_sizes(p, self.keep)
        self.bytes = scratch_bytes(self.sizes, self.dtype)
        # What several heads add up to in another dtype is added up apart, and so is what a sink
        # takes from each.
        apart = spec.bias_gradient and not self.whole and p.spec.bias is not self.dtype
        self.shared = (
            math.prod(shape) if apart else 0,
            p.batch * p.num_heads if spec.sink_gradient else 0,
        )
        self.shared_bytes = scratch_bytes(self.shared, self.dtype)
        blocks = -(-p.S_q // QUERIES)
        self.record = LaunchRecord(
            "numpy_attention_bwd", (blocks, p.num_heads, p.batch), (1, 1, 1), 0, device.arch
        )

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p, views = (
            self.problem.forward,
            Views(self.problem.forward, pointers, self.problem.operands),
        )
        apart, taken = carve(workspace, self.shared, self.dtype)
        first = workspace + self.shared_bytes
        pieces = [
            carve(first + i * self.bytes, self.sizes, self.dtype) for i in range(self.threads)
        ]
        dbias: Array | None = views.arrays.get("dbias")
        sums = dbias if dbias is None or not self.shared[0] else shaped(apart, *dbias.shape)
        of_sinks = shaped(taken, p.batch, p.num_heads) if self.shared[1] else None

        def work(scratch: list[Array], tasks: Iterator[Task]) -> None:
            head = HeadGradients(p, self.keep, scratch)
            with np.errstate(all="ignore"):
                for batches, heads in tasks:
                    for b, g in itertools.product(batches, heads):
                        self._head(head, views, b, g, sums, of_sinks)

        def launch(stream: int) -> None:
            for x in (sums, of_sinks):
                if x is not None:
                    x[...] = 0
            tasks = iter(self.tasks)
            if self.threads == 1:
                work(pieces[0], tasks)
            else:
                with ThreadPoolExecutor(self.threads) as pool:
                    for done in [pool.submit(work, scratch, tasks) for scratch in pieces]:
                        done.result()
            with np.errstate(all="ignore"):
                if sums is not dbias and dbias is not None:
                    dbias[...] = sums
                if "dsinks" in views.arrays:
                    views.arrays["dsinks"][...] = 0 if of_sinks is None else of_sinks.sum(axis=0)

        return launch

    def _head(
        self,
        head: HeadGradients,
        views: Views,
        b: int,
        g: int,
        sums: Array | None,
        of_sinks: Array | None,
    ) -> None:
        """One KV head of one entry of the batch."""
        p, own = self.problem.forward, views.sequence(b)
        head.load(views.keys("k", b, g, own), views.keys("v", b, g, own))
        for h in range(g * p.head_group, (g + 1) * p.head_group):
            scores, lse = views.scores(b, h, own), views.lse(b, h, own)
            assert lse is not None
            q, dout, out, dq = (views.queries(n, b, h, own) for n in ("q", "dout", "out", "dq"))
            dbias = (
                None
                if sums is None
                else BiasGradient(
                    sums[min(b, sums.shape[0] - 1), min(h, sums.shape[1] - 1)], self.whole
                )
            )
            for i in range(0, own.S_q, QUERIES):
                at = slice(i, i + QUERIES)
                taken = head.block(q[at], dout[at], out[at], lse[at], i, scores, dq[at], dbias)
                if of_sinks is not None:
                    of_sinks[b, h] += taken
        dk, dv = (
            views.keys(n, b, g, own)[0] if p.spec.kv_view == "packed" else views.arrays[n][b, g]
            for n in ("dk", "dv")
        )
        head.store(dk, dv)
