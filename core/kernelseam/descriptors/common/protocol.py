"""What planning asks of a descriptor, and what a descriptor makes of the operands it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kernelseam.contract import ArrayInfo, Device, Problem, Runtime


@dataclass(frozen=True)
class Resolved:
    """Addresses by operand name, and what keeps them valid."""

    pointers: dict[str, int]
    keep: tuple[object, ...]
    arrays: tuple[ArrayInfo, ...] = ()


class Descriptor(Protocol):
    """What ``plan`` wants of a descriptor."""

    def problem(self) -> Problem:
        """The hashable part, without pointers."""

    def operands(self) -> dict[str, object]:
        """Pointers or arrays by operand name; those not given are absent."""

    def simplified(self) -> tuple[Descriptor, str]:
        """An equal descriptor that is cheaper to serve, and a note saying so; itself and "" where
        there is none."""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Operands as a person gave them → addresses, and whatever must stay alive with them."""
