"""What the definitions of Hopper's kernels have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.kernels.definition import KernelDefinition

from kernelseam_cuda.sm90.constants import HOPPER
from kernelseam_cuda.toolchain import sources


class HopperKernel(KernelDefinition):
    """A kernel of sm_90a alone, whose sources are this plugin's."""

    archs = ("sm_90a",)
    texts = HOPPER

    def sources(self) -> Mapping[str, str]:
        return sources()

    def shared_bytes(self, spec: Any, tile: Any) -> int:
        return int(tile.shared_bytes)
