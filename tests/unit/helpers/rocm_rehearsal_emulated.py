"""``rocm_rehearsal`` with kernels that are compiled by hiprtc and run by the emulator: results are
theirs, times stay made up. Host rows are not for it, since their results are never described.

The emulator's process shares its arena with this one, and nothing else: torch's storages are moved
to shared memory, and the process is started anew where there are new ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import rocm_rehearsal as rehearsal
from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, Backend, Device, LaunchConfig
from kernelseam_rocm import emulator, plugin, toolchain
from kernelseam_rocm_emulator.emulation import EmulatedKernel, Emulation

launches = 0


class SharingRuntime(rehearsal.RehearsedRuntime):
    """Arrays are shared when they are first described."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(emulation.arena, 0)
        self._emulation = emulation

    def share(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not storage.is_shared():
            storage.share_memory_()
            self._emulation.emulator.stop()
        return tensor

    def describe(self, array: object) -> ArrayInfo | None:
        return super().describe(self.share(array) if torch_arrays.is_tensor(array) else array)

    def empty(self, shape: Any, dtype: Any, device: Device, like: Any = None) -> object:
        array = super().empty(shape, dtype, device, like)
        return self.share(array) if torch_arrays.is_tensor(array) else array


def rehearse_plugin() -> None:
    """Have the ROCm plugin find one device, an emulated one."""
    emulation = emulator.required()
    assert isinstance(emulation, Emulation)
    runtime = SharingRuntime(emulation)
    chain, made = toolchain.HipToolchain(runtime), plugin.backend()
    found = Backend("rocm", runtime, chain, made.implementations, kernels=made.kernels, priority=10)
    plugin.backend = lambda: found  # type: ignore[assignment]
    prepare = EmulatedKernel.prepare

    def prepared(
        self: EmulatedKernel, config: LaunchConfig, arguments: bytes
    ) -> Callable[[int], None]:
        launch = prepare(self, config, arguments)

        def unless_captured(stream: int) -> None:
            global launches
            if not rehearsal.capturing:
                launches += 1
                launch(stream)

        return unless_captured

    EmulatedKernel.prepare = prepared  # type: ignore[method-assign]
    from benchmarks.comparing.rows import Session

    def shared(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: runtime.share(make(*given))

    # lists of addresses are made before anything is described
    Session.random = shared(Session.random)  # type: ignore[method-assign]
    Session.poisoned = shared(Session.poisoned)  # type: ignore[method-assign]


if __name__ == "__main__":
    status = rehearsal.main(sys.argv[1:], rehearse_plugin)
    print(f"{launches} emulated launches")
    sys.exit(status)
