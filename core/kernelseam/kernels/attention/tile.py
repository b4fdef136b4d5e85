"""How an attention is tiled on an arch."""

from __future__ import annotations

from dataclasses import field

from kernelseam.descriptors.attention.options import ANY_VIEW, SpecOption
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import changed, dataclass
from kernelseam.kernels.attention.fp8 import query_bytes
from kernelseam.kernels.elements import pad


@dataclass(frozen=True)
class AttentionTile:
    """A tile configuration, a row of an arch's table, for head dims up to ``max_dim``: a block
    has ``warps`` warps of ``rows`` queries each, and walks the keys ``bn`` at a time, through a
    ring of ``stages`` tiles of K and V. ``column_warps`` warps share the same queries, and
    divide the head dim of V."""

    dtypes: frozenset[DType]
    max_dim: int
    warps: int
    rows: int
    bn: int
    stages: int
    q_resident: bool = False
    """Whether the queries stay in registers."""
    min_blocks: int = 1
    column_warps: int = 1
    plain: bool = False
    """Only for strided keys and plain scores, scale·q·k with at most a causal mask: others take
    more registers."""
    score_unroll: int = 4
    """Steps that the loop of scores over the head dim is unrolled by."""
    q_returned: bool = False
    """Whether the ring reuses the shared memory of queries that stay in registers. Only where
    copies go through registers."""
    shared_stage: bool = False
    """Whether K and V are loaded alternately, each into a buffer of its own, instead of ahead
    into a ring (``stages`` is 1). Only where ``min_blocks`` blocks fit a compute unit, which
    hide one another's latency."""
    sections: bool = False
    """Whether, under a causal mask, the longest blocks of several heads start first, instead of
    head after head."""
    precision: str | None = None
    """How its float32 is multiplied (``spec.precision``)."""
    rate: float = field(default=0.0, compare=False)
    """As in GemmTile; so ``block_seconds``."""
    block_seconds: float = field(default=0.0, compare=False)
    dtype_kv: DType | None = None
    """The dtype of 8 bits that k and v are stored in; None: that of q."""
    widened: bool = False
    """Whether the platform converts them on their way to shared memory."""
    grouped: bool = False
    """Chosen for a problem, no column of the table: whether a block's rows are the queries of
    all heads of a KV head's group. So is ``splits``."""
    splits: int = 1

    @property
    def name(self) -> str:
        """Rows×keys, warps, stages; whether heads of a group share a block, and splits of the
        keys."""
        shared = f"/{self.column_warps}" if self.column_warps > 1 else ""
        more = "-resident" * self.q_resident + "-grouped" * self.grouped
        more += f"-{self.dtype_kv}" * (self.dtype_kv is not None)
        more += f"-{self.precision}" * (self.precision is not None)
        more += f"-{self.splits}parts" * (self.splits > 1)
        return f"{self.bm}x{self.bn}-{self.warps}{shared}w-{self.stages}{more}"

    def sharing(self, heads: int) -> AttentionTile:
        """The tile whose rows are the queries of ``heads`` heads."""
        return changed(self, grouped=True) if heads > 1 else self

    @cached_property
    def bm(self) -> int:
        return self.warps // self.column_warps * self.rows

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Queries (later the output) and the ring, side by side or in one place, in float32 the
        probabilities, and scales of blocks."""
        dq, do, size = (
            pad(spec.head_dim),
            pad(spec.value_dim, self.column_warps),
            spec.dtype.itemsize,
        )
        stored = size if self.widened else spec.kv.itemsize
        scales = self.stages * self.bn * 8 if spec.kv_scales == "blocks" else 0
        scratch = self.warps * self.rows * self.bn * size if spec.dtype.itemsize > 2 else 0
        first = self.bm * max(dq * query_bytes(spec, self.widened), do * spec.out.itemsize)
        ring = self.stages * self.bn * (dq + do) * stored
        return (max(first, ring) if self.q_returned else first + ring) + scratch + scales


def is_plain(spec: AttentionSpec) -> bool:
    """Whether scores are scale·q·k with at most a causal mask."""
    return not spec.options & ~_PLAIN


_PLAIN = (
    ANY_VIEW
    | SpecOption.causal
    | SpecOption.dtype_out
    | SpecOption.batch_invariant
    | SpecOption.dtype_kv
    | SpecOption.dtype_q
    | SpecOption.precision
)
