"""Binaries: the sources of one, and what it says of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NOT_KNOWN = -1
"""A count that whoever made the facts cannot tell."""


@dataclass(frozen=True)
class SourceBundle:
    """All that shapes one binary: sources held in memory, constants, and the kernels it must
    contain.

    ``files`` maps include names to texts; the file named ``main`` is compiled. ``defines`` stand
    before it.
    """

    name: str
    main: str
    files: tuple[tuple[str, str], ...]
    defines: tuple[tuple[str, str], ...]
    options: tuple[str, ...] = ()

    def text(self) -> str:
        """The translation unit handed to the compiler, constants first."""
        head = "".join(f"#define {k} {v}\n" for k, v in self.defines)
        return f'{head}#include "{self.main}"\n'


@dataclass(frozen=True)
class KernelFacts:
    """What a binary, or the driver that loaded it, says of a kernel. Counts that nobody tells are
    NOT_KNOWN."""

    name: str
    registers: int
    spills: int
    """Bytes (or registers, where the format counts those) spilled to memory; 0 is wanted
    everywhere."""
    scratch_bytes: int
    shared_bytes: int
    matrix_instructions: int
    parameters: tuple[tuple[int, int], ...]
    """(offset, size) of each kernel parameter, in order."""
    extra: Mapping[str, int] = field(default_factory=dict, hash=False)
