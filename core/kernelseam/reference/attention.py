"""Attention forward on the host: the implementation, and its distribution over threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kernelseam.contract import Device, PlanParts
from kernelseam.descriptors.attention.options import ANY_VIEW, STORED, SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.reference.attention_block import BLOCK, Heads, scratch_sizes
from kernelseam.reference.attention_keys import in_place
from kernelseam.reference.attention_scores import SCORE_OPTIONS
from kernelseam.reference.attention_tiling import tiling
from kernelseam.reference.attention_views import Views
from kernelseam.reference.implementation import NumpyImplementation, recorded
from kernelseam.reference.scratch import carve, scratch_bytes
from kernelseam.reference.threads import share, threads_for

Task = tuple[tuple[slice, slice], int]
"""A stack of KV heads, and the part of its blocks of queries."""


SUPPORTED = (
    SCORE_OPTIONS
    | ANY_VIEW
    | STORED
    | SpecOption.dtype_out
    | SpecOption.batch_invariant
    | SpecOption.prefix_groups
    | SpecOption.expression
    | SpecOption.precision
    | SpecOption.row_scale_block
)
"""Options of a spec. All rows are batch-invariant: a row's work depends on its own sequence
alone."""


class NumpyAttention(NumpyImplementation[AttentionProblem]):
    """Every dtype (8 and 16 bits computed in float32, float64 in float64), any sizes, strides and
    views."""

    operation = "attention"

    def supports(self, problem: AttentionProblem, device: Device) -> str | None:
        return problem.spec.refused_by(SUPPORTED)

    def build(self, problem: AttentionProblem, device: Device) -> PlanParts:
        step = _AttentionStep(problem, device)
        return PlanParts((step,), step.threads * step.bytes)


class _AttentionStep:
    """Threads take one stack of KV heads after another, or interleaved blocks of their queries
    where heads are few."""

    def __init__(self, problem: AttentionProblem, device: Device) -> None:
        p = self.problem = problem
        self.dtype = p.spec.dtype.accumulator
        written = p.num_heads and p.S_q and (p.spec.value_dim or p.spec.lse)
        threads = threads_for(p.operations, device)
        t = self.tiling = tiling(
            p,
            BLOCK,
            p.S_k * max(p.spec.head_dim, p.spec.value_dim) * (not all(in_place(p))),
            threads,
        )
        # operands may be missing where there is nothing to write
        self.stacks = t.stacks(p.batch, p.kv_heads) if written else []
        blocks = len(list(t.blocks(p.head_group, p.S_q)))
        # two tasks per thread balance the load
        per_stack = 1 if threads == 1 else -(-2 * threads // max(len(self.stacks), 1))
        self.parts = max(min(per_stack, blocks), 1)
        self.threads = max(min(threads, len(self.stacks) * self.parts), 1)
        self.sizes = scratch_sizes(p, t)
        self.bytes = scratch_bytes(self.sizes, self.dtype)
        self.record = recorded("attention", device, (blocks, p.num_heads, p.batch))

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p, views = self.problem, Views(self.problem, pointers)
        pieces = [
            carve(workspace + i * self.bytes, self.sizes, self.dtype) for i in range(self.threads)
        ]
        tasks = list(itertools.product(self.stacks, range(self.parts)))

        def work(thread: int, tasks: Iterator[Task]) -> None:
            heads = Heads(p, self.tiling, pieces[thread])
            with np.errstate(all="ignore"):
                for at, part in tasks:
                    own = views.stack(*at)
                    blocks = list(self.tiling.blocks(p.head_group, own.S_q))[part :: self.parts]
                    if blocks:
                        heads.load(views, own)
                    for block in blocks:
                        heads.block(*block)

        return lambda stream: share(work, tasks, self.threads)
