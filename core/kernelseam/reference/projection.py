"""The projections on the host: blocks of results, each a sum of products by BLAS."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelseam.contract import Device, LaunchRecord, PlanParts
from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    QkvProjectionBwdProblem,
)
from kernelseam.descriptors.projection.problem import (
    APPENDED,
    OutputProjectionProblem,
    QkvProjectionProblem,
)
from kernelseam.dtypes import DType
from kernelseam.reference.cache import CacheStep
from kernelseam.reference.implementation import NumpyImplementation, operand_arrays, recorded
from kernelseam.reference.rotary import Array, Rotation
from kernelseam.reference.scratch import carve, scratch_bytes, shaped

_ROWS, _COLUMNS, _SUMMANDS = 256, 256, 1024
"""The extents of one block."""
Views = Mapping[str, Array]
Store = Callable[[Array, slice, slice], None]


@dataclass(frozen=True)
class Task:
    """Σ left·right, M×N, handed to ``store`` block by block in the accumulator's dtype."""

    M: int
    N: int
    terms: Sequence[tuple[Array, Array]]
    """[M, K] and [K, N], of any strides."""
    store: Store


def qkv(p: QkvProjectionProblem, x: Views) -> Iterator[Task]:
    """One task per entry and head: its columns are rotated together."""
    h, rotate = p.heads, Rotation(p, x)
    names = ["q"] * h.num_heads + ["k"] * h.kv_heads + ["v"] * h.kv_heads
    own = [*range(h.num_heads), *range(h.kv_heads), *range(h.kv_heads)]
    entries = range(p.batch if h.tokens else 0)
    for b, (column, (name, head)) in itertools.product(
        entries, enumerate(zip(names, own, strict=True))
    ):
        of_head = slice(column * h.head_dim, (column + 1) * h.head_dim)

        def store(
            y: Array,
            rows: slice,
            columns: slice,
            b: int = b,
            name: str = name,
            head: int = head,
            of_head: slice = of_head,
        ) -> None:
            if "bias" in x:
                y += x["bias"][of_head]
            if name != "v":
                rotate(y, b, rows)
            if p.spec.heads.paged and name != "q":
                page, row = rotate.place(b, rows)
                x[name][page, head, row] = y
            else:
                x[name][b, head, rows] = y

        yield Task(h.tokens, h.head_dim, [(x["input"][b, 0], x["weight"][0, 0, of_head].T)], store)


def output(p: OutputProjectionProblem, x: Views) -> Iterator[Task]:
    """One task per entry of the batch, summed over heads."""
    weight = _columns(x["weight"], p.num_heads, p.head_dim)
    for b in range(p.batch):

        def store(y: Array, rows: slice, columns: slice, b: int = b) -> None:
            if "bias" in x:
                y += x["bias"][columns]
            if "residual" in x:
                y += x["residual"][b, 0, rows, columns]
            x["out"][b, 0, rows, columns] = y

        yield Task(p.S, p.hidden, [(x["attn_out"][b, h], w.T) for h, w in enumerate(weight)], store)


def qkv_bwd(p: QkvProjectionBwdProblem, x: Views) -> Iterator[Task]:
    """One task per entry for d_input, summed over heads; one per head for d_weight and for d_bias,
    summed over entries."""
    heads = [
        (n, h)
        for n, count in (("dq", p.num_heads), ("dk", p.kv_heads), ("dv", p.kv_heads))
        for h in range(count)
    ]
    if "d_input" in x and p.batch and p.S:
        weight = [
            x["weight"][0, 0, h * p.head_dim : (h + 1) * p.head_dim] for h in range(len(heads))
        ]
        for b in range(p.batch):
            terms = [(x[n][b, h], w) for (n, h), w in zip(heads, weight, strict=True)]
            yield Task(p.S, p.hidden, terms, _into(x["d_input"][b, 0]))
    for i, (n, h) in enumerate(heads):
        of_head = slice(i * p.head_dim, (i + 1) * p.head_dim)
        if "d_weight" in x:
            terms = [(x[n][b, h].T, x["input"][b, 0]) for b in range(p.batch)]
            yield Task(p.head_dim, p.hidden, terms, _into(x["d_weight"][0, 0, of_head]))
        if "d_bias" in x:
            yield _column_sums([x[n][b, h] for b in range(p.batch)], x["d_bias"][of_head])


def output_bwd(p: OutputProjectionBwdProblem, x: Views) -> Iterator[Task]:
    """One task per entry and head for d_attn_out; one per head for d_weight, summed over
    entries."""
    d_output = x["d_output"][:, 0]
    if "d_attn_out" in x:
        weight = _columns(x["weight"], p.num_heads, p.head_dim)
        for b, (h, w) in itertools.product(range(p.batch), enumerate(weight)):
            yield Task(p.S, p.head_dim, [(d_output[b], w)], _into(x["d_attn_out"][b, h]))
    if "d_weight" in x:
        for h, of_head in enumerate(_columns(x["d_weight"], p.num_heads, p.head_dim)):
            terms = [(d_output[b].T, x["attn_out"][b, h]) for b in range(p.batch)]
            yield Task(p.hidden, p.head_dim, terms, _into(of_head))
    if "d_bias" in x:
        yield _column_sums([*d_output], x["d_bias"])


