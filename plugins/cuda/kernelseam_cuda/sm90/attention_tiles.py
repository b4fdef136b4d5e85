"""Tiles of Hopper's attention and its gradients: choices measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernelseam.descriptors.attention.problem import AttentionSpec

from kernelseam_cuda.sm90.tiles import (
    COLUMN_STEP,
    CONTROL_BYTES,
    PANEL,
    REGISTERS,
    SHARED_BYTES,
    columns_of,
    panels_of,
)

_WIDE_CONTROL_BYTES = 512
"""Barriers, and what the warps of the wide gradients' blocks tell each other."""
_ALWAYS = 1 << 30
"""More keys than a query sees."""
_WHOLE_COLUMNS = 192
"""Of a step's queries that the wide gradients have in one part; of more in two."""
_WARP_PANEL_BYTES = 16 * 128
"""A warp's rows of one panel of the result."""
_FOLLOWING = 56, 224
"""Where the loading thread follows words of visited blocks, beside two consumers."""
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
        if self.groups == 2 and self.follows:
            return _FOLLOWING
        if self.blocks == 2:
            return _FOLLOWING_BESIDE if self.follows else _BESIDE
        if self.groups == 1:
            return _BUSY_ALONE if self.page_rows == 1 or self.follows else _ALONE
        return REGISTERS[self.groups]

    @property
    def name(self) -> str:
        """Queries×keys, stages of keys, exponentials ahead."""
        way = "-turns" * self.turns + "-early" * self.early + "-remake" * self.remake
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
        return replace(self, group_heads=heads)

    @property
    def bm(self) -> int:
        return 64 * self.groups // self.value_parts

    def columns(self, head_dim: int, value_dim: int) -> float:
        """Of queries and keys and of values, whose products at ``rate`` take a step's time."""
        widest, softmax = self._multiplied(self.head_dim, self.value_dim), self.softmax_columns
        multiplied = self._multiplied(columns_of(head_dim), columns_of(value_dim))
        return widest * (multiplied + softmax) / (widest + softmax)

    def _multiplied(self, head_dim: int, value_dim: int) -> int:
        return self.value_parts * head_dim + value_dim

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
    HopperAttentionTile(64, 64, 4, 64, 4, 2, 1, False, True, 32, hides=False, rate=0.98),
    HopperAttentionTile(
        64, 64, 4, 64, 4, 2, 1, False, True, 16, hides=False, short=True, rate=1.08
    ),
    HopperAttentionTile(
        *(64, 64, 4, 64, 4, 2, 1, False, True, 32),
        remake=True,
        late=True,
        hides=True,
        rate=1.08,
        block_seconds=6e-7,
    ),
    HopperAttentionTile(
        64, 64, 4, 64, 4, 2, 1, False, True, 16, remake=True, hides=True, rate=0.95
    ),
    HopperAttentionTile(64, 64, 4, 64, 4, 2, 1, False, False, 16, by_element=True, rate=0.99),
    HopperAttentionTile(64, 64, 2, 128, 4, 2, 1, True, False, 24, by_element=True, rate=0.84),
    HopperAttentionTile(64, 64, 4, 64, 4, 1, 1, False, False, 16, has_bias=True, rate=0.95),
    HopperAttentionTile(64, 64, 2, 128, 4, 2, 1, True, False, 24, has_bias=True, rate=0.82),
    HopperAttentionTile(96, 96, 3, 96, 2, 2, 1, False, True, 24, rate=1.19),
    HopperAttentionTile(96, 96, 2, 128, 2, 2, 2, True, True, 24, rate=1.1),
    HopperAttentionTile(104, 104, 3, 64, 3, 1, 1, False, False, 16, rate=1.05),
    HopperAttentionTile(128, 128, 2, 128, 2, 2, 2, True, True, 24, rate=1.34),
    HopperAttentionTile(128, 128, 2, 128, 2, 1, 1, True, False, 24, has_bias=True, rate=1.2),
    HopperAttentionTile(128, 128, 2, 96, 2, 1, 1, True, False, 24, has_bias=True, rate=1.0),
    HopperAttentionTile(192, 128, 2, 128, 2, 1, 1, True, False, 24, softmax_columns=50, rate=1.15),
    HopperAttentionTile(192, 192, 2, 96, 2, 1, 1, True, False, 24, softmax_columns=50, rate=1.17),
    HopperAttentionTile(
        *(256, 256, 2, 64, 2, 1, 2, True, False, 32),
        fewest_heads=4,
        hides=False,
        softmax_columns=50,
        rate=1.3,
    ),
    HopperAttentionTile(
        *(256, 256, 2, 64, 2, 1, 2, False, False, 32),
        remake=True,
        late=True,
        hides=True,
        softmax_columns=50,
        rate=1.22,
    ),
    HopperAttentionTile(
        *(256, 256, 2, 64, 2, 1, 2, False, False, 32),
        remake=True,
        hides=True,
        softmax_columns=50,
        rate=1.2,
    ),
    HopperAttentionTile(
        *(512, 512, 2, 32, 2, 1, 1, False, False, 16), value_parts=2, softmax_columns=50, rate=0.9
    ),
)
"""The preferred of a spec first."""

