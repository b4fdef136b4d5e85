"""Tiles of Hopper's products: choices measured on an H200 (``benchmarks/notes``), no code; and
what its tiles of attention share with them."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.frozen import dataclass

SHARED_BYTES = 232_448
"""Of a block."""
CONTROL_BYTES = 1024
"""Barriers, and what the block's warps tell each other of tiles."""
PANEL = 64
"""Columns of a tile in shared memory that lie together, 128 bytes a row."""
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Of a thread of the loading warpgroup and of a consumer's, by consumers: no more in all than a
launch starts with. 0: as launched."""


_LINE_BYTES = 128
"""Of the L2 cache, and of a row of a panel."""
COLUMN_STEP = 16
"""Columns that a product of 16-bit operands takes at once."""


def panels_of(dim: int) -> int:
    return -(-dim // PANEL)


def panel_bytes(itemsize: int, width: int) -> int:
    """Of a panel's row: of 8 bits also whole rows of 64 columns."""
    return min(_LINE_BYTES, width) if itemsize == 1 else _LINE_BYTES


def promotion(row_bytes: int) -> int:
    """Bytes that L2 fetches for what a head's row asks of memory. Where heads lie one beside the
    other and their rows are no whole lines, two lines at once took up to 15 % longer."""
    return 2 * _LINE_BYTES if row_bytes % _LINE_BYTES == 0 else _LINE_BYTES


