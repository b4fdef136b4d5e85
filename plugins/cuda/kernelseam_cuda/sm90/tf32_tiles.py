"""Tiles of Hopper's float32 products by way of TF32: choices measured on an H200, no code."""

from __future__ import annotations

from kernelseam.frozen import dataclass

from kernelseam_cuda.sm90.tiles import SHARED_BYTES


@dataclass(frozen=True)
class HopperTf32Tile:
    """``groups`` consumers of 64 rows of the left factor and ``columns`` of the right, through a
    ring of ``stages`` slices of 32.

    ``blocks``: that share a multiprocessor; ``loaders``: warpgroups that load and split;
    ``swap_ab``: the left factor is op(B)ᵀ.
    """

    precision: str
    groups: int
    columns: int
    stages: int
    blocks: int = 1
    loaders: int = 1
    swap_ab: bool = False
    rate: float = 0.0
    """Of the arch's plain float32 units."""
    block_seconds: float = 0.0

    cluster = 1
    shared_a = False
    group_rows = 8

    @property
    def bm(self) -> int:
        return self.columns if self.swap_ab else 64 * self.groups

    @property
    def bn(self) -> int:
        return 64 * self.groups if self.swap_ab else self.columns

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
        assert size * self.blocks <= SHARED_BYTES
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
