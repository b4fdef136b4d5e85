"""An attention's gradients on the host: the implementation, and its distribution over threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from kernelseam.contract import Device, PlanParts
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.descriptors.attention.options import ANY_VIEW, SpecOption
from kernelseam.reference.attention_bwd_block import (
    BLOCK,
    BiasGradient,
    HeadGradients,
    scratch_sizes,
)
from kernelseam.reference.attention_scores import SCORE_OPTIONS, Array
from kernelseam.reference.attention_tiling import slices, tiling
from kernelseam.reference.attention_views import Stack, Views
from kernelseam.reference.implementation import NumpyImplementation, recorded
from kernelseam.reference.scratch import carve, scratch_bytes, shaped
from kernelseam.reference.threads import share, threads_for

Task = tuple[slice, slice]
"""(entries, KV heads) that one thread takes in turn."""

SUPPORTED = (
    SCORE_OPTIONS
    | ANY_VIEW
    | SpecOption.dtype_out
    | SpecOption.batch_invariant
    | SpecOption.expression
    | SpecOption.precision
)
"""Options of the forward's spec."""


class NumpyAttentionBwd(NumpyImplementation[AttentionBwdProblem]):
    """Every dtype (16 bits computed in float32, float64 in float64), any sizes and strides; strided
    and packed rows. The same bits every time, on any number of threads."""

    operation = "attention_bwd"

    def supports(self, problem: AttentionBwdProblem, device: Device) -> str | None:
        spec = problem.spec.forward
        if reason := spec.refused_by(SUPPORTED):
            return reason
        for name, view in (("q", spec.q_view), ("k and v", spec.kv_view)):
            if view not in ("strided", "packed"):
                return f"{name} are {view}: it takes strided and packed rows"
        return None

    def build(self, problem: AttentionBwdProblem, device: Device) -> PlanParts:
        step = _BackwardStep(problem, device)
        return PlanParts((step,), step.shared_bytes + step.threads * step.bytes)


class _BackwardStep:
    """Threads take one stack of KV heads after another; stacks that add to the same elements of
    dbias are one task."""

    def __init__(self, problem: AttentionBwdProblem, device: Device) -> None:
        p, spec = problem.forward, problem.spec
        self.problem, self.dtype = problem, p.spec.dtype.accumulator
        shape = problem.dbias_shape if spec.bias_gradient else (p.batch, p.num_heads, p.S_q, p.S_k)
        self.whole = shape == (p.batch, p.num_heads, p.S_q, p.S_k)
        threads = threads_for(problem.operations, device)
        copied = p.S_k * max(p.spec.head_dim, p.spec.value_dim)
        t = tiling(p, BLOCK, copied, threads)
        # a sum of several heads' gradients has one order, whatever a stack has room for
        self.tiling = t = t if self.whole else replace(t, batch=1, kv_heads=1)
        batches = [slice(0, p.batch)] if shape[0] < p.batch else slices(p.batch, t.batch)
        heads = [slice(0, p.kv_heads)] if shape[1] < p.num_heads else slices(p.kv_heads, t.kv_heads)
        self.tasks: list[Task] = list(itertools.product(batches, heads))
        self.threads = max(min(threads, len(self.tasks)), 1)
        self.sizes = scratch_sizes(p, t)
        self.bytes = scratch_bytes(self.sizes, self.dtype)
        # Sums over heads that are stored in another dtype are accumulated in the workspace; so are
        # the sinks' gradients of each head.
        apart = spec.bias_gradient and not self.whole and p.spec.bias is not self.dtype
        self.shared = (
            math.prod(shape) if apart else 0,
            p.batch * p.num_heads if spec.sink_gradient else 0,
        )
        self.shared_bytes = scratch_bytes(self.shared, self.dtype)
        blocks = len(list(t.blocks(p.head_group, p.S_q)))
        self.record = recorded("attention_bwd", device, (blocks, p.num_heads, p.batch))

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p, views = (
            self.problem.forward,
            Views(self.problem.forward, pointers, self.problem.operands),
        )
        bias_memory, sink_memory = carve(workspace, self.shared, self.dtype)
        start = workspace + self.shared_bytes
        pieces = [
            carve(start + i * self.bytes, self.sizes, self.dtype) for i in range(self.threads)
        ]
        dbias: Array | None = views.arrays.get("dbias", views.arrays.get("dscores"))
        sums = dbias if dbias is None or not self.shared[0] else shaped(bias_memory, *dbias.shape)
        to_bias = None if sums is None else BiasGradient(sums, self.whole)
        sink_sums = (
            shaped(sink_memory, p.batch, p.kv_heads, p.head_group) if self.shared[1] else None
        )

        def work(thread: int, tasks: Iterator[Task]) -> None:
            heads = HeadGradients(p, self.tiling, pieces[thread])
            with np.errstate(all="ignore"):
                for batch, kv_heads in tasks:
                    for stack in itertools.product(
                        slices(batch.stop, self.tiling.batch, batch.start),
                        slices(kv_heads.stop, self.tiling.kv_heads, kv_heads.start),
                    ):
                        self._stack(heads, views, views.stack(*stack), to_bias, sink_sums)

        def launch(stream: int) -> None:
            for x in (sums, sink_sums):
                if x is not None:
                    x[...] = 0
            share(work, self.tasks, self.threads)
            with np.errstate(all="ignore"):
                if sums is not dbias and dbias is not None:
                    dbias[...] = sums
                if "dsinks" in views.arrays:
                    views.arrays["dsinks"][...] = (
                        0 if sink_sums is None else sink_sums.sum(axis=0).reshape(-1)
                    )

        return launch

    def _stack(
        self,
        heads: HeadGradients,
        views: Views,
        own: Stack,
        dbias: BiasGradient | None,
        sink_sums: Array | None,
    ) -> None:
        p = self.problem.forward
        heads.load(views, own)
        to_sinks = None if sink_sums is None else sink_sums[own.batch, own.heads]
        for block in self.tiling.blocks(p.head_group, own.S_q):
            heads.block(*block, dbias, to_sinks)
        # rows after a strided entry's keys are written, too
        dk, dv = (
            views.keys(n, own)[0]
            if p.spec.kv_view == "packed"
            else views.arrays[n][own.batch, own.heads]
            for n in ("dk", "dv")
        )
        heads.store(dk, dv)