def columns_of(dim: int) -> int:
    """Those that are multiplied: of the last ones TMA fills what the head dim lacks with zeros."""
    return -(-dim // COLUMN_STEP) * COLUMN_STEP


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
    few_rows: int = 0
    """Of A, that are loaded, and that there are at most; 0: all of a tile's."""
    split: int = 1
    """Blocks of a cluster that share a tile, each a part of what is summed: for few tiles."""
    group_rows: int = 8
    """Rows of clusters whose tiles are taken column by column: see tiles.h."""
    mostly_c: bool = False
    """Only for products of which C is most of what is moved."""
    fewest_tiles: int = 0
    most_tiles: int = 2**31
    """Of a result that such tiles are for; those of a cluster count as one."""
    fewest_slices: int = 0
    """Of a sum that they are for."""
    rate: float = 0.0
    """The part of the arch's product rate that the loop reaches."""
    rate_along_m: float = 0.0
    """The same where A lies along M, in boxes of 64 rows, if that differs: it takes more slices."""
    block_seconds: float = 0.0
    start_seconds: float = 0.0
    """What nothing hides of the first tiles' start and the last ones' end."""
    in_turns: bool = False
    """Of e4m3: two consumers alternate in multiplying, so that one adds up while the other does."""
    ping_pong: bool = False
    """Two consumers have a tile each, and one multiplies while the other writes."""
    tail_slices: int = 0
    """The fewest of a part into which tiles of a last wave are cut along K; 0: they are not."""
    adds_up: bool = False
    """Parts of an epilogue's sums and maxima itself, where all tiles run at once."""
    halves: bool = False
    """Of e4m3: a consumer multiplies half of its columns after the other, and adds up meanwhile."""

    @property
    def a_rows(self) -> int:
        """Of a slice of A that are loaded."""
        return self.few_rows or self.bm

    @property
    def stage_bytes(self) -> int:
        """Of a slice of A and of B."""
        return (self.a_rows + self.bn) * _LINE_BYTES

    @property
    def accumulators(self) -> tuple[int, ...]:
        """Columns of its products: of the sums of rows, and of a tile or its halves."""
        return 8, self.bn, self.bn // (1 + self.halves)

    @property
    def name(self) -> str:
        """Rows×columns, slices, who stores, cluster."""
        more = f"-{self.cluster}together" * (self.cluster > 1)
        more += f"-{self.blocks}blocks" * (self.blocks > 1)
        more += "-pingpong" * self.ping_pong + "-turns" * self.in_turns + "-halves" * self.halves
        more += "-of-a" * self.shared_a + f"-split{self.split}" * (self.split > 1)
        more += "-tail" * (self.tail_slices > 0) + "-adds" * self.adds_up
        return (
            f"{self.few_rows or self.bm}x{self.bn}-{self.stages}-{self.store}{more}"
            + "-cfirst" * self.c_first
        )

    def shared_bytes(
        self, bias: bool, sums: bool = False, scales: bool = False, table: int = 0, kept: int = 0
    ) -> int:
        """Ring, buffers, the bias of each consumer, a factor that sums rows, scales of blocks, the
        ``table`` of groups, ``kept`` parts of an epilogue's sums, control; in whole KiB."""
        size = self._bytes(bias, sums, scales, table, kept)
        assert size * self.blocks <= SHARED_BYTES
        return -(-size // 1024) * 1024

    def fits(self, bias: bool, kept: int) -> bool:
        """Whether a block has room for these beside its ring and buffers."""
        return self._bytes(bias, kept=kept) * self.blocks <= SHARED_BYTES

    def _bytes(
        self, bias: bool, sums: bool = False, scales: bool = False, table: int = 0, kept: int = 0
    ) -> int:
        size = self.stages * ((self.few_rows or self.bm) + self.bn) * 128 + self.groups * (
            self.buffers * 8192 + bias * self.bn * 4
        )
        size += 16 * (self.stages + self.groups * self.buffers) + sums * 1024
        return size + scales * self.stages * (self.bm + 4) * 4 + table + kept

    def stages_after_sums(self, sources: int) -> int:
        """Of the ring, that a split tile of a 16-bit result needs at once: ``sources`` source
        tiles, and the sums of its other blocks."""
        sums = (self.split - 1) * self.a_rows * self.bn * 4
        return sources * self.source_stages(2) + -(-sums // self.stage_bytes)

    def source_stages(self, itemsize: int) -> int:
        """Of the ring, that a source tile of such elements takes."""
        panels = -(-self.bn * itemsize // _LINE_BYTES)
        return -(-panels // min(panels, (self.a_rows + self.bn) // self.bm))


GEMM = (
    HopperGemmTile(
        *(128, 256, 2, 3, 2, 4, "tma"),
        rate=1.19,
        rate_along_m=0.97,
        block_seconds=1e-6,
        start_seconds=3e-7,
    ),
    HopperGemmTile(128, 256, 2, 4, 2, 1, "tma", rate=1.19, block_seconds=1.5e-6),
    HopperGemmTile(128, 192, 2, 5, 2, 1, "tma", rate=1.18, block_seconds=1.2e-6),
    HopperGemmTile(
        *(128, 128, 2, 5, 2, 4, "tma"),
        group_rows=1,
        mostly_c=True,
        rate=1.18,
        block_seconds=1e-7,
        start_seconds=6e-7,
    ),
    HopperGemmTile(
        *(128, 128, 2, 5, 1, 4, "tma"), rate=1.17, block_seconds=1e-7, start_seconds=5.5e-7
    ),
    HopperGemmTile(
        *(256, 128, 2, 4, 1, 2, "rows"), rate=1.15, block_seconds=5e-7, start_seconds=9e-7
    ),
    HopperGemmTile(
        *(128, 128, 2, 5, 1, 4, "rows"), rate=1.16, block_seconds=5e-7, start_seconds=3.5e-7
    ),
    HopperGemmTile(
        *(128, 64, 2, 6, 1, 4, "tma"), rate=1.02, block_seconds=3.7e-7, start_seconds=3e-7
    ),
    HopperGemmTile(
        *(64, 64, 1, 4, 1, 1, "rows"),
        blocks=3,
        rate=0.64,
        block_seconds=2e-7,
        start_seconds=1.5e-7,
    ),
)
"""Tiles of products; the cost model chooses, of equal ones the first. Where C is most of what is
moved, its stores fill the L2 cache with lines that memory has yet to take, and A and B leave it
instead, before all blocks have read them: not where pairs read B once for two blocks, and take
whole rows of tiles, so that no later one reads A again."""

AT_ONCE = (
    HopperGemmTile(
        *(128, 192, 2, 5, 2, 1, "rows"),
        b_first=True,
        most_tiles=66,
        rate=1.39,
        block_seconds=1.1e-6,
    ),
)
"""Tiles of linear layers that all run at once: no other tile's products hide TMA's stores, and the
warps' own end sooner."""

SPLIT = (
    HopperGemmTile(
        *(64, 64, 1, 4, 1, 1, "rows"),
        blocks=3,
        b_first=True,
        split=2,
        most_tiles=400,
        rate=0.56,
        block_seconds=1e-6,
    ),
    HopperGemmTile(
        *(64, 64, 1, 6, 1, 1, "rows"),
        blocks=2,
        b_first=True,
        split=2,
        most_tiles=66,
        rate=0.655,
        block_seconds=1.8e-6,
    ),
)
"""Tiles of linear layers of few tokens: products whose factors have K last, and few tiles: more
fill the GPU without a split. Where each block has a multiprocessor, a longer ring."""

_LONG = replace(SPLIT[1], stages=13, blocks=1, split=4, most_tiles=30, fewest_slices=64)
LONG_SPLIT = (replace(_LONG, rate=0.8, block_seconds=3e-6),)
"""The same of up to 30 tiles, as many as clusters of four run at once."""

ONE_WAVE = tuple(
    HopperGemmTile(
        *(bm, bn, groups, stages, 4, 1, "rows", 1, False, True, True),
        most_tiles=30,
        fewest_slices=16,
        rate=rate,
        block_seconds=seconds,
    )
    for bm, bn, groups, stages, rate, seconds in (
        (64, 96, 1, 10, 0.85, 1e-7),
        (128, 80, 2, 8, 1.25, 1e-7),
        (128, 96, 2, 7, 1.35, 5e-7),
        (192, 64, 3, 6, 1.35, 8e-7),
        (192, 80, 3, 5, 1.35, 1.1e-6),
        (192, 128, 3, 4, 1.45, 1.5e-6),
    )
)
"""Tiles of linear layers that sum much and of which one wave fills the device, by clusters of four
that share rows of A, each in a GPC. Blocks alone ask L2 for more than the 64 bytes a clock that
they have of it (benchmarks/notes/gemm-sm90.md)."""

FEW_ROWS = (
    HopperGemmTile(
        *(64, 64, 1, 13, 4, 1, "rows"),
        b_first=True,
        shared_a=True,
        most_tiles=33,
        rate=0.66,
        block_seconds=3.2e-7,
        start_seconds=2.6e-7,
    ),
)
"""Tiles of the same for up to 64 tokens: every block would read all of them; four share them."""

FEW_LOADED = tuple(
    HopperGemmTile(
        *(64, 64, 1, stages, 1, 1, "rows"),
        few_rows=rows,
        blocks=2,
        b_first=True,
        split=split,
        most_tiles=most,
        rate=rate,
        block_seconds=seconds,
    )
    for rows, stages in ((16, 9), (32, 8))
    for split, most, rate, seconds in (
        (1, 2**31, 0.7, 3e-7),
        (2, 264, 0.7, 1.1e-6),
        (4, 132, 0.6, 1.2e-6),
        (8, 66, 0.6, 2.3e-6),
    )
    if rows * split < 256
)
"""Tiles of the same for up to 16 or 32 tokens: other rows are not loaded, so that rings are longer.
(H200, 8×6144×4096, µs: 18.4 by four that share, 13.0 by blocks that load 16 rows, cuBLAS 14.2.)"""

PING_PONG = HopperGemmTile(
    *(128, 192, 2, 5, 2, 1, "tma"), ping_pong=True, rate=1.2, block_seconds=1e-7
)
"""Of linear layers, with an epilogue or without: one consumer applies it and stores while the other
multiplies. (H100, 16384×6144×4096, bursts in turns, µs: without an epilogue 1199, where 128×256
takes 1241, 128×192 1260, 128×128 1275 and cuBLAS 1258; relu 1191, silu 1206, gelu by a sigmoid
1195, gelu 1261, swiglu 1196. 4096³ and less are faster by 128×256.)"""

EPILOGUE = (
    GEMM[0],
    HopperGemmTile(128, 192, 2, 5, 2, 1, "tma", rate=1.18, block_seconds=1.2e-6),
    HopperGemmTile(
        *(128, 128, 2, 5, 1, 4, "tma"), rate=1.0, block_seconds=1e-7, start_seconds=2.8e-7
    ),
    HopperGemmTile(
        *(128, 128, 2, 5, 1, 4, "rows"), rate=0.99, block_seconds=5e-7, start_seconds=3.5e-7
    ),
    HopperGemmTile(
        *(128, 64, 2, 6, 1, 4, "tma"), rate=0.793, block_seconds=3.7e-7, start_seconds=3e-7
    ),
    HopperGemmTile(64, 64, 1, 6, 1, 1, "rows", blocks=2, rate=0.6, block_seconds=2e-7),
)
"""Tiles of products with an epilogue."""

EPILOGUE_LINEAR = (
    PING_PONG,
    *AT_ONCE,
    *(t for t in SPLIT if t.blocks == 2),
    *LONG_SPLIT,
    *ONE_WAVE,
    *FEW_ROWS,
    *FEW_LOADED,
)
"""The same of linear layers, few tokens and many."""

GROUPED = (
    HopperGemmTile(128, 256, 2, 3, 2, 4, "tma", rate=1.16, rate_along_m=1.2, block_seconds=7.6e-7),
    HopperGemmTile(
        *(128, 256, 2, 4, 1, 1, "tma"),
        group_rows=16,
        rate=1.18,
        rate_along_m=1.1,
        block_seconds=2e-6,
    ),
    HopperGemmTile(128, 192, 2, 5, 2, 1, "tma", rate=1.16, block_seconds=9.6e-7),
    HopperGemmTile(
        *(128, 128, 2, 5, 1, 2, "tma"),
        group_rows=16,
        rate=1.11,
        rate_along_m=1.06,
        block_seconds=2e-7,
    ),
    HopperGemmTile(64, 256, 1, 5, 1, 2, "rows", group_rows=16, rate=0.756, block_seconds=5.9e-7),
    HopperGemmTile(
        *(64, 128, 1, 4, 1, 1, "rows"), blocks=2, group_rows=16, rate=0.75, block_seconds=2e-7
    ),
)
"""Tiles of grouped products, beside whose rings the table of the groups has room. Up to 16 rows of
blocks, or 8 of clusters, are walked together: a group's rest, walked alone, reads all of B for a
row or two. (H100, E8 8192×4096→14336 after rest, groups of one size / skewed / Zipf's: 128×128,
which reads half as much again of L2, 1.53 / 1.81 / 1.68 ms; 128×256 by single blocks 1.26 / 1.33 /
1.28, by pairs 1.26 / 1.39 / 1.31; torch._grouped_mm 1.37 / 1.49 / 1.40. H200, at the power limit:
128×128 1.44 / 1.62 / 1.52, 128×256 by single blocks 1.47 / 1.54 / 1.52; E64 8192×2048→1408 0.119 /
0.136 / 0.137 and 0.121 / 0.147 / 0.146.)"""

GROUPED_PING_PONG = replace(PING_PONG, rate=1.2, block_seconds=1e-7)
"""The same of plain products, and of gates whose halves lie along K: what else there is takes more
registers. (H200, E8 8192×4096→14336, B along K, µs: groups of one size 1399 plain and 1396 as
swiglu, where the best of the others take 1442 and 1478; skewed ones 1560 and 1601, by 128×256 of
single blocks 1562 and 1577.)"""

GROUPED_E4M3 = (
    HopperGemmTile(128, 192, 2, 5, 1, 1, "tma", rate=1.05, block_seconds=6e-7),
    HopperGemmTile(128, 128, 2, 5, 1, 2, "tma", rate=0.97, block_seconds=3e-7),
    HopperGemmTile(64, 128, 1, 8, 1, 1, "rows", rate=0.6, block_seconds=2e-7),
)
"""The same of e4m3."""

GROUPED_INDEXED = (
    HopperGemmTile(*(128, 256, 2, 4, 1, 1, "rows"), group_rows=16, rate=1.0, block_seconds=2e-6),
    HopperGemmTile(128, 128, 2, 5, 1, 1, "rows", group_rows=16, rate=0.72, block_seconds=1e-6),
    HopperGemmTile(64, 256, 1, 5, 1, 2, "rows", group_rows=16, rate=0.82, block_seconds=2e-7),
    HopperGemmTile(
        *(64, 128, 1, 4, 1, 1, "rows"), blocks=2, group_rows=16, rate=0.58, block_seconds=2e-7
    ),
)
"""Those whose rows are gathered or scattered: warps store them. (H100, gathered, skewed sizes, in
this order: E8 8192×4096→14336 1.58, 2.22, 1.96, 2.76 ms; E64 8192×2048→1408 343, 326, 287, 338 µs,
with the host's time.)"""

GROUPED_INDEXED_E4M3 = (
    HopperGemmTile(128, 128, 2, 5, 1, 1, "rows", rate=0.95, block_seconds=5e-7),
    HopperGemmTile(64, 128, 1, 8, 1, 1, "rows", rate=0.6, block_seconds=2e-7),
)
"""The same of e4m3."""

GROUPED_E4M3_BLOCKS = (
    HopperGemmTile(
        *(128, 192, 2, 5, 1, 1, "tma"), in_turns=True, halves=True, rate=1.0, block_seconds=6e-7
    ),
    HopperGemmTile(128, 128, 2, 5, 1, 2, "tma", in_turns=True, rate=0.9, block_seconds=2e-7),
    HopperGemmTile(64, 128, 1, 8, 1, 1, "rows", rate=0.55, block_seconds=2e-7),
)
"""The same with scales of blocks."""

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
    HopperGemmTile(128, 192, 2, 5, 2, 1, "rows", b_first=True, rate=1.166, block_seconds=1e-7),
    HopperGemmTile(128, 128, 2, 5, 1, 4, "rows", rate=1.13, block_seconds=3e-7),
    HopperGemmTile(64, 64, 1, 4, 1, 1, "rows", blocks=3, rate=0.65, block_seconds=4e-7),
)
"""Tiles of products whose columns are heads; the cost model chooses."""

UNTURNED = (
    HopperGemmTile(128, 96, 2, 7, 1, 1, "rows", b_first=True, rate=1.0, block_seconds=2e-7),
)
"""More of them where no head is rotated, which takes whole groups of 64 columns. 256 tokens by
6,144 columns are 128 tiles that load an eighth less than 64×192."""

TURNED = replace(PING_PONG, fewest_tiles=512)
"""Of heads that are rotated: one consumer turns its tile while the other multiplies, from where
most tiles have one behind them. (H200, 4096→6144, µs: 4096 tokens 286, by 128×256 and 128×192
317, 16384 tokens 1236 and 1324.)"""
