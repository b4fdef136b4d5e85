"""Tiles of the gradients of Hopper's attention: choices measured on an H200."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.frozen import dataclass

from kernelseam_cuda.sm90.tiles import (
    COLUMN_STEP,
    CONTROL_BYTES,
    PANEL,
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
    head_parts: int = 1
    """No column of the table but chosen for a problem: parts of a group's heads, each with tiles of
    its own."""
    staggered: int = 0
    """The same: KV heads whose tiles run at once and begin at queries that lie apart."""
    element_bytes: int = 0
    """Of a bias and a mask in memory, that each pair of a key and a query has."""

    @property
    def name(self) -> str:
        """Keys×queries, stages of queries, of their result's gradient, of keys."""
        stages = f"{self.stages}q-{self.o_stages}dout-{self.kv_stages}kv"
        return f"{self.keys}x{self.step}-{stages}" + _ways(self)

    def beside(self, element_bytes: int) -> HopperBackwardTile | None:
        """With so many ``element_bytes``, and of its stages as many as fit; None where none do."""
        fewer = (
            (self.stages, self.o_stages, self.kv_stages),
            (self.stages, self.o_stages, 1),
            (self.stages, 2, 1),
            (2, 2, 1),
        )
        for stages, o_stages, kv_stages in fewer:
            tile = replace(
                self,
                stages=stages,
                o_stages=o_stages,
                kv_stages=kv_stages,
                element_bytes=element_bytes,
            )
            if tile._bytes <= SHARED_BYTES:
                return tile
        return None

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
        """K and V, rings of q and dout with their rows' values, ds of two steps, what is known of a
        step's pairs, control."""
        assert self._bytes <= SHARED_BYTES
        return self._bytes

    @property
    def _bytes(self) -> int:
        row = panels_of(self.head_dim) * PANEL * 2
        kv = self.kv_stages * 2 * self.keys * row
        ring = (self.stages + self.o_stages) * self.step * (row + 4)
        return kv + ring + self.keys * self.step * (4 + self.element_bytes) + CONTROL_BYTES


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
    head_parts: int = 1
    staggered: int = 0
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
        return f"{self.keys}x{self.step}-{parts}" + _ways(self)

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


def _ways(tile: HopperBackwardTile | HopperWideBackwardTile) -> str:
    parts = f"-{tile.head_parts}head-parts" * (tile.head_parts > 1)
    return "-in-order" * tile.in_order + "-staggered" * (tile.staggered > 0) + parts


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
