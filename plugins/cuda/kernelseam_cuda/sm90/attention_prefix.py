"""Pages that entries share, by Hopper's attention: all queries of a group over the shared keys in
tiles of wgmma."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.attention.cost import least_seconds
from kernelseam.kernels.attention.prefix_groups import FORWARD, PrefixGroups
from kernelseam.kernels.attention.ragged import expected_tiles

from kernelseam_cuda.sm90.attention import HopperAttention
from kernelseam_cuda.sm90.attention_few import fits, parted, shared_rows
from kernelseam_cuda.sm90.attention_tiles import HopperAttentionTile


class HopperParts(HopperAttention):
    """Attention with a result of float32, for another merge: by two parts of the keys or more,
    which alone have such results."""

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        spec = replace(problem.spec, dtype_out=None)
        return super().refuse(replace(problem, spec=spec), row)

    def tiles_of(self, problem: AttentionProblem, row: ArchRow) -> tuple[HopperAttentionTile, ...]:
        """None of a cluster, which merges its parts itself."""
        known = super().tiles_of(problem, row)
        apart = (replace(t, in_cluster=False) for t in known if fits(problem, t))
        return tuple(dict.fromkeys(apart))

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> HopperAttentionTile:
        shared = (shared_rows(problem, t) for t in self.tiles_of(problem, row))
        counted = ((t, expected_tiles(problem, t.rows, t.group_heads)) for t in shared)
        units = device.limits.compute_units
        tiles = (x for t, count in counted for x in parted(problem, t, count, units))
        in_parts = dict.fromkeys(replace(t, parts=max(t.parts, 2)) for t in tiles)
        return least_seconds(self, problem, in_parts, row, device)

    def takes(
        self, problem: AttentionProblem, tile: HopperAttentionTile, row: ArchRow, device: Device
    ) -> bool:
        return tile.parts > 1 and super().takes(problem, tile, row, device)


PREFIX_GROUPS = PrefixGroups(
    (HopperParts(), FORWARD),
    name=f"{HopperAttention.name}-prefix-groups",
    archs=HopperAttention.archs,
)
