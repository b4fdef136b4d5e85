"""Tiles of Hopper's latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from kernelseam_cuda.sm90.tiles import CONTROL_BYTES, SHARED_BYTES


@dataclass(frozen=True)
class HopperLatentTile:
    """64 rows, queries with their heads, or 16, and 64 keys a step, for these head dims; a ring of
    two tiles of keys."""

    head_dim: int
    value_dim: int
    item_cost: int = 2
    """The time that 64 rows take beside their keys, in tiles."""
    rate: float = 0.0
    """The part of the arch's product rate that the loop reaches."""
    block_seconds: float = 3e-6

    rows: int = 64

    bn = 64

    @property
    def few(self) -> bool:
        """Whether keys are the rows of products, and rows the columns."""
        return self.rows == 16

    @property
    def name(self) -> str:
        """Rows×keys."""
        return f"{self.rows}x{self.bn}"

    @property
    def shared_bytes(self) -> int:
        """Queries, two tiles of keys, P, control."""
        size = (self.rows + 2 * self.bn) * self.head_dim * 2 + self.rows * self.bn * 2
        if self.few:  # P and a result of another consumer, with its sums
            size += self.rows * (self.bn * 2 + self.value_dim * 4) + 2048
        size += CONTROL_BYTES
        assert size <= SHARED_BYTES
        return size


LATENT_REGISTERS = 72, 216, 216
"""As ``attention_tiles.REGISTERS``, of latent attention's two consumers."""
SCALED_LATENT_REGISTERS = 128, 216, 160
"""The same where the loading warpgroup has a tile of keys of 8 bits in registers."""
FEW_LATENT_REGISTERS = 152, 176, 176
"""The same of a tile of few rows."""
LATENT = (HopperLatentTile(576, 512, rate=0.5, rows=16), HopperLatentTile(576, 512, rate=1.15))
"""The preferred first, where a problem has so few rows."""
