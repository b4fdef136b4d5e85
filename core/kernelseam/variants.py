"""Variants of one implementation: a kernel's tiles, a library's algorithms. A caller can name one.

An implementation with variants adds two methods to ``kernelseam.contract.Implementation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from kernelseam.contract import Cost, Device, Implementation, PlanParts
from kernelseam.frozen import dataclass

SEPARATOR = ":"
"""Separates an implementation's name from a variant's:
"shared:128x128x64-2x2-2"."""


@dataclass(frozen=True)
class Variant:
    """A variant. Its name is the same in every process."""

    name: str
    cost: Cost


class Varied(Implementation, Protocol):
    """An implementation with variants."""

    def variants(self, problem: Any, device: Device) -> Sequence[Variant]:
        """The variants for a supported problem; ``build`` builds the first."""

    def build_variant(self, problem: Any, device: Device, variant: str) -> PlanParts:
        """The launches of a variant, by name."""


def variants_of(
    implementation: Implementation, problem: Any, device: Device
) -> tuple[Variant, ...]:
    """The implementation's variants; () where it has none."""
    list_variants = getattr(implementation, "variants", None)
    return tuple(list_variants(problem, device)) if list_variants is not None else ()


def build_of(
    implementation: Implementation, problem: Any, device: Device, variant: str = ""
) -> PlanParts:
    """The launches of a variant, by default of the implementation's own choice."""
    if not variant:
        return implementation.build(problem, device)
    return cast(Varied, implementation).build_variant(problem, device, variant)
