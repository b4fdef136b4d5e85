"""Tiles of Hopper's attention of e4m3: choices measured on an H200."""

from __future__ import annotations

from kernelseam.frozen import dataclass

from kernelseam_cuda.sm90.attention_tiles import HopperAttentionTile
from kernelseam_cuda.sm90.tiles import SHARED_BYTES

E4M3_REGISTERS = {
    (64, 2): (56, 224),
    (64, 3): (56, 152),
    (64, 4): (64, 104),
    (128, 2): (40, 232),
    (256, 2): (56, 224),
}
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
        size = rings + self.bm * self.value_dim * 3 + self.control_bytes
        assert size <= SHARED_BYTES
        return size


E4M3_ATTENTION = (
    HopperE4m3AttentionTile(
        *(64, 64, 4, 64, 4, 2, 1, False, True, 32),
        has_mask=False,
        rate=1.1,
        v_stages=4,
        sum_blocks=32,
    ),
    HopperE4m3AttentionTile(64, 64, 3, 128, 3, 2, 1, False, True, 24, has_mask=True, rate=1.05),
    HopperE4m3AttentionTile(
        64, 64, 2, 128, 3, 2, 1, False, True, 24, has_mask=True, short=True, rate=1.0
    ),
    HopperE4m3AttentionTile(128, 128, 2, 128, 3, 2, 2, True, True, 24, rate=1.45),
    HopperE4m3AttentionTile(
        256, 256, 2, 64, 2, 1, 4, True, False, 32, rate=1.6, v_stages=2, sum_blocks=32
    ),
)
"""The preferred of a spec first."""
