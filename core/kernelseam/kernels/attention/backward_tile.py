"""Tile configurations of backward.h: what a block owns, how its warps share the work."""

from __future__ import annotations

from dataclasses import field
from functools import lru_cache

from kernelseam.contract import ArchRow
from kernelseam.descriptors.attention.backward_problem import AttentionBwdSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.tile import is_plain
from kernelseam.kernels.elements import pad


@dataclass(frozen=True)
class BackwardTile:
    """A row of an arch's table, for head dims up to ``max_dim``: blocks own ``warps`` /
    ``column_warps`` · ``rows`` rows and take the other side ``step`` rows at a time; a ring of
    ``stages`` tiles."""

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
    """Whether keys and queries have a launch each: both in one kernel take more scalar
    registers."""
    role: str = "both"
    """No column of the table: which of the two a launch is for."""
    one_layout: bool = True
    """Whether a tile lies the same as either factor of a product (the platform's E::ONE_LAYOUT)."""
    score_rows: int = 0
    """Owned rows of the scores that a warp computes and shares with others through shared memory; 0
    where each warp computes those of all its rows, so that ``column_warps`` warps compute the
    same."""
    query_rows: int = 0
    """Rows of dq that a warp computes at each step and accumulates by atomics, in no fixed order:
    blocks own keys only, and no product is computed twice. 0 where blocks that own queries compute
    dq."""
    resident: bool = False
    """Whether what is owned stays in registers as a left factor."""
    unroll: int = 4
    """Steps that a product's loop is unrolled by: more are in flight, in more registers."""
    precision: str | None = None
    """How its float32 is multiplied (``spec.forward.precision``)."""
    rate: float = field(default=0.0, compare=False)
    """As in GemmTile; so ``block_seconds``."""
    block_seconds: float = field(default=0.0, compare=False)

    @property
    def name(self) -> str:
        """Owned×step, warps, stages; rows of scores and of dq a warp, where those are handed on."""
        shared = f"/{self.column_warps}" if self.column_warps > 1 else ""
        rows = f"-scores{self.score_rows}" * (self.score_rows > 0) + f"-atomic{self.query_rows}" * (
            self.query_rows > 0
        )
        return (
            f"{self.own}x{self.step}-{self.warps}{shared}w-{self.stages}{rows}"
            + "-resident" * self.resident
            + f"-{self.precision}" * (self.precision is not None)
        )

    @property
    def roles(self) -> tuple[str, ...]:
        """Of the launches."""
        return ("keys",) if self.query_rows else ("keys", "queries") if self.apart else ("both",)

    @property
    def own(self) -> int:
        return self.warps // self.column_warps * self.rows

    @property
    def query_column_warps(self) -> int:
        """Warps that share the columns of dq at a step."""
        return self.warps * self.query_rows // self.step if self.query_rows else 1

    def width(self, dim: int) -> int:
        """A head dim as this tile's warps share it."""
        return pad(dim, max(self.column_warps, self.query_column_warps))

    def shared_bytes(self, spec: AttentionBwdSpec) -> int:
        """What is owned, the ring, each row's LSE and delta, what is handed on of the scores, and
        in float32 scratch."""
        s = spec.forward
        size = s.dtype.itemsize
        one_layout = self.one_layout or (size > 2 and self.precision is None)
        dq, do, twice = self.width(s.head_dim), self.width(s.value_dim), 1 if one_layout else 2
        q, v = self.own * dq * size, self.own * do * size
        # as a right factor: the tile itself where that has one layout
        kept = q if self.query_rows else 0
        ring = self.stages * self.step * (dq + do) * size * twice
        lines, scores = 16 * self.step, self.own * self.step * size
        if not self.score_rows:
            handed = self.warps * self.rows * self.step * size if size > 2 else 0
        else:
            handed = scores * (1 + (twice if self.query_rows else 1))
        once = v + (0 if one_layout and kept else q)
        return kept + (
            max(once, ring + lines + handed) if self.resident else once + ring + lines + handed
        )


@lru_cache(512)
def backward_tiles(spec: AttentionBwdSpec, row: ArchRow) -> tuple[BackwardTile, ...]:
    """An arch's tiles for a spec, the preferred first. Those with atomics are for a spec that lets
    the order of sums vary, and then before the others."""
    s = spec.forward
    dim = max(pad(s.head_dim), pad(s.value_dim))
    free = not spec.deterministic and not s.batch_invariant
    fit = [
        t
        for t in row.tiles.get("attention_bwd", ())
        if s.dtype in t.dtypes
        and s.precision == t.precision
        and dim <= t.max_dim
        and (is_plain(s) or not t.plain)
        and (free or not t.query_rows)
        and t.shared_bytes(spec) <= row.shared_bytes_per_block
    ]
    narrowest = min((t.max_dim for t in fit), default=0)
    narrow = [t for t in fit if t.max_dim == narrowest]
    return tuple([t for t in narrow if t.query_rows] or narrow)
