"""What the definitions of Hopper's kernels have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kernelseam.contract import ArchRow
from kernelseam.kernels.definition import KernelDefinition

from kernelseam_cuda.sm90.constants import HOPPER
from kernelseam_cuda.toolchain import sources

_COLUMNS = (8, *range(16, 257, 16))
_OPERANDS = 22
"""Of a product of four steps, beside the accumulator."""


class HopperKernel(KernelDefinition):
    """A kernel of sm_90a alone, whose sources are this plugin's."""

    archs = ("sm_90a",)
    texts = HOPPER

    def sources(self) -> Mapping[str, str]:
        return sources()

    def accumulators(self, spec: Any, tile: Any) -> Iterable[int]:
        """Columns of the accumulators of its products, of which ``sm90/wgmma.h`` then has shapes:
        by default all that there are."""
        return _COLUMNS if self.multiplies else ()

    def defines(self, spec: Any, tile: Any, row: ArchRow) -> dict[str, object]:
        shapes = []
        for n in sorted(set(self.accumulators(spec, tile))):
            places = ", ".join(str(n // 2 + i) for i in range(_OPERANDS))
            shapes.append(f"KS_SHAPE({n}, {places})")
        return {"SHAPES": " ".join(shapes)}

    def shared_bytes(self, spec: Any, tile: Any) -> int:
        return int(tile.shared_bytes)