def _columns(weight: Array, heads: int, dim: int) -> list[Array]:
    """The columns of each head."""
    return [weight[0, 0, :, h * dim : (h + 1) * dim] for h in range(heads if len(weight) else 0)]


def _into(out: Array) -> Store:
    def store(y: Array, rows: slice, columns: slice) -> None:
        out[rows, columns] = y

    return store


def _column_sums(terms: Sequence[Array], out: Array) -> Task:
    """The sums of the columns of all terms, as a product with ones."""
    ones = np.ones((1, 1), np.float32)
    return Task(
        1, len(out), [(np.broadcast_to(ones, (1, len(x))), x) for x in terms], _into(out[None])
    )


class NumpyProjection(NumpyImplementation[Any]):
    """Every dtype (16 bits computed in float32), any sizes and strides, every option."""

    def __init__(self, operation: str, tasks_of: Callable[[Any, Views], Iterator[Task]]) -> None:
        self.operation, self._tasks_of = operation, tasks_of

    def build(self, problem: Any, device: Device) -> PlanParts:
        append = getattr(problem, "append", None)
        if append is None:
            step = _ProjectionStep(problem, self._tasks_of, device)
            return PlanParts((step,), scratch_bytes(step.sizes, step.dtype))
        step = _ProjectionStep(problem.product, self._tasks_of, device, problem.between_bytes)
        size = problem.between_bytes + scratch_bytes(step.sizes, step.dtype)
        appended = {parameter: name for name, parameter in APPENDED.items()}
        steps = (
            _Between(step, {}, problem.between),
            _Between(CacheStep(append, device), appended, problem.between),
        )
        return PlanParts(steps, size)


class _Between:
    """A step some of whose operands have other names, or lie in the workspace."""

    def __init__(self, step: Any, names: Mapping[str, str], offsets: Mapping[str, int]) -> None:
        self.step, self.names, self.offsets = step, names, offsets
        self.record: LaunchRecord = step.record

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        named = {own: pointers.get(name, 0) for own, name in self.names.items()}
        placed = {own: workspace + offset for own, offset in self.offsets.items()}
        launch: Callable[[int], None] = self.step.bind({**pointers, **named, **placed}, workspace)
        return launch


class _ProjectionStep:
    def __init__(
        self,
        problem: Any,
        tasks_of: Callable[[Any, Views], Iterator[Task]],
        device: Device,
        scratch: int = 0,
    ) -> None:
        """``scratch``: where its own begins in the workspace, in bytes."""
        self.problem, self.tasks_of, self.scratch = problem, tasks_of, scratch
        self.dtype: DType = problem.spec.dtype.accumulator
        # Columns that are rotated together are in one block.
        self.columns = (
            problem.heads.head_dim if isinstance(problem, QkvProjectionProblem) else _COLUMNS
        )
        self.sizes = (
            _ROWS * self.columns,
            _ROWS * self.columns,
            _ROWS * _SUMMANDS,
            _SUMMANDS * self.columns,
        )
        self.record = recorded(problem.operation, device)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        views = operand_arrays(self.problem.operands, pointers)
        scratch = carve(workspace + self.scratch, self.sizes, self.dtype)

        def launch(stream: int) -> None:
            with np.errstate(all="ignore"):
                for task in self.tasks_of(self.problem, views):
                    self._run(task, scratch)

        return launch

    def _run(self, task: Task, scratch: list[Array]) -> None:
        for i, j in itertools.product(range(0, task.M, _ROWS), range(0, task.N, self.columns)):
            rows, columns = (
                slice(i, min(i + _ROWS, task.M)),
                slice(j, min(j + self.columns, task.N)),
            )
            m, n = rows.stop - i, columns.stop - j
            total, part = shaped(scratch[0], m, n), shaped(scratch[1], m, n)
            total[...] = 0
            for left, right in task.terms:
                for k in range(0, left.shape[1], _SUMMANDS):
                    inner = slice(k, min(k + _SUMMANDS, left.shape[1]))
                    a, b = (
                        shaped(scratch[2], m, inner.stop - k),
                        shaped(scratch[3], inner.stop - k, n),
                    )
                    np.copyto(a, left[rows, inner])
                    np.copyto(b, right[inner, columns])
                    np.matmul(a, b, out=part)
                    total += part
            task.store(total, rows, columns)


PROJECTIONS = (
    NumpyProjection("qkv_projection", qkv),
    NumpyProjection("output_projection", output),
    NumpyProjection("qkv_projection_bwd", qkv_bwd),
    NumpyProjection("output_projection_bwd", output_bwd),
)
