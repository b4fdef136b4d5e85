"""Launches of emulated devices, counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernelseam.contract import LaunchConfig
from kernelseam_rocm import codeobject
from kernelseam_rocm.codeobject import CodeObject

from kernelseam_rocm_emulator.counting import iteration
from kernelseam_rocm_emulator.counting.instructions import Access, accesses
from kernelseam_rocm_emulator.counting.iteration import Iteration
from kernelseam_rocm_emulator.counting.listing import Listing, listings
from kernelseam_rocm_emulator.counting.recorder import Tally


@dataclass(frozen=True)
class Counted:
    """A launch that ran."""

    arch: str
    kernel: str
    code: CodeObject
    launch: LaunchConfig
    listing: Listing
    tallies: Mapping[int, Tally]
    """By instruction's address; what never ran has none."""

    def iteration(self) -> Iteration | None:
        """Of its hot loop; None where none with matrix instructions ran."""
        return iteration.executed(self.listing, self.arch, self.tallies)


class Recording:
    """What is counted while it is the emulator's."""

    def __init__(self) -> None:
        self.launches: list[Counted] = []
        self._listings: dict[tuple[bytes, str], Mapping[str, Listing]] = {}

    def accesses(self, elf: bytes, arch: str, kernel: str) -> Mapping[int, Access]:
        """Of a kernel's instructions. Raises CompileError where nothing disassembles here."""
        return accesses(self._listing(elf, arch)[kernel])

    def add(
        self, elf: bytes, arch: str, kernel: str, launch: LaunchConfig, tallies: Mapping[int, Tally]
    ) -> None:
        listing = self._listing(elf, arch)[kernel]
        code = codeobject.parse(elf)
        self.launches.append(Counted(arch, kernel, code, launch, listing, tallies))

    def _listing(self, elf: bytes, arch: str) -> Mapping[str, Listing]:
        cached = self._listings.get((elf, arch))
        if cached is None:
            cached = self._listings[elf, arch] = listings(elf, arch)
        return cached
