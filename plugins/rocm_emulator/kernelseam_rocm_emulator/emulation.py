"""The emulated devices of a process: their memory, their kernels, the emulator that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from kernelseam.compilation import cache_folder
from kernelseam.compilation.folder import private
from kernelseam.contract import KernelFacts, LaunchConfig, Toolchain
from kernelseam.errors import DeviceError
from kernelseam_rocm.emulator import required as required_emulator
from kernelseam_rocm.launch import check_arguments

from kernelseam_rocm_emulator.checkout import Checkout, find
from kernelseam_rocm_emulator.counting.recording import Recording
from kernelseam_rocm_emulator.devices import EmulatedRuntime
from kernelseam_rocm_emulator.memory import Arena
from kernelseam_rocm_emulator.worker import Emulator

CAPACITY = 16 << 30
"""Bytes of address space reserved for the memory of all emulated devices."""


class Emulation:
    """kernelseam_rocm.emulator.Emulator: one for all emulated devices of this process."""

    def __init__(self, checkout: Checkout) -> None:
        self.checkout = checkout
        self.arena = Arena(CAPACITY)
        self.emulator = Emulator(checkout, self.arena, folder)
        self._tested: set[str] = set()
        self.used: set[tuple[str, str]] = set()
        """Arch and digest of every code object so far."""

    @property
    def source(self) -> str:
        return str(self.checkout.folder)

    def runtime(self, first: int) -> EmulatedRuntime:
        """The runtime of the emulated devices, whose indices begin with ``first``."""
        return EmulatedRuntime(self.arena, first)

    def kernel(
        self, binary: bytes, digest: str, facts: KernelFacts, arch: str, toolchain: Toolchain
    ) -> EmulatedKernel:
        """A kernel of a code object, once the self-test of its arch has passed. Raises DeviceError,
        CompileError."""
        if arch not in self._tested:
            from kernelseam_rocm_emulator.selftest import required

            required.require(self.emulator, arch, toolchain)
            self._tested.add(arch)
        self.used.add((arch, digest))
        return EmulatedKernel(self.emulator, binary, digest, facts, arch)


class EmulatedKernel:
    """kernelseam.contract.LoadedKernel: a kernel in the emulator's process."""

    def __init__(
        self, emulator: Emulator, binary: bytes, digest: str, facts: KernelFacts, arch: str
    ) -> None:
        self._emulator, self._binary, self._digest, self._arch = emulator, binary, digest, arch
        self.facts = facts

    def prepare(self, config: LaunchConfig, arguments: bytes) -> Callable[[int], None]:
        """See the contract. A launch returns when it has finished; it raises DeviceError for a
        fault of the kernel.

        Raises InvalidValue where the arguments' size is not the kernel's."""
        config.require_plain("rocm")
        check_arguments(arguments, self.facts)

        def launch(stream: int) -> None:
            self._emulator.launch(
                self._digest, self._binary, self._arch, self.facts.name, config, arguments
            )

        return launch


def folder() -> Path:
    """The folder for the emulator's persistent files, within the binary cache's; created if
    missing. Raises DeviceError."""
    place = cache_folder() / "emulation"
    try:
        private(place.parent, make=True)
        private(place, make=True)
    except (OSError, ValueError) as e:
        raise DeviceError(f"emulation needs a folder of its own: {e}") from e
    return place


@cache
def _started(checkout: Checkout) -> Emulation:
    return Emulation(checkout)


def start() -> Emulation | str:
    """The process's emulator, or what is missing for it."""
    checkout = find()
    return _started(checkout) if isinstance(checkout, Checkout) else checkout


@contextmanager
def recorded() -> Iterator[Recording]:
    """Within the block, every launch of an emulated device is counted, at half its speed or less.
    Raises NoDevice where nothing is emulated."""
    emulation = required_emulator()
    assert isinstance(emulation, Emulation)
    recording = emulation.emulator.recording = Recording()
    try:
        yield recording
    finally:
        emulation.emulator.recording = None
