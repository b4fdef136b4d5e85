"""Tiles of Hopper's kernels: choices measured on an H200 (``benchmarks/NOTES.md``), no code."""

from __future__ import annotations

from dataclasses import dataclass

_SHARED_BYTES = 232_448
"""Of a block."""
_CONTROL_BYTES = 1024
"""Barriers, and what the block's warps tell each other of tiles."""
_WIDE_CONTROL_BYTES = 512
"""The same of the wide gradients' blocks."""
_PANEL = 64
"""Columns of a tile in shared memory that lie together, 128 bytes a row."""
_WARP_PANEL_BYTES = 16 * 128
"""A warp's rows of one panel of the result."""
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Of a thread of the loading warpgroup and of a consumer's, by consumers: no more in all than a
launch starts with. 0: as launched."""


def _panels(dim: int) -> int:
    return -(-dim // _PANEL)


@dataclass(frozen=True)
class HopperGemmTile:
    """``groups`` consumers that make ``bm``×``bn`` of a result, through a ring of ``stages`` slices
    of 64.

    ``cluster``: blocks that share their columns of B, or with ``shared_a`` their rows of A;
    ``blocks``: that share a multiprocessor; ``buffers``: of 64×64 through which a consumer's
    results leave; ``store``: who writes them, each warp its "rows", or the "tma" unit;
    ``c_first``: C is the first to leave the L2 cache; ``b_first``: three quarters of a large
    B are.
    """

    bm: int
    bn: int
    groups: int
    stages: int
    cluster: int
    buffers: int
    store: str
    blocks: int = 1
    c_first: bool = False
    b_first: bool = False
    shared_a: bool = False
    split: int = 1
    """Blocks of a cluster that share a tile, each a part of what is summed: for few tiles."""
    most_tiles: int = 400
    """Of a result that such tiles are for: more fill the GPU without a split."""
    rate: float = 0.0
    """The part of the arch's product rate that the loop reaches."""
    rate_along_m: float = 0.0
    """The same where A lies along M, in boxes of 64 rows, if that differs: three slices are too few
    then."""
    block_seconds: float = 0.0
    in_turns: bool = False
    """Of e4m3: two consumers alternate in multiplying, so that one adds up while the other does."""
    halves: bool = False
    """Of e4m3: a consumer multiplies half of its columns after the other, and adds up meanwhile."""

    @property
    def name(self) -> str:
        """Rows×columns, slices, who stores, cluster."""
        more = f"-{self.cluster}together" * (self.cluster > 1) + f"-{self.blocks}blocks" * (
            self.blocks > 1
        )
        more += "-turns" * self.in_turns + "-halves" * self.halves
        more += "-of-a" * self.shared_a + f"-split{self.split}" * (self.split > 1)
        return f"{self.bm}x{self.bn}-{self.stages}-{self.store}{more}" + "-cfirst" * self.c_first

    def shared_bytes(self, bias: bool, sums: bool = False, scales: bool = False) -> int:
        """Ring, buffers, the bias of each consumer, a factor that sums rows, scales of blocks,
        control; in whole KiB."""
        size = self.stages * (self.bm + self.bn) * 128 + self.groups * (
            self.buffers * 8192 + bias * self.bn * 4
        )
        size += 16 * (self.stages + self.groups * self.buffers) + sums * 1024
        size += scales * self.stages * (self.bm + 4) * 4
        assert size * self.blocks <= _SHARED_BYTES
        return -(-size // 1024) * 1024

    def stages_after_sums(self, sources: int) -> int:
        """Of the ring, that a split tile of a 16-bit result needs at once: ``sources`` source
        tiles, and the sums of its other blocks."""
        stage, panels = (self.bm + self.bn) * 128, _panels(self.bn)
        source = -(-panels // min(panels, stage // (self.bm * 128)))
        return sources * source + -(-(self.split - 1) * self.bm * self.bn * 4 // stage)


GEMM = (
    HopperGemmTile(128, 256, 2, 3, 2, 4, "tma", rate=1.22, rate_along_m=1.0, block_seconds=1.6e-6),
    HopperGemmTile(128, 256, 2, 4, 2, 1, "tma", rate=1.19, block_seconds=1.6e-6),
    HopperGemmTile(128, 192, 2, 5, 2, 1, "tma", rate=1.18, block_seconds=7e-7),
    HopperGemmTile(128, 128, 2, 5, 1, 4, "tma", rate=1.15, block_seconds=2e-7),
    HopperGemmTile(256, 128, 2, 4, 1, 2, "rows", rate=1.04, block_seconds=2.8e-7),
    HopperGemmTile(128, 128, 2, 5, 1, 4, "rows", rate=1.00, block_seconds=4e-7),
    HopperGemmTile(128, 64, 2, 6, 1, 4, "tma", rate=0.80, block_seconds=2.8e-7),
    HopperGemmTile(64, 64, 1, 4, 1, 1, "rows", blocks=3, rate=0.65, block_seconds=4e-7),
)
"""Tiles of products; the cost model chooses."""

SPLIT = (
    HopperGemmTile(
        *(64, 64, 1, 4, 1, 1, "rows"),
        blocks=3,
        b_first=True,
        split=2,
        rate=0.65,
        block_seconds=1e-7,
    ),
    HopperGemmTile(
        *(64, 64, 1, 6, 1, 1, "rows"),
        blocks=2,
        b_first=True,
        split=2,
        most_tiles=66,
        rate=0.65,
    ),
)
"""Tiles of linear layers of few tokens: products whose factors have K last, and few tiles. Where
each block has a multiprocessor, a longer ring."""

FEW_ROWS = (
    HopperGemmTile(
        *(64, 64, 1, 13, 4, 1, "rows"), b_first=True, shared_a=True, most_tiles=33, rate=0.65
    ),
)
"""Tiles of the same for up to 64 tokens: every block would read all of them; four share them."""

E4M3 = (
    HopperGemmTile(128, 192, 2, 5, 2, 1, "tma", rate=1.08, block_seconds=1e-6),
    HopperGemmTile(128, 192, 2, 5, 1, 1, "tma", rate=1.07, block_seconds=6e-7),
    HopperGemmTile(128, 128, 2, 6, 1, 2, "tma", rate=0.99, block_seconds=3e-7),
    HopperGemmTile(128, 128, 2, 6, 1, 2, "rows", rate=0.97, block_seconds=5e-7),
    HopperGemmTile(64, 64, 1, 6, 1, 1, "rows", blocks=2, rate=0.48, block_seconds=2e-7),
)
"""Tiles of products of e4m3, whose sums of a slice have registers of their own: 256 columns do not
fit."""

E4M3_BLOCKS = (
    HopperGemmTile(
        *(128, 192, 2, 5, 1, 1, "tma"), in_turns=True, halves=True, rate=1.02, block_seconds=6e-7
    ),
    HopperGemmTile(128, 128, 2, 5, 1, 2, "tma", in_turns=True, rate=0.93, block_seconds=3e-7),
    HopperGemmTile(128, 128, 2, 5, 1, 2, "rows", in_turns=True, rate=0.9, block_seconds=5e-7),
    HopperGemmTile(64, 64, 1, 6, 1, 1, "rows", blocks=2, rate=0.48, block_seconds=2e-7),
)
"""The same with scales of blocks, which take a part of every slice's stage."""

HEADS = (
    HopperGemmTile(128, 256, 2, 3, 2, 4, "tma", rate=1.22, block_seconds=1.6e-6),
    HopperGemmTile(128, 192, 2, 5, 2, 1, "tma", rate=1.18, block_seconds=7e-7),
    HopperGemmTile(128, 128, 2, 5, 1, 4, "tma", rate=1.15, block_seconds=2e-7),
    HopperGemmTile(128, 64, 2, 6, 1, 4, "tma", rate=0.80, block_seconds=2.8e-7),
    HopperGemmTile(64, 192, 1, 6, 1, 3, "tma", b_first=True, rate=0.98, block_seconds=2e-7),
    HopperGemmTile(128, 192, 2, 5, 2, 1, "rows", rate=1.166, block_seconds=1e-7),
    HopperGemmTile(128, 128, 2, 5, 1, 4, "rows", rate=1.13, block_seconds=3e-7),
    HopperGemmTile(64, 64, 1, 4, 1, 1, "rows", blocks=3, rate=0.65, block_seconds=4e-7),
)
"""Tiles of products whose columns are heads; the cost model chooses."""


@dataclass(frozen=True)
class HopperTf32Tile:
    """``groups`` consumers of 64 rows of the left factor and ``columns`` of the right, through a
    ring of ``stages`` slices of 32.

    ``blocks``: that share a multiprocessor; ``loaders``: warpgroups that load and split;
    ``turned``: the left factor is op(B)ᵀ.
    """

    precision: str
    groups: int
    columns: int
    stages: int
    blocks: int = 1
    loaders: int = 1
    turned: bool = False
    rate: float = 0.0
    """Of the arch's plain float32 units."""
    block_seconds: float = 0.0

    cluster = 1
    shared_a = False

    @property
    def bm(self) -> int:
        return self.columns if self.turned else 64 * self.groups

    @property
    def bn(self) -> int:
        return 64 * self.groups if self.turned else self.columns

    @property
    def name(self) -> str:
        """Rows×columns of C, slices."""
        return (
            f"{self.bm}x{self.bn}-{self.stages}"
            + f"-{self.blocks}blocks" * (self.blocks > 1)
            + f"-{self.loaders}loaders" * (self.loaders > 1)
        )

    @property
    def shared_bytes(self) -> int:
        """Slices of both factors, of the right one a second part where it is split; barriers; in
        whole KiB."""
        parts = 2 if self.precision == "tf32x3" else 1
        size = self.stages * (64 * self.groups + parts * self.columns) * 128 + 32 * self.stages
        size = -(-size // 1024) * 1024
        assert size * self.blocks <= _SHARED_BYTES
        return size


TF32_REGISTERS = {
    (2, 1, 1): (40, 232),
    (1, 1, 2): (40, 216),
    (1, 1, 3): (32, 128),
    (2, 2, 1): (56, 200),
}
"""As ``REGISTERS``, by consumers, loading warpgroups and blocks of a multiprocessor."""
TF32 = (
    HopperTf32Tile("tf32", 2, 256, 4, rate=5.7, block_seconds=3.5e-6),
    HopperTf32Tile("tf32", 2, 192, 5, rate=5.8, block_seconds=3.0e-6),
    HopperTf32Tile("tf32", 2, 128, 6, rate=5.3, block_seconds=1.8e-6),
    HopperTf32Tile("tf32", 1, 128, 4, 2, rate=4.5, block_seconds=1.3e-6),
    HopperTf32Tile("tf32", 1, 64, 4, 3, rate=2.6, block_seconds=3e-7),
    HopperTf32Tile("tf32x3", 2, 128, 4, rate=1.42, block_seconds=8e-7),
    HopperTf32Tile("tf32x3", 2, 128, 4, loaders=2, rate=1.54, block_seconds=1.6e-6),
    HopperTf32Tile("tf32x3", 1, 128, 2, 2, rate=1.08, block_seconds=5e-7),
    HopperTf32Tile("tf32x3", 1, 64, 3, 3, rate=0.95, block_seconds=3e-7),
)
"""Tiles of float32 products by way of TF32."""


@dataclass(frozen=True)
class HopperAttentionTile:
    """``groups`` consumers of 64 queries and ``bn`` keys a step, for these head dims.

    ``stages`` of keys and of values, ``q_stages`` of queries; ``out_stages`` panels a warp through
    which results leave; ``turns``: two consumers alternate in issuing products; ``early``: the next
    tile's first product starts before this one's last; ``ahead``: elements of a thread's part of
    the scores, of ``bn``/2, whose exponentials come before the wait for P·V.
    """

    head_dim: int
    value_dim: int
    groups: int
    bn: int
    stages: int
    q_stages: int
    out_stages: int
    turns: bool
    early: bool
    ahead: int
    remake: bool = False
    """Rows into which a hidden NaN came are made again, in place of a search of V ahead of its
    use."""
    late: bool = False
    """A block asks for its next tile when it is nearly done with one, not when it begins it: for
    causal specs, whose tiles differ in length."""
    fewest_heads: int = 2
    """Of a section, whose tiles are handed out together."""
    hides: bool | None = None
    """Only for specs that hide keys by their place, or only for others; None: for all."""
    short: bool = False
    """For few keys; a batch-invariant spec does not ask."""
    rate: float = 0.0
    """The part of the arch's product rate that the loop reaches."""
    block_seconds: float = 1e-6

    v_stages = sum_blocks = 0

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the loading warpgroup and of a consumer's."""
        return REGISTERS[self.groups]

    @property
    def name(self) -> str:
        """Queries×keys, stages of keys, exponentials ahead."""
        way = "-turns" * self.turns + "-early" * self.early + "-remake" * self.remake
        way += "-late" * self.late
        way += f"-{self.fewest_heads}heads" * (self.fewest_heads != 2)
        return f"{self.bm}x{self.bn}-{self.stages}-{self.ahead}ahead{way}"

    @property
    def bm(self) -> int:
        return 64 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Rings of Q, K and V, staging of the result, control."""
        k, v = (_panels(dim) * _PANEL * 2 for dim in (self.head_dim, self.value_dim))
        rings = self.q_stages * self.bm * k + self.stages * self.bn * (k + v)
        size = rings + self.groups * 4 * self.out_stages * _WARP_PANEL_BYTES + _CONTROL_BYTES
        assert size <= _SHARED_BYTES
        return size


ATTENTION = (
    HopperAttentionTile(64, 64, 4, 64, 4, 2, 1, False, True, 32, hides=False, rate=0.98),
    HopperAttentionTile(
        64, 64, 4, 64, 4, 2, 1, False, True, 16, hides=False, short=True, rate=0.98
    ),
    HopperAttentionTile(
        64, 64, 4, 64, 4, 2, 1, False, True, 32, remake=True, late=True, hides=True, rate=0.98
    ),
    HopperAttentionTile(
        64, 64, 4, 64, 4, 2, 1, False, True, 16, remake=True, hides=True, rate=0.95
    ),
    HopperAttentionTile(96, 96, 2, 128, 2, 2, 2, True, True, 24, rate=1.1),
    HopperAttentionTile(128, 128, 2, 128, 2, 2, 2, True, True, 24, rate=1.22),
    HopperAttentionTile(192, 128, 2, 128, 2, 1, 1, True, False, 24, rate=1.15),
    HopperAttentionTile(
        256, 256, 2, 64, 2, 1, 2, True, False, 32, fewest_heads=4, hides=False, rate=1.2
    ),
    HopperAttentionTile(
        256, 256, 2, 64, 2, 1, 2, False, False, 32, remake=True, late=True, hides=True, rate=1.22
    ),
    HopperAttentionTile(
        256, 256, 2, 64, 2, 1, 2, False, False, 32, remake=True, hides=True, rate=1.2
    ),
)
"""The preferred of a spec first."""


E4M3_REGISTERS = {(64, 2): (56, 224), (64, 4): (64, 104), (128, 2): (40, 232), (256, 2): (56, 224)}
"""As ``REGISTERS``, by head dim and consumers, where the loading warpgroup transposes values."""


@dataclass(frozen=True)
class HopperE4m3AttentionTile(HopperAttentionTile):
    """The same of e4m3, whose values are transposed on their way: from ``v_stages`` as they are
    loaded to ``stages``.

    ``sum_blocks``: steps whose P·V the matrix units sum, before sums in shared memory take them.
    """

    v_stages: int = 3
    sum_blocks: int = 16

    @property
    def name(self) -> str:
        return f"{super().name}-{self.v_stages}v"

    @property
    def registers(self) -> tuple[int, int]:
        return E4M3_REGISTERS[self.head_dim, self.groups]

    @property
    def shared_bytes(self) -> int:
        """Rings of Q, K, V and its transpose, sums, through whose memory results leave, control."""
        queries, keys = self.q_stages * self.bm, self.stages * self.bn
        rings = (queries + keys) * self.head_dim
        rings += (self.stages + self.v_stages) * self.bn * self.value_dim
        size = rings + self.bm * self.value_dim * 3 + _CONTROL_BYTES
        assert size <= _SHARED_BYTES
        return size


E4M3_ATTENTION = (
    HopperE4m3AttentionTile(
        *(64, 64, 4, 64, 4, 2, 1, False, True, 32),
        hides=False,
        rate=1.1,
        v_stages=4,
        sum_blocks=32,
    ),
    HopperE4m3AttentionTile(64, 64, 2, 128, 3, 2, 1, False, True, 24, hides=True, rate=1.0),
    HopperE4m3AttentionTile(128, 128, 2, 128, 3, 2, 2, True, True, 24, rate=1.45),
    HopperE4m3AttentionTile(
        256, 256, 2, 64, 2, 1, 4, True, False, 32, rate=1.6, v_stages=2, sum_blocks=32
    ),
)
"""The preferred of a spec first."""


@dataclass(frozen=True)
class HopperBackwardTile:
    """Two consumers of 64 keys each, and 64 queries a step, 128 of head dim 64.

    ``stages`` of queries, ``o_stages`` of their result's gradient, ``kv_stages`` of keys and values
    (2: the next tile's arrive during this one).
    """

    head_dim: int
    stages: int
    o_stages: int
    kv_stages: int = 1
    section_bytes: int = 32 << 20
    """Queries, their result's gradients and sums of dq of the heads whose tiles are scheduled
    together: they stay in L2."""
    rate: float = 0.0
    """The part of the arch's product rate that the loop reaches."""
    rate_in_order: float = 0.0
    """The same where sums of dq have one order."""
    block_seconds: float = 1e-6

    @property
    def name(self) -> str:
        """Keys×queries, stages of queries, of their result's gradient, of keys."""
        return f"{self.keys}x{self.step}-{self.stages}q-{self.o_stages}dout-{self.kv_stages}kv"

    cluster = 1

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def keys(self) -> int:
        return 128

    @property
    def block_keys(self) -> int:
        return self.keys

    @property
    def step(self) -> int:
        return 128 if self.head_dim <= 64 else 64

    @property
    def shared_bytes(self) -> int:
        """K and V, rings of q and dout with their rows' values, ds of two steps, control."""
        row = -(-self.head_dim // 64) * 128
        kv = self.kv_stages * 2 * self.keys * row
        ring = (self.stages + self.o_stages) * self.step * (row + 4)
        size = kv + ring + 2 * self.keys * self.step * 2 + _CONTROL_BYTES
        assert size <= _SHARED_BYTES
        return size


@dataclass(frozen=True)
class HopperWideBackwardTile:
    """Clusters of two blocks of 64 keys each, of which one consumer makes the values' gradient and
    one the keys'; 64 queries a step.

    ``stages`` of queries, ``o_stages`` of their result's gradient, each of up to 128 columns.
    """

    head_dim: int
    value_dim: int
    stages: int
    o_stages: int
    section_bytes: int = 16 << 20
    """As of the other tiles."""
    rate: float = 0.0
    """The part of the arch's product rate that the loop reaches."""
    rate_in_order: float = 0.0
    """The same where sums of dq have one order."""
    block_seconds: float = 1e-6

    cluster = 2

    @property
    def name(self) -> str:
        """Keys×queries, parts of queries and of their result's gradient."""
        return f"{self.keys}x{self.step}-{self.stages}q-{self.o_stages}dout-parts"

    @property
    def block_keys(self) -> int:
        return 64

    @property
    def keys(self) -> int:
        """Of a cluster."""
        return self.block_keys * self.cluster

    @property
    def step(self) -> int:
        return 64

    @property
    def shared_bytes(self) -> int:
        """K, V and two panels of the other block's K; parts of q with their rows' values and of
        dout; ds of two steps and of both blocks' keys; control; in whole KiB."""
        kv = self.block_keys * 2 * (self.head_dim + self.value_dim + 2 * _PANEL)
        ring = (self.stages + self.o_stages) * self.step * 4 * _PANEL + self.stages * self.step * 8
        ds = 2 * self.cluster * self.block_keys * self.step * 2
        size = -(-(kv + ring + ds + _WIDE_CONTROL_BYTES) // 1024) * 1024
        assert size <= _SHARED_BYTES
        return size


BACKWARD_REGISTERS = 24, 240
"""As ``REGISTERS``, of the gradients' two consumers."""
ATTENTION_BWD = (
    HopperBackwardTile(64, 3, 2, 2, rate=0.88, rate_in_order=0.89),
    HopperBackwardTile(96, 3, 3, rate=0.9, rate_in_order=0.88),
    HopperBackwardTile(128, 3, 3, rate=0.97, rate_in_order=0.93),
    HopperWideBackwardTile(192, 128, 4, 4, rate=0.67, rate_in_order=0.67),
    HopperWideBackwardTile(256, 256, 4, 3, rate=0.87, rate_in_order=0.89),
)
"""The preferred of a spec first."""


@dataclass(frozen=True)
class HopperLatentTile:
    """64 heads of a query and 64 keys a step, for these head dims; a ring of two tiles of keys."""

    head_dim: int
    value_dim: int
    item_cost: int = 2
    """The time that a sequence's 64 heads take beside their keys, in tiles."""
    rate: float = 0.0
    """The part of the arch's product rate that the loop reaches."""
    block_seconds: float = 3e-6

    rows = bn = 64

    @property
    def name(self) -> str:
        """Rows×keys."""
        return f"{self.rows}x{self.bn}"

    @property
    def shared_bytes(self) -> int:
        """Queries, two tiles of keys, P, control."""
        size = (self.rows + 2 * self.bn) * self.head_dim * 2 + self.rows * self.bn * 2
        size += _CONTROL_BYTES
        assert size <= _SHARED_BYTES
        return size


LATENT_REGISTERS = 72, 216
"""As ``REGISTERS``, of latent attention's two consumers."""
LATENT = (HopperLatentTile(576, 512, rate=1.15),)
"""The preferred first."""
