"""Kernel definition of backward.h: the gradients of an attention in three launches, and one more
for each that is reduced."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.contract import ArchRow, Device, Launch, Launches
from kernelseam.costs import Work
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.options import ANY_VIEW, SpecOption
from kernelseam.dtypes import DType
from kernelseam.frozen import changed
from kernelseam.kernels.attention.arguments import (
    OPERANDS,
    SEQUENCES,
    STRIDES,
    matrices,
    row_values,
    walk_values,
)
from kernelseam.kernels.attention.backward_tile import BackwardTile, backward_tiles
from kernelseam.kernels.attention.cost import backward_work
from kernelseam.kernels.attention.forward_arguments import refuse_dims, spec_constants
from kernelseam.kernels.attention.query_gradient import (
    QUERY_GRADIENT,
    QueryGradientProblem,
    QueryGradientSpec,
)
from kernelseam.kernels.attention.row_kernels import (
    ROW_DELTA,
    SINK_GRADIENT,
    SUM_AXES,
    DeltaProblem,
    DeltaSpec,
    RowTile,
    SinkProblem,
    SinkSpec,
    SumProblem,
)
from kernelseam.kernels.attention.scores import (
    SCORE_OPTIONS,
    SCORES,
    refuse_scores,
    score_values,
    with_expression,
)
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import (
    TF32_PRODUCTS,
    divide_up,
    refuse_dtype,
    refuse_precision,
    refuse_row_strides,
    row_strides,
)
from kernelseam.kernels.signature import Signature, Structure

SUPPORTED = (
    SCORE_OPTIONS
    | ANY_VIEW
    | SpecOption.dtype_out
    | SpecOption.batch_invariant
    | SpecOption.expression
    | SpecOption.precision
)


_MATRICES = ("q", "k", "v", "dout", "dq", "dk", "dv")
_BIAS_GRADIENT = Structure(
    (("dbias", "pointer"), *((f"dbias_{axis}", "i64") for axis in STRIDES)), ("base", *STRIDES)
)
_SIGNATURE = Signature(
    (
        *((name, matrices(name)) for name in _MATRICES[:4]),
        ("lse", row_values("lse")),
        ("delta", row_values("delta")),
        *((name, matrices(name)) for name in _MATRICES[4:]),
        ("sums", "pointer"),
        ("dbias", _BIAS_GRADIENT),
        ("score", SCORES),
        ("sequences", SEQUENCES),
        ("num_heads", "i32"),
        ("head_group", "i32"),
        (
            "blocks",
            Structure(
                (("key_tiles", "i32"), ("query_tiles", "i32"), ("key_blocks", "i32")),
                ("key_tiles", "query_tiles", "for_keys"),
            ),
        ),
        ("scale", "f32"),
    ),
    flat=True,
)


class AttentionBwdDefinition(KernelDefinition):
    """Keys and queries, ``own`` at a time, a block; with atomics keys alone."""

    operation = "attention_bwd"
    entry = "attention_backward"
    source = "attention/backward.h"
    any_tile = True
    multiplies = True
    operands = OPERANDS

    def refuse(self, problem: AttentionBwdProblem, row: ArchRow) -> str | None:
        p, spec = problem.forward, problem.spec.forward
        if reason := spec.refused_by(SUPPORTED):
            return reason
        for name, view in (("q", spec.q_view), ("k and v", spec.kv_view)):
            if view not in ("strided", "packed"):
                return f"{name} are {view}: it takes strided and packed rows"
        if spec.dtype is DType.float64:
            return "it has no float64"
        if spec.out is not spec.dtype:
            return f"the result is {spec.out}: it takes that of q, {spec.dtype}"
        if reason := refuse_dims(spec) or refuse_dtype(spec.dtype, row):
            return reason
        if reason := refuse_precision(spec.precision, row.tiles.get(self.operation, ()), row):
            return f"it {reason}"
        if not self.tiles(problem.spec, row):
            return (
                f"no tile of {row.arch} takes {spec.dtype} with head dims {spec.head_dim} and "
                f"{spec.value_dim}: of the wider a block keeps its own rows and a ring of the "
                f"others', up to {_widest(problem.spec, row)} columns in "
                f"{row.shared_bytes_per_block} bytes of shared memory"
            )
        if p.S_q + p.S_k >= 2**30:
            return f"S_q + S_k = {p.S_q + p.S_k}: it takes less than 2**30"
        rows = row_strides(p, *_MATRICES[:3]) | row_strides(problem, *_MATRICES[3:])
        return refuse_scores(p) or refuse_row_strides(**rows)

    def tiles(self, spec: AttentionBwdSpec, row: ArchRow) -> tuple[BackwardTile, ...]:
        return backward_tiles(spec, row)

    def as_launched(self, spec: AttentionBwdSpec, tile: BackwardTile) -> tuple[BackwardTile, ...]:
        return tuple([changed(tile, role=role) for role in tile.roles])

    def launches(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> Launches:
        """Row sums of dout·out; the gradients, with atomics dq's after the others; then what is
        reduced: the bias's, where it repeats or is no row-major float32, and the sinks'."""
        p, spec = problem.forward, problem.spec.forward
        packed = spec.q_view == "packed" and p.batch > 0  # else there are no offsets
        entries, rows = (1, p.total_q) if packed else (p.batch, p.S_q)
        delta = (0 if packed else p.num_heads * rows, rows)
        size = _aligned(4 * entries * p.num_heads * rows)
        workspace, zeros, sum_bytes = {"delta": 0}, dict[str, int](), 0
        gradient = QueryGradientProblem(
            QueryGradientSpec(spec.dtype, spec.head_dim, packed, spec.vector, spec.precision),
            p.batch,
            p.num_heads,
            p.S_q,
            p.total_q,
            problem.dq_strides,
            p.scale,
        )
        if tile.query_rows:
            sum_bytes = gradient.sum_bytes(tile)
            workspace["sums"] = zeros["zeros"] = size
            size += _aligned(sum_bytes)
        row_sums = DeltaProblem(
            DeltaSpec(spec.dtype, spec.value_dim, packed),
            entries,
            p.num_heads,
            rows,
            problem.dout_strides,
            p.out_strides,
            delta,
            p.batch,
            sum_bytes,
        )
        steps = [Launch(ROW_DELTA, row_sums, RowTile(), {"delta": 0, **zeros})]
        reduced = problem.spec.bias_gradient and not self._direct(problem)
        if reduced:
            workspace["dbias"] = size
        gradients = problem if p.num_heads else _without_queries(problem)
        for role in tile.roles:
            steps.append(Launch(self, gradients, changed(tile, role=role), workspace))
        if tile.query_rows:
            steps.append(Launch(QUERY_GRADIENT, gradient, tile, {"sums": workspace["sums"]}))
        if reduced:
            assert spec.bias is not None
            extents = (p.batch, p.num_heads, p.S_q, p.S_k)
            x = (p.num_heads * p.S_q * p.S_k, p.S_q * p.S_k, p.S_k, 1)
            summed = SumProblem.of(
                spec.bias, extents, problem.dbias_shape, x, problem.dbias_strides
            )
            steps.append(Launch(SUM_AXES, summed, RowTile(), {"x": size}))
            size += _aligned(4 * p.batch * p.num_heads * p.S_q * p.S_k)
        if problem.spec.sink_gradient:
            sinks = SinkProblem(
                SinkSpec(packed), entries, p.num_heads, rows, p.lse_strides, delta, p.batch
            )
            steps.append(Launch(SINK_GRADIENT, sinks, RowTile(), {"delta": 0}))
        return Launches(tuple(steps), size)

    def _direct(self, problem: AttentionBwdProblem) -> bool:
        """Whether backward.h can write the bias's gradient where it is wanted."""
        p = problem.forward
        whole = problem.dbias_shape == (p.batch, p.num_heads, p.S_q, p.S_k)
        return whole and p.spec.bias is DType.float32 and problem.dbias_strides[3] == 1

    def constants(self, spec: AttentionBwdSpec, tile: BackwardTile, row: ArchRow) -> Constants:
        return {
            **spec_constants(spec.forward),
            "PRECISION": TF32_PRODUCTS[spec.forward.precision],
            "VECTOR": spec.forward.vector,
            "BIAS_GRADIENT": spec.bias_gradient or spec.score_gradient,
            "ROLE": ("both", "keys", "queries").index(tile.role),
            **members(tile, "warps", "column_warps", "rows", "step", "stages", "score_rows"),
            **members(tile, "query_rows", "resident", "unroll", "min_blocks"),
            "SHARED_BYTES": tile.shared_bytes(spec),
        }

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return with_expression(_SIGNATURE, spec.forward)

    def _blocks(self, problem: AttentionBwdProblem, tile: BackwardTile) -> tuple[int, int]:
        p = problem.forward
        return (
            divide_up(p.S_k, tile.own) * p.kv_heads * p.batch,
            divide_up(p.S_q, tile.own) * p.num_heads * p.batch,
        )

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        keys, queries = self._blocks(problem, tile)
        return {"both": keys + queries, "keys": keys, "queries": queries}[tile.role]

    def values(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> dict[str, int | float]:
        p, packed = problem.forward, problem.forward.spec.q_view == "packed"
        rows = p.total_q if packed else p.S_q
        dbias = (
            problem.dbias_strides
            if problem.spec.bias_gradient and self._direct(problem)
            else (p.num_heads * p.S_q * p.S_k, p.S_q * p.S_k, p.S_k, 1)
        )
        return {
            **walk_values(p, *_MATRICES[:3], "lse"),
            **walk_values(problem, *_MATRICES[3:]),
            "delta_batch": 0 if packed else p.num_heads * rows,
            "delta_head": rows,
            **{f"dbias_{axis}": s for axis, s in zip(STRIDES, dbias, strict=False)},
            **score_values(p),
            "S_q": p.S_q,
            "S_k": p.S_k,
            "num_heads": p.num_heads,
            "head_group": p.head_group,
            "key_tiles": max(divide_up(p.S_k, tile.own), 1),
            "query_tiles": max(divide_up(p.S_q, tile.own), 1),
            "key_blocks": self._blocks(problem, tile)[0],
            "scale": p.scale,
        }

    def pointers(self, spec: AttentionBwdSpec) -> dict[str, str]:
        return super().pointers(spec) | ({"dbias": "dscores"} if spec.score_gradient else {})

    def variants(
        self, problem: AttentionBwdProblem, row: ArchRow, device: Device
    ) -> dict[str, BackwardTile]:
        """Every tile that takes a problem, by name, that of ``tile`` first. A batch-invariant spec
        has one."""
        tiles = self.tiles(problem.spec, row)
        return {t.name: t for t in (tiles[:1] if problem.spec.forward.batch_invariant else tiles)}

    def work(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> Work:
        return backward_work(problem, tile, self.grid(problem, tile, device))


def _without_queries(problem: AttentionBwdProblem) -> AttentionBwdProblem:
    """The same dk and dv, zeros, of KV heads that no head of queries belongs to: of as many without
    a row."""
    p = problem.forward
    spec = replace(p.spec, q_view="strided")
    forward = changed(p, spec=spec, num_heads=p.kv_heads, S_q=0, total_q=0)
    return changed(problem, spec=replace(problem.spec, forward=spec), forward=forward)


def _widest(spec: AttentionBwdSpec, row: ArchRow) -> int:
    """The largest head dims, both alike, that a tile of the arch takes; 0 where it has none."""
    tiles: tuple[BackwardTile, ...] = row.tiles.get("attention_bwd", ())
    widths = sorted({t.max_dim for t in tiles}, reverse=True)
    for width in widths:
        forward = replace(spec.forward, head_dim=width, value_dim=width)
        if backward_tiles(replace(spec, forward=forward), row):
            return width
    return 0


def _aligned(size: int) -> int:
    return divide_up(size, 256) * 256
