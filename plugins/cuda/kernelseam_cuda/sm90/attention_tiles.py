"""Tiles of Hopper's attention: choices measured on an H200."""

from __future__ import annotations

from kernelseam.forking import cached_property
from kernelseam.frozen import changed, dataclass

from kernelseam_cuda.sm90.tiles import (
    CONTROL_BYTES,
    PANEL,
    REGISTERS,
    SHARED_BYTES,
    columns_of,
    panels_of,
)

CONSUMER_ROWS = 64
"""Of a product of one consumer."""
_WARP_PANEL_BYTES = 16 * 128
"""A warp's rows of one panel of the result."""
_BUSY = 56, 224
"""Where the loading thread follows words of visited blocks, or copies rows of pages for consumers
that have parts of queries, beside two consumers."""
_ALONE = 40, 240
"""Registers, as ``REGISTERS``, beside a single consumer of attention."""
_BUSY_ALONE = 88, 240
"""The same where threads copy rows of pages, or follow words of visited blocks."""
_BESIDE, _FOLLOWING_BESIDE = (40, 216), (56, 200)
"""The same where two blocks share a multiprocessor."""


@dataclass(frozen=True)
class HopperAttentionTile:
    """``groups`` consumers of 64 queries and ``bn`` keys a step, for head dims up to these.

    ``stages`` of keys and of values, ``q_stages`` of queries; ``out_stages`` panels a warp through
    which results leave; ``ping_pong``: two consumers alternate in issuing products; ``early``: the
    next tile's first product starts before this one's last; ``ahead``: elements of a thread's part
    of the scores, of ``bn``/2, whose exponentials come before the wait for P·V.
    """

    head_dim: int
    value_dim: int
    groups: int
    bn: int
    stages: int
    q_stages: int
    out_stages: int
    ping_pong: bool
    early: bool
    ahead: int
    recompute_nan: bool = False
    """Rows that a masked key's NaN reached are computed again, in place of a search of V ahead of
    its use."""
    late: bool = False
    """A block asks for its next tile when it is nearly done with one, not when it begins it: for
    causal specs, whose tiles differ in length. Packed sequences' always are asked for late: of a
    batch of few long ones a block that had begun one kept the next (H200, 60 sequences of up to
    3,769 rows of one head of 96 columns: 64 µs, 53 late; over pages, 3 × 70 queries of 6,436 keys
    beside single ones: 133, 76 late)."""
    fewest_heads: int = 2
    """Of a section, whose tiles are handed out together."""
    has_mask: bool | None = None
    """Only for specs that mask keys by their position, or only for others; None: for all."""
    short: bool = False
    """For few keys; a batch-invariant spec does not ask."""
    has_bias: bool = False
    """For specs with a bias, and no others."""
    by_element: bool = False
    """Only for specs whose scores or masks are computed by element."""
    most_rows: int = 0
    """Only for so few queries of heads that share keys; 0: for any number."""
    group_heads: int = 1
    """No column of the table but chosen for a problem, as ``parts``: query heads that share a
    tile's rows."""
    parts: int = 1
    """Of a tile's keys, each a work tile."""
    in_cluster: bool = False
    """The parts are the blocks of a cluster, which merge their results; else another kernel does.
    No column of the table, either."""
    rate: float = 0.0
    """The part of the arch's product rate that the loop reaches at the widest head dims."""
    softmax_columns: int = 200
    """Columns whose products would take the time by which a step takes longer than its products."""
    block_seconds: float = 1e-6
    step_seconds: float = 0.0
    """Of a step of a block that is alone on its multiprocessor, where it could share it."""
    page_rows: int = 0
    """Of keys in pages: rows of a box, or 1 where threads copy them."""
    blocks: int = 1
    """That share a multiprocessor."""
    value_parts: int = 1
    """Consumers that share rows, each with a part of the values' columns; each computes the rows'
    weights."""

    follows: bool = False
    """No column of the table: blocks of keys come by a list."""
    bias_size: int = 0
    """No column of the table: bytes of an element of a bias, whose rows by a step's keys are in
    shared memory."""

    v_stages = sum_blocks = 0

    @property
    def is_plain(self) -> bool:
        """Whether it serves scores that are products, too."""
        return not (self.by_element or self.has_bias)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the loading warpgroup and of a consumer's."""
        copying = self.page_rows == 1 and self.parts == 1 and not self.whole_queries
        if self.groups == 2 and (self.follows or copying):
            return _BUSY
        if self.blocks == 2:
            return _FOLLOWING_BESIDE if self.follows else _BESIDE
        if self.groups == 1:
            return _BUSY_ALONE if self.page_rows == 1 or self.follows else _ALONE
        return REGISTERS[self.groups]

    @property
    def name(self) -> str:
        """Queries×keys, stages of keys, exponentials ahead."""
        way = (
            "-pingpong" * self.ping_pong
            + "-early" * self.early
            + "-recompute-nan" * self.recompute_nan
        )
        way += "-late" * self.late
        way += f"-{self.fewest_heads}heads" * (self.fewest_heads != 2)
        way += f"-{self.value_parts}value-parts" * (self.value_parts > 1)
        way += f"-{self.blocks}beside" * (self.blocks > 1)
        way += "-grouped" * (self.group_heads > 1)
        way += f"-{self.parts}{'blocks' if self.in_cluster else 'parts'}" * (self.parts > 1)
        way += f"-{self.page_rows}page-rows" * (self.page_rows > 0)
        return f"{self.bm}x{self.bn}-{self.stages}-{self.ahead}ahead{way}"

    def sharing(self, heads: int) -> HopperAttentionTile:
        """The tile with rows of so many heads."""
        return changed(self, group_heads=heads) if heads != self.group_heads else self

    @cached_property
    def bm(self) -> int:
        return CONSUMER_ROWS * self.groups // self.value_parts

    @cached_property
    def rows(self) -> int:
        """Of ``bm`` those in use: the heads of whole queries."""
        return self.bm // self.group_heads * self.group_heads

    @property
    def whole_queries(self) -> bool:
        """Whether a consumer's rows are whole queries."""
        return CONSUMER_ROWS % self.group_heads == 0

    @property
    def box_queries(self) -> int:
        """That TMA brings at once: a consumer's, or where these are no whole ones, a tile's."""
        return (CONSUMER_ROWS if self.whole_queries else self.bm) // self.group_heads

    def columns(self, head_dim: int, value_dim: int) -> float:
        """Of queries and keys and of values, whose products at ``rate`` take a step's time."""
        parts, softmax = self.value_parts, self.softmax_columns
        widest = parts * self.head_dim + self.value_dim
        multiplied = parts * columns_of(head_dim) + columns_of(value_dim)
        return widest * (multiplied + softmax) / (widest + softmax)

    @property
    def control_bytes(self) -> int:
        """With pages, also where rows lie that are loaded next: of boxes those of two blocks, of
        single rows those of the ring's and of two more."""
        if self.page_rows == 1:
            places = 4 * (self.stages + 2) * (1 << (self.bn - 1).bit_length())
            return CONTROL_BYTES + -(-places // 1024) * 1024
        return CONTROL_BYTES * (2 if self.page_rows else 1)

    @property
    def shared_bytes(self) -> int:
        """Rings of Q, K and V, staging of the result, control."""
        k, v = (panels_of(dim) * PANEL * 2 for dim in (self.head_dim, self.value_dim))
        rings = self.q_stages * self.bm * k + self.stages * self.bn * (k + v)
        size = rings + self.groups * 4 * self.out_stages * _WARP_PANEL_BYTES + self.control_bytes
        return size + self.bias_bytes

    @property
    def bias_bytes(self) -> int:
        """Of a bias's rows, 16 bytes of each unused."""
        return self.bm * (self.bn * self.bias_size + 16) if self.bias_size else 0

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED_BYTES


ATTENTION = (
    HopperAttentionTile(
        64, 64, 4, 64, 4, 2, 1, False, True, 32, has_mask=False, rate=1.1, block_seconds=1.5e-6
    ),
    HopperAttentionTile(
        64,
        64,
        4,
        64,
        4,
        2,
        1,
        False,
        True,
        16,
        has_mask=False,
        short=True,
        rate=1.01,
        block_seconds=1.3e-6,
    ),
    HopperAttentionTile(
        *(64, 64, 4, 64, 4, 2, 1, False, True, 32),
        recompute_nan=True,
        late=True,
        has_mask=True,
        rate=1.04,
        block_seconds=2.1e-6,
    ),
    HopperAttentionTile(
        *(64, 64, 4, 64, 4, 2, 1, False, True, 16),
        recompute_nan=True,
        has_mask=True,
        rate=0.923,
        block_seconds=2.5e-6,
    ),
    HopperAttentionTile(
        *(64, 64, 3, 96, 4, 2, 1, False, False, 24),
        recompute_nan=True,
        late=True,
        has_mask=True,
        rate=0.95,
        block_seconds=2.4e-6,
    ),
    HopperAttentionTile(64, 64, 4, 64, 4, 2, 1, False, False, 16, by_element=True, rate=0.99),
    HopperAttentionTile(64, 64, 2, 128, 4, 2, 1, True, False, 24, by_element=True, rate=0.84),
    HopperAttentionTile(
        64, 64, 4, 64, 4, 1, 1, False, False, 8, has_mask=False, has_bias=True, rate=0.95
    ),
    HopperAttentionTile(64, 64, 2, 128, 4, 2, 1, True, False, 24, has_bias=True, rate=0.82),
    HopperAttentionTile(64, 64, 2, 128, 3, 2, 1, True, False, 24, has_bias=True, rate=0.8),
    HopperAttentionTile(96, 96, 3, 96, 2, 2, 1, False, True, 24, rate=1.19, block_seconds=2.8e-6),
    HopperAttentionTile(96, 96, 2, 128, 2, 2, 2, True, True, 24, rate=1.1, block_seconds=2.4e-6),
    HopperAttentionTile(104, 104, 3, 64, 3, 1, 1, False, False, 16, rate=1.05),
    HopperAttentionTile(128, 128, 2, 128, 2, 2, 2, True, True, 24, rate=1.37, block_seconds=2.8e-6),
    HopperAttentionTile(128, 128, 2, 128, 2, 1, 1, True, False, 24, has_bias=True, rate=1.2),
    HopperAttentionTile(128, 128, 2, 96, 2, 1, 1, True, False, 24, has_bias=True, rate=1.0),
    HopperAttentionTile(192, 128, 2, 128, 2, 1, 1, True, False, 24, softmax_columns=50, rate=1.15),
    HopperAttentionTile(192, 192, 2, 96, 2, 1, 1, True, False, 24, softmax_columns=50, rate=1.17),
    HopperAttentionTile(
        *(256, 256, 2, 64, 2, 1, 2, True, False, 32),
        fewest_heads=4,
        has_mask=False,
        softmax_columns=50,
        rate=1.33,
        block_seconds=3e-6,
    ),
    HopperAttentionTile(
        *(256, 256, 2, 64, 2, 1, 2, False, False, 32),
        recompute_nan=True,
        late=True,
        has_mask=True,
        softmax_columns=50,
        rate=1.35,
        block_seconds=2.5e-6,
    ),
    HopperAttentionTile(
        *(256, 256, 2, 64, 2, 1, 2, False, False, 32),
        recompute_nan=True,
        has_mask=True,
        softmax_columns=50,
        rate=1.17,
        block_seconds=2.5e-6,
    ),
    HopperAttentionTile(
        *(512, 512, 2, 32, 2, 1, 1, False, False, 16), value_parts=2, softmax_columns=50, rate=0.9
    ),
)
"""The preferred of a spec first."""

FEW_QUERIES = (
    HopperAttentionTile(
        64, 64, 2, 128, 4, 2, 1, True, True, 24, most_rows=128, rate=0.993, block_seconds=2.2e-6
    ),
    HopperAttentionTile(
        *(64, 64, 1, 128, 5, 2, 1, False, True, 24), most_rows=64, rate=0.671, block_seconds=8.9e-7
    ),
    HopperAttentionTile(
        *(64, 64, 1, 64, 4, 2, 1, False, True, 16),
        most_rows=64,
        rate=0.738,
        block_seconds=6.8e-7,
        step_seconds=2.7e-7,
        blocks=2,
    ),
    HopperAttentionTile(96, 96, 1, 128, 3, 1, 1, False, False, 24, most_rows=64, rate=0.85),
    HopperAttentionTile(
        128, 128, 1, 128, 3, 1, 1, False, False, 24, most_rows=64, rate=0.99, block_seconds=1.5e-6
    ),
    HopperAttentionTile(
        *(128, 128, 1, 64, 2, 1, 1, False, False, 16),
        most_rows=64,
        rate=0.894,
        block_seconds=3.9e-7,
        step_seconds=5.8e-7,
        blocks=2,
    ),
    HopperAttentionTile(192, 128, 1, 128, 2, 1, 1, False, False, 24, most_rows=64, rate=1.1),
    HopperAttentionTile(192, 192, 1, 96, 2, 1, 1, False, False, 24, most_rows=64, rate=1.1),
    HopperAttentionTile(
        256, 256, 1, 64, 2, 1, 2, False, False, 32, most_rows=64, rate=1.07, block_seconds=7.4e-7
    ),
)
"""Beside those of ``ATTENTION``, whose other rows would be empty."""
