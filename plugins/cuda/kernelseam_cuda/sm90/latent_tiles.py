"""Tiles of Hopper's latent attention."""

from __future__ import annotations

from kernelseam.frozen import dataclass

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
    cluster: int = 1
    """Blocks that convert a tile's keys together, which hold their scales."""

    bn = 64

    @property
    def few(self) -> bool:
        """Whether keys are the rows of products, and rows the columns."""
        return self.rows == 16

    @property
    def name(self) -> str:
        """Rows×keys, and × blocks of a cluster."""
        return f"{self.rows}x{self.bn}" + f"x{self.cluster}" * (self.cluster > 1)

    def shared_bytes(self, scaled: bool) -> int:
        """Queries, tiles of keys, P, control; of few rows two P and a result of another consumer,
        with its sums. ``scaled``: keys hold their scales, and few rows take them as they lie."""
        rows, D, DV = self.rows, self.head_dim, self.value_dim
        if self.few and scaled:  # four P each, half of a result
            size = rows * (2 * DV + 16 + 192) + 4 * self.bn * (DV + 16 + 2 * (D - DV))
            size += rows * (8 * self.bn * 2 + DV * 2) + 4096
        else:
            size = (rows + 2 * self.bn) * D * 2 + rows * self.bn * 2
            if self.few:
                size += rows * (self.bn * 2 + DV * 4) + 2048
        size += CONTROL_BYTES
        assert size <= SHARED_BYTES
        return size


LATENT_REGISTERS = 72, 216, 216
"""As ``attention_tiles.REGISTERS``, of latent attention's two consumers."""
SCALED_LATENT_REGISTERS = 128, 216, 160
"""The same where the loading warpgroup has a tile of keys of 8 bits in registers."""
CLUSTER_LATENT_REGISTERS = 104, 216, 184
"""The same where it has half of one."""
FEW_LATENT_REGISTERS = 152, 176, 176
"""The same of a tile of few rows, whose keys are of 16 bits."""
FEW_SCALED_LATENT_REGISTERS = 88, 208, 208
"""The same of keys that hold their scales."""
LATENT = (
    HopperLatentTile(576, 512, rate=0.5, rows=16),
    HopperLatentTile(576, 512, rate=1.15, cluster=2),
    HopperLatentTile(576, 512, rate=1.15),
)
"""The preferred first, where a problem has so few rows; a cluster's where keys are converted, for
an even number of blocks side by side."""
