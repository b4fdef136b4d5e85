"""Emulated AMD devices: they run hiprtc's code objects through an emulator of AMD's instructions.

The emulator is the one in tinygrad's test tree, located by KERNELSEAM_TINYGRAD; this package has
none of its code. It runs in its own process. This package has the loader, launches, guarded memory,
and patches for what the emulator lacks. `kernelseam_rocm.emulator` calls `start`.
"""

from kernelseam_rocm_emulator.emulation import EmulatedKernel, Emulation, start

__all__ = ["EmulatedKernel", "Emulation", "start"]
