"""The interface between planning and descriptors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kernelseam.contract import ArrayInfo, Device, Problem, Runtime
from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class Resolved:
    """Addresses by operand name, and the objects that keep them valid."""

    pointers: dict[str, int]
    keep: tuple[object, ...]
    arrays: tuple[ArrayInfo, ...] = ()


class Descriptor(Protocol):
    """What ``plan`` needs of a descriptor."""

    def problem(self) -> Problem:
        """The hashable part, without pointers."""

    def operands(self) -> dict[str, object]:
        """Pointers or arrays by operand name; operands not given are absent."""

    def simplified(self) -> tuple[Descriptor, str]:
        """An equivalent descriptor that is cheaper to compute, and a note that says so; itself and
        "" where there is none."""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Operands as given → addresses, and the objects that must stay alive with them."""
