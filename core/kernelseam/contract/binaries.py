"""Sources of a binary, and facts about its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from kernelseam.frozen import dataclass

NOT_KNOWN = -1
"""A count that is not available."""


@dataclass(frozen=True)
class SourceBundle:
    """All inputs of one binary: sources in memory, constants and options.

    ``files`` maps include names to texts; the file named ``main`` is compiled. ``defines`` precede
    it.
    """

    name: str
    main: str
    files: tuple[tuple[str, str], ...]
    defines: tuple[tuple[str, str], ...]
    options: tuple[str, ...] = ()

    def text(self) -> str:
        """The translation unit for the compiler, constants first."""
        head = "".join(f"#define {k} {v}\n" for k, v in self.defines)
        return f'{head}#include "{self.main}"\n'


@dataclass(frozen=True)
class KernelFacts:
    """Facts about a kernel, from its binary or from the driver. Counts that are not available are
    NOT_KNOWN."""

    name: str
    registers: int
    spills: int
    """Bytes (or registers, where the format counts those) spilled to memory; must be 0."""
    scratch_bytes: int
    shared_bytes: int
    matrix_instructions: int
    parameters: tuple[tuple[int, int], ...]
    """(offset, size) of each kernel parameter, in order."""
    extra: Mapping[str, int] = field(default_factory=dict, hash=False)
