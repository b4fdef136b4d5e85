"""Host half of backward.h: the gradients of an attention in two launches, and one more for each that is reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.attention_bwd_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.attention.host import VIEWS, is_plain
from kernelseam.kernels.attention.row_kernels import (
    ROW_DOTS,
    SINK_GRADIENT,
    SUM_AXES,
    DotsProblem,
    DotsSpec,
    RowTile,
    SinkProblem,
    SinkSpec,
    SumProblem,
    SumSpec,
)
from kernelseam.kernels.attention.scores import (
    SCORE_OPERANDS,
    SCORE_STRIDES,
    refuse_scores,
    score_defines,
    score_values,
)
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up, pad, refuse_dtype, refuse_row_strides
from kernelseam.kernels.launches import Launch, Launches
from kernelseam.kernels.signature import Signature

KNOWN = frozenset({
    "causal", "window", "prefix", "alibi", "softcap", "bias", "mask", "sinks", "q_view", "kv_view", "lengths",
    "batch_invariant", "dtype_out",
})


@dataclass(frozen=True)
class BackwardTile:
    """A row of an arch's table, for head dims up to ``max_dim``: blocks own ``warps`` / ``column_warps`` · ``rows``
    rows and take the other side ``step`` rows at a time; a ring of ``stages`` tiles."""

    dtypes: frozenset[DType]
    max_dim: int
    warps: int
    rows: int
    step: int
    stages: int
    column_warps: int = 1
    min_blocks: int = 1
    plain: bool = False
    """As in AttentionTile, of keys of any view."""
    apart: bool = False
    """Whether keys and queries have a launch each: both in one kernel take more scalar registers."""
    role: str = "both"
    """No column of the table: which of the two a launch is for."""
    one_layout: bool = True
    """Whether a tile lies the same as either factor of a product (the platform's E::ONE_LAYOUT)."""

    @property
    def own(self) -> int:
        return self.warps // self.column_warps * self.rows

    def shared_bytes(self, spec: AttentionBwdSpec) -> int:
        """What is owned, the ring, each row's LSE and dots, and in float32 the probabilities."""
        s = spec.forward
        size = s.dtype.itemsize
        width = pad(s.head_dim, self.column_warps) + pad(s.value_dim, self.column_warps)
        scratch = self.warps * self.rows * self.step * size if size > 2 else 0
        ring = self.stages * self.step * width * size * (1 if self.one_layout or size > 2 else 2)
        return self.own * width * size + ring + 16 * self.step + scratch


_POINTERS = (
    "q", "k", "v", "dout", "lse", "dots", "dq", "dk", "dv", "dbias", "bias", "mask", "slopes", "prefixes", "lengths",
    "q_offsets", "k_offsets",
)
_ROWS = ("q", "k", "v", "dout", "dq", "dk", "dv")
_STRIDES = (
    *(f"{n}_{a}" for n in (*_ROWS, "lse", "dots") for a in ("batch", "head")), "dbias_batch", "dbias_head", "dbias_row",
    *SCORE_STRIDES,
)
_INTS = (
    *(f"{n}_row" for n in _ROWS), "num_heads", "head_group", "S_q_most", "S_k_most", "key_tiles", "query_tiles",
    "key_blocks", "left", "right",
)
_FLOATS = ("scale", "scale_log2", "cap", "cap_inverse")
_OPERANDS = {
    **SCORE_OPERANDS, "lengths": "kv_lengths", "q_offsets": "cu_seqlens_q", "k_offsets": "cu_seqlens_k",
}


class AttentionBwdHost:
    """Keys and queries, ``own`` at a time, a block."""

    operation = "attention_bwd"
    entry = "attention_backward"
    source = "attention/backward.h"

    def refuse(self, problem: AttentionBwdProblem, row: ArchRow) -> str | None:
        p, spec = problem.forward, problem.spec.forward
        if unknown := spec.options - KNOWN:
            return f"it does not know {', '.join(sorted(unknown))}"
        for name, view in (("q", spec.q_view), ("k and v", spec.kv_view)):
            if view not in ("strided", "packed"):
                return f"{name} are {view}: it takes strided and packed rows"
        if spec.dtype is DType.float64:
            return "it has no float64"
        if spec.out is not spec.dtype:
            return f"the result is {spec.out}: it takes that of q, {spec.dtype}"
        for name, dim in (("head_dim", spec.head_dim), ("value_dim", spec.value_dim)):
            if dim < 1:
                return f"{name} = {dim}: it takes 1 and more"
        if not self.tiles(problem.spec, row):
            return f"no tile of {row.arch} takes {spec.dtype} with head dims {spec.head_dim} and {spec.value_dim}"
        if p.S_q + p.S_k >= 2**30:
            return f"S_q + S_k = {p.S_q + p.S_k}: it takes less than 2**30"
        return refuse_dtype(spec.dtype, row) or refuse_scores(p) or refuse_row_strides(
            stride_q_row=p.q_strides[2], stride_k_row=p.k_strides[2], stride_v_row=p.v_strides[2],
            stride_dout_row=problem.dout_strides[2], stride_dq_row=problem.dq_strides[2],
            stride_dk_row=problem.dk_strides[2], stride_dv_row=problem.dv_strides[2],
        )

    def tiles(self, spec: AttentionBwdSpec, row: ArchRow) -> tuple[BackwardTile, ...]:
        s = spec.forward
        dim = max(pad(s.head_dim), pad(s.value_dim))
        fit = [
            t for t in row.tiles.get("attention_bwd", ())
            if s.dtype in t.dtypes and dim <= t.max_dim and (is_plain(s) or not t.plain)
            and t.shared_bytes(spec) <= row.shared_bytes_per_block
        ]
        narrowest = min((t.max_dim for t in fit), default=0)
        return tuple(t for t in fit if t.max_dim == narrowest)

    def tile(self, problem: AttentionBwdProblem, row: ArchRow, device: Device) -> BackwardTile:
        return self.tiles(problem.spec, row)[0]

    def launches(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> Launches:
        """Row sums of dout·out; the gradients; then what is reduced: the bias's, where it repeats or is no row-major
        float32, and the sinks'."""
        p, spec = problem.forward, problem.spec.forward
        packed = spec.q_view == "packed"
        entries, rows = (1, p.total_q) if packed else (p.batch, p.S_q)
        dots = (0 if packed else p.num_heads * rows, rows)
        size = _aligned(4 * entries * p.num_heads * rows)
        sums = DotsProblem(
            DotsSpec(spec.dtype, spec.value_dim, packed), entries, p.num_heads, rows, problem.dout_strides,
            p.out_strides, dots, p.batch,
        )
        steps = [Launch(ROW_DOTS, sums, RowTile(), {"dots": 0})]
        workspace = {"dots": 0}
        reduced = problem.spec.bias_gradient and not self._direct(problem)
        if reduced:
            workspace["dbias"] = size
        for role in ("keys", "queries") if tile.apart else ("both",):
            steps.append(Launch(self, problem, replace(tile, role=role), workspace))
        if reduced:
            assert spec.bias is not None
            extents = (p.batch, p.num_heads, p.S_q, p.S_k)
            x = (p.num_heads * p.S_q * p.S_k, p.S_q * p.S_k, p.S_k, 1)
            summed = SumProblem(SumSpec(spec.bias), extents, problem.dbias_shape, x, problem.dbias_strides)
            steps.append(Launch(SUM_AXES, summed, RowTile(), {"x": size}))
            size += _aligned(4 * p.batch * p.num_heads * p.S_q * p.S_k)
        if problem.spec.sink_gradient:
            sinks = SinkProblem(SinkSpec(packed), entries, p.num_heads, rows, p.lse_strides, dots, p.batch)
            steps.append(Launch(SINK_GRADIENT, sinks, RowTile(), {"dots": 0}))
        return Launches(tuple(steps), size)

    def _direct(self, problem: AttentionBwdProblem) -> bool:
        """Whether backward.h can write the bias's gradient where it is wanted."""
        p = problem.forward
        whole = problem.dbias_shape == (p.batch, p.num_heads, p.S_q, p.S_k)
        return whole and p.spec.bias is DType.float32 and problem.dbias_strides[3] == 1

    def defines(self, spec: AttentionBwdSpec, tile: BackwardTile, row: ArchRow) -> dict[str, object]:
        s = spec.forward
        return {
            "T": DEVICE_TYPE[s.dtype], "DQK": s.head_dim, "DV": s.value_dim, **score_defines(s),
            "Q_VIEW": VIEWS[s.q_view], "KV_VIEW": VIEWS[s.kv_view], "LENGTHS": s.lengths, "GROUPED": 0,
            "VECTOR": s.vector, "BIAS_GRADIENT": spec.bias_gradient,
            "ROLE": ("both", "keys", "queries").index(tile.role), "WARPS": tile.warps,
            "COLUMN_WARPS": tile.column_warps, "ROWS": tile.rows, "STEP": tile.step, "STAGES": tile.stages,
            "MIN_BLOCKS": tile.min_blocks, "SHARED_BYTES": tile.shared_bytes(spec),
        }

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return Signature((
            *((p, "pointer") for p in _POINTERS), *((s, "i64") for s in _STRIDES), *((i, "i32") for i in _INTS),
            *((f, "f32") for f in _FLOATS),
        ))

    def _blocks(self, problem: AttentionBwdProblem, tile: BackwardTile) -> tuple[int, int]:
        p = problem.forward
        return (
            divide_up(p.S_k, tile.own) * p.kv_heads * p.batch, divide_up(p.S_q, tile.own) * p.num_heads * p.batch
        )

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        keys, queries = self._blocks(problem, tile)
        return {"both": keys + queries, "keys": keys, "queries": queries}[tile.role]

    def threads(self, tile: BackwardTile, row: ArchRow) -> int:
        return row.warp_size * tile.warps

    def shared_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        return tile.shared_bytes(spec)

    def values(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> dict[str, int | float]:
        p, packed = problem.forward, problem.forward.spec.q_view == "packed"
        rows = p.total_q if packed else p.S_q
        dbias = problem.dbias_strides if problem.spec.bias_gradient and self._direct(problem) else (
            p.num_heads * p.S_q * p.S_k, p.S_q * p.S_k, p.S_k, 1
        )
        walks = (p.q_strides, p.k_strides, p.v_strides, problem.dout_strides, problem.dq_strides, problem.dk_strides,
                 problem.dv_strides)
        strides = (
            *(x for w in walks for x in w[:2]), *p.lse_strides, 0 if packed else p.num_heads * rows, rows, *dbias[:3],
        )
        ints = (
            *(w[2] for w in walks), p.num_heads, p.head_group, p.S_q, p.S_k, max(divide_up(p.S_k, tile.own), 1),
            max(divide_up(p.S_q, tile.own), 1), self._blocks(problem, tile)[0],
        )
        scores = score_values(p)
        own = (n for n in (*_STRIDES, *_INTS) if n not in scores)
        return {**dict(zip(own, (*strides, *ints), strict=True)), **scores, "scale": p.scale}

    def pointers(self, spec: AttentionBwdSpec) -> dict[str, str]:
        return {p: _OPERANDS.get(p, p) for p in _POINTERS}

    def efficiency(self, problem: AttentionBwdProblem) -> float:
        """Seven products are computed for five that count."""
        return 0.2


def _aligned(size: int) -> int:
    return divide_up(size, 256) * 256
