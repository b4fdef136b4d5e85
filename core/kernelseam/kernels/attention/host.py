"""Host half of forward.h: which tile, which constants, which arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.problems import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up, pad, refuse_dtype, refuse_row_strides
from kernelseam.kernels.signature import Signature

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionTile:
    """A row of an arch's table, for head dims up to ``max_dim``: ``warps`` × ``rows`` queries a block, ``bn`` keys a
    step, a ring of ``stages`` tiles of keys and values."""

    dtypes: frozenset[DType]
    max_dim: int
    warps: int
    rows: int
    bn: int
    stages: int
    q_resident: bool = False
    """Whether the queries stay in registers."""
    min_blocks: int = 1

    @property
    def bm(self) -> int:
        return self.warps * self.rows

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Queries (later the output), the ring, and in float32 the probabilities."""
        dq, do, size = pad(spec.head_dim), pad(spec.value_dim), spec.dtype.itemsize
        scratch = self.bm * self.bn * size if spec.dtype.itemsize > 2 else 0
        return self.bm * max(dq, do) * size + self.stages * self.bn * (dq + do) * size + scratch


_POINTERS = ("q", "k", "v", "out", "lse")
_STRIDES = tuple(f"{p}_{axis}" for p in _POINTERS for axis in ("batch", "head"))
_INTS = ("q_row", "k_row", "v_row", "out_row", "num_heads", "head_group", "S_q", "S_k", "q_tiles")


class AttentionHost:
    """One head's queries, ``bm`` at a time, a block; all heads of a batch in one grid."""

    operation = "attention"
    entry = "attention_forward"
    source = "attention/forward.h"

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        spec = problem.spec
        if spec.dtype is DType.float64:
            return "it has no float64"
        for name, dim in (("head_dim", spec.head_dim), ("value_dim", spec.value_dim)):
            if not 1 <= dim <= MAX_HEAD_DIM:
                return f"{name} = {dim}: it takes 1 to {MAX_HEAD_DIM}"
        if not self.tiles(spec, row):
            return f"no tile of {row.arch} takes {spec.dtype} with head dims {spec.head_dim} and {spec.value_dim}"
        return refuse_dtype(spec.dtype, row) or refuse_row_strides(
            stride_q_row=problem.q_strides[2], stride_k_row=problem.k_strides[2], stride_v_row=problem.v_strides[2],
            stride_out_row=problem.out_strides[2],
        )

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[AttentionTile, ...]:
        dim = max(pad(spec.head_dim), pad(spec.value_dim))
        fit = [
            t for t in row.tiles.get("attention", ())
            if spec.dtype in t.dtypes and dim <= t.max_dim and t.shared_bytes(spec) <= row.shared_bytes_per_block
        ]
        narrowest = min((t.max_dim for t in fit), default=0)
        return tuple(t for t in fit if t.max_dim == narrowest)

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> AttentionTile:
        """The first of the table, unless another leaves fewer queries of its blocks without work."""
        return min(self.tiles(problem.spec, row), key=lambda t: divide_up(problem.S_q, t.bm) * t.bm)

    def defines(self, spec: AttentionSpec, tile: AttentionTile, row: ArchRow) -> dict[str, object]:
        return {
            "T": DEVICE_TYPE[spec.dtype], "DQK": spec.head_dim, "DV": spec.value_dim, "CAUSAL": spec.causal,
            "LSE": spec.lse, "VECTOR": spec.vector, "WARPS": tile.warps, "ROWS": tile.rows, "BN": tile.bn,
            "STAGES": tile.stages, "Q_RESIDENT": tile.q_resident, "MIN_BLOCKS": tile.min_blocks,
            "SHARED_BYTES": tile.shared_bytes(spec),
        }

    def signature(self, spec: AttentionSpec) -> Signature:
        return Signature((
            *((p, "pointer") for p in _POINTERS), *((s, "i64") for s in _STRIDES), *((i, "i32") for i in _INTS),
            ("scale_log2", "f32"),
        ))

    def grid(self, problem: AttentionProblem, tile: AttentionTile, device: Device) -> int:
        return divide_up(problem.S_q, tile.bm) * problem.num_heads * problem.batch

    def threads(self, tile: AttentionTile, row: ArchRow) -> int:
        return row.warp_size * tile.warps

    def shared_bytes(self, spec: AttentionSpec, tile: AttentionTile) -> int:
        return tile.shared_bytes(spec)

    def values(self, problem: AttentionProblem, tile: AttentionTile, device: Device) -> dict[str, int | float]:
        strides = (
            *problem.q_strides[:2], *problem.k_strides[:2], *problem.v_strides[:2], *problem.out_strides[:2],
            *problem.lse_strides,
        )
        return {
            **dict(zip(_STRIDES, strides, strict=True)),
            "q_row": problem.q_strides[2], "k_row": problem.k_strides[2], "v_row": problem.v_strides[2],
            "out_row": problem.out_strides[2], "num_heads": problem.num_heads, "head_group": problem.head_group,
            "S_q": problem.S_q, "S_k": problem.S_k, "q_tiles": divide_up(problem.S_q, tile.bm),
            "scale_log2": problem.scale * math.log2(math.e),
        }

    def pointers(self, spec: AttentionSpec) -> dict[str, str]:
        return {p: p for p in _POINTERS}

    def efficiency(self, problem: AttentionProblem) -> float:
        """A portable schedule reaches about a third of a new card's matrix rate; narrow accesses cost more."""
        return 0.33 if problem.spec.vector >= 16 else 0.2