FEW_QUERIES = (
    HopperAttentionTile(64, 64, 2, 128, 4, 2, 1, True, True, 24, most_rows=128, rate=1.1),
    HopperAttentionTile(
        *(64, 64, 1, 128, 5, 2, 1, False, True, 24), most_rows=64, rate=0.82, block_seconds=2e-7
    ),
    HopperAttentionTile(
        *(64, 64, 1, 64, 4, 2, 1, False, True, 16),
        most_rows=64,
        rate=0.88,
        block_seconds=3e-7,
        step_seconds=2.4e-7,
        blocks=2,
    ),
    HopperAttentionTile(96, 96, 1, 128, 3, 1, 1, False, False, 24, most_rows=64, rate=0.85),
    HopperAttentionTile(128, 128, 1, 128, 3, 1, 1, False, False, 24, most_rows=64, rate=0.97),
    HopperAttentionTile(
        *(128, 128, 1, 64, 2, 1, 1, False, False, 16),
        most_rows=64,
        rate=0.95,
        block_seconds=2e-7,
        step_seconds=4e-7,
        blocks=2,
    ),
    HopperAttentionTile(192, 128, 1, 128, 2, 1, 1, False, False, 24, most_rows=64, rate=1.1),
    HopperAttentionTile(192, 192, 1, 96, 2, 1, 1, False, False, 24, most_rows=64, rate=1.1),
    HopperAttentionTile(256, 256, 1, 64, 2, 1, 2, False, False, 32, most_rows=64, rate=1.25),
)
"""Beside those of ``ATTENTION``, whose other rows would be empty."""


@dataclass(frozen=True)
class HopperBackwardTile:
    """Two consumers of 64 keys each, and 64 queries a step, 128 of head dims up to 64. For head
    dims up to ``head_dim``, also of values.

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
    few_keys: int = 2048
    """Where a query sees fewer on average, sums of dq have one order even if any is allowed: to
    set them to zero first takes longer than to wait in order."""
    in_order: bool = False
    """Sums of dq have one order."""

    @property
    def name(self) -> str:
        """Keys×queries, stages of queries, of their result's gradient, of keys."""
        stages = f"{self.stages}q-{self.o_stages}dout-{self.kv_stages}kv"
        return f"{self.keys}x{self.step}-{stages}" + "-in-order" * self.in_order

    cluster = 1

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def columns(self, spec: AttentionSpec) -> tuple[int, int]:
        """That are multiplied, of queries and keys and of values. Each consumer has a piece of dq,
        of 64 queries or of 64 columns."""
        fewest = 0 if self.head_dim <= PANEL else PANEL + COLUMN_STEP
        return max(columns_of(spec.head_dim), fewest), columns_of(spec.value_dim)

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
        row = panels_of(self.head_dim) * PANEL * 2
        kv = self.kv_stages * 2 * self.keys * row
        ring = (self.stages + self.o_stages) * self.step * (row + 4)
        size = kv + ring + 2 * self.keys * self.step * 2 + CONTROL_BYTES
        assert size <= SHARED_BYTES
        return size


@dataclass(frozen=True)
class HopperWideBackwardTile:
    """Clusters of two blocks of 64 keys each, of which one consumer makes the values' gradient and
    one the keys'; 64 queries a step. For head dims up to ``head_dim`` and ``value_dim``.

    ``stages`` of queries, ``o_stages`` of their result's gradient: each of all columns, of 256 of
    half.
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
    few_keys: int = 2048
    in_order: bool = False
    """As of the other tiles."""

    cluster = 2

    def columns(self, spec: AttentionSpec) -> tuple[int, int]:
        """That are multiplied, of queries and keys and of values: of 256 in halves, else at least
        three panels of queries and keys, whose pieces of dq consumers multiply. Under a softcap
        they are whole: with a third kind of piece ptxas would serialise the products."""
        if self.head_dim > _WHOLE_COLUMNS:
            return self.head_dim, self.value_dim
        fewest = 3 * PANEL if spec.softcap else 2 * PANEL + COLUMN_STEP
        return max(columns_of(spec.head_dim), fewest), columns_of(spec.value_dim)

    @property
    def name(self) -> str:
        """Keys×queries, parts of queries and of their result's gradient."""
        parts = f"{self.stages}q-{self.o_stages}dout-parts"
        return f"{self.keys}x{self.step}-{parts}" + "-in-order" * self.in_order

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
        kv = self.block_keys * 2 * (self.head_dim + self.value_dim + 2 * PANEL)
        dims = self.head_dim, self.value_dim
        q, dout = (dim if dim <= _WHOLE_COLUMNS else dim // 2 for dim in dims)
        ring = self.step * (self.stages * (2 * q + 8) + self.o_stages * 2 * dout)
        ds = 2 * self.cluster * self.block_keys * self.step * 2
        size = -(-(kv + ring + ds + _WIDE_CONTROL_BYTES) // 1024) * 1024
        assert size <= SHARED_BYTES
        return size


BACKWARD_REGISTERS = 24, 240
"""As ``REGISTERS``, of the gradients' two consumers."""
ATTENTION_BWD = (
    HopperBackwardTile(64, 3, 2, 2, rate=0.88, rate_in_order=0.89, few_keys=8192),
    HopperBackwardTile(96, 3, 3, rate=0.9, rate_in_order=0.88),
    HopperBackwardTile(128, 3, 3, rate=0.97, rate_in_order=0.93),
    HopperWideBackwardTile(192, 128, 3, 3, rate=0.78, rate_in_order=0.79),
    HopperWideBackwardTile(192, 192, 3, 2, rate=0.72, rate_in_order=0.77, few_keys=_ALWAYS),
    HopperWideBackwardTile(256, 256, 4, 3, rate=0.87, rate_in_order=0.89, few_keys=4096),
)
"""The preferred of a spec first."""
