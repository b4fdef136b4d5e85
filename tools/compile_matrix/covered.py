"""A kernel for a spec, as the tests of compilation and the table of kernel facts use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from kernelseam.contract import ArchRow
from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.dtypes import DType
from kernelseam.expressions.epilogues import epilogue_of
from kernelseam.frozen import dataclass
from kernelseam.kernels.definition import KernelDefinition

UNIFORM: dict[str, Any] = {"softcap": True, "sinks": True}
"""Of a spec: scores of all keys alike, wherever they are."""
_HEADS = 4
"""Of a group."""


@dataclass(frozen=True)
class Covered:
    """A kernel for a spec, one binary for each tile that an arch has for it."""

    kernel: KernelDefinition
    spec: Any
    grouped: bool = False
    """Whether the heads of a group share a block."""
    often: bool = True
    """Whether it is compiled in every run of the tests, or in the slow ones alone."""

    @property
    def products(self) -> bool:
        """Whether it multiplies matrices."""
        return self.kernel.multiplies

    def tiles(self, row: ArchRow) -> tuple[Any, ...]:
        """The arch's tiles as launches use them; none where the kernel is for other archs."""
        if self.kernel.archs and row.arch not in self.kernel.archs:
            return ()
        tiles = tuple(
            v
            for t in self.kernel.tiles(self.spec, row)
            for v in self.kernel.as_launched(self.spec, t)
        )
        return tuple(t.sharing(_HEADS) for t in tiles) if self.grouped else tiles

    def __str__(self) -> str:
        return " ".join((self.kernel.entry, *_words(self.spec), *["grouped"] * self.grouped))


def _words(spec: Any) -> Iterator[str]:
    """A spec's own values; options only where they are set."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if hasattr(value, "__dataclass_fields__"):
            yield from _words(value)
        elif isinstance(value, bool):
            if field.name == "deterministic":
                yield from ["any_order"] * (not value)
            else:
                yield from [field.name] * value
        elif isinstance(value, DType):
            yield value.value if field.name.startswith("dtype") else f"{field.name}={value}"
        elif isinstance(value, int):
            yield f"{field.name}={value}"
        elif field.name == "epilogue":
            if value is not None:
                structure = epilogue_of(value)
                words = {
                    "captures": structure.numbers or structure.arrays,
                    "reductions": structure.reductions,
                    structure.pairs: structure.pairs,
                }
                yield "-".join(("epilogue", *(word for word, there in words.items() if there)))
        elif value is not None and (
            isinstance(spec, GemmSpec) or value not in ("strided", field.default or None)
        ):
            yield value if field.name == "view" else f"{field.name}={value}"
