"""Ways of one implementation: the tiles of a kernel, the algorithms of a library. One of them can
be forced.

An implementation that has them adds two methods to ``kernelseam.contract.Implementation``; others
leave both out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kernelseam.contract import Cost, Device, Implementation, PlanParts

SEPARATOR = ":"
"""Between an implementation's name and a variant's, where a caller names both:
"shared:128x128x64-2x2-2"."""


@dataclass(frozen=True)
class Variant:
    """One way, by a name that is the same in every process."""

    name: str
    cost: Cost


class Varied(Implementation, Protocol):
    """An implementation of several ways."""

    def variants(self, problem: Any, device: Device) -> Sequence[Variant]:
        """Those that take a problem which the implementation supports; the first is what ``build``
        builds."""

    def build_variant(self, problem: Any, device: Device, variant: str) -> PlanParts:
        """The launches of the named one."""


def variants_of(
    implementation: Implementation, problem: Any, device: Device
) -> tuple[Variant, ...]:
    """The implementation's variants; empty where it has one way only."""
    ask = getattr(implementation, "variants", None)
    return tuple(ask(problem, device)) if ask is not None else ()


def build_of(
    implementation: Implementation, problem: Any, device: Device, variant: str = ""
) -> PlanParts:
    """The launches of a variant, by default of the implementation's own choice."""
    if not variant:
        return implementation.build(problem, device)
    varied: Any = implementation
    parts: PlanParts = varied.build_variant(problem, device, variant)
    return parts
