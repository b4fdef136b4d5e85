"""A code object's kernels as lists of instructions, by the disassembler of the compiler library."""

from __future__ import annotations

from collections.abc import Mapping

from kernelseam.errors import CompileError
from kernelseam_rocm import codeobject, disassembly
from kernelseam_rocm.toolchain import in_child

from kernelseam_rocm_emulator.counting.instructions import Instruction

Listing = tuple[Instruction, ...]
"""A kernel's instructions in the order of their addresses."""


def listings(binary: bytes, arch: str) -> Mapping[str, Listing]:
    """By kernel, its instructions. Raises CompileError where nothing can disassemble here."""
    read: Mapping[str, tuple[tuple[int, str], ...]] = in_child("disassembly", arch, _texts, binary)
    return {kernel: listing(text) for kernel, text in read.items()}


def listing(texts: tuple[tuple[int, str], ...]) -> Listing:
    """Instructions of (address, text); what is no instruction is left out."""
    cut = ((address, text.split("//")[0].strip()) for address, text in texts)
    return tuple(Instruction(address, text) for address, text in cut if text)


def _texts(binary: bytes) -> Mapping[str, tuple[tuple[int, str], ...]]:
    """In a child of the compile server: comgr can end its process."""
    code = codeobject.parse(binary)
    texts_by_kernel: dict[str, tuple[tuple[int, str], ...]] = {}
    for kernel in code.code:
        texts: list[tuple[int, str]] = []

        def add(address: int, text: str, texts: list[tuple[int, str]] = texts) -> None:
            texts.append((address, text))

        if not disassembly.instructions(code, kernel, add):
            raise CompileError(kernel, code.target, "comgr, which disassembles, cannot be loaded")
        texts_by_kernel[kernel] = tuple(texts)
    return texts_by_kernel
