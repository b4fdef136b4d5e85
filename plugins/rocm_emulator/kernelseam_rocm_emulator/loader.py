"""What a driver does with a code object: its image in memory, its kernels' descriptors, and the
state they start from.

Formats: LLVM's "User Guide for AMDGPU Backend" (ELF relocations, kernel descriptor, initial
register state, kernarg and hidden arguments of code object V5) and HSA's dispatch packet.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import Relocation
from kernelseam.contract import LaunchConfig
from kernelseam.errors import DeviceError

Extents = tuple[int, int, int]

_ABS32_LO, _ABS32_HI, _ABS64, _RELATIVE64 = 1, 2, 3, 13  # R_AMDGPU_…
_DESCRIPTOR = struct.Struct("<III4xq20xIIIHH4x")
_PROPERTIES = (
    "private_segment_buffer",
    "dispatch_ptr",
    "queue_ptr",
    "kernarg_segment_ptr",
    "dispatch_id",
    "flat_scratch_init",
    "private_segment_size",
)


def image_bytes(file: ELFFile) -> int:
    """The size of a code object in memory."""
    return max(int(s["p_vaddr"] + s["p_memsz"]) for s in file.iter_segments("PT_LOAD"))


def image(file: ELFFile, base: int) -> bytes:
    """The code object as it lies in memory from ``base`` on, relocated. Raises DeviceError where
    that cannot be."""
    memory = bytearray(image_bytes(file))
    for segment in file.iter_segments("PT_LOAD"):
        start = segment["p_vaddr"]
        memory[start : start + segment["p_filesz"]] = segment.data()
    for segment in file.iter_segments("PT_DYNAMIC"):
        assert isinstance(segment, DynamicSegment)
        table = segment.get_relocation_tables().get("RELA")
        for relocation in table.iter_relocations() if table else ():
            _relocate(memory, segment, relocation, base)
    return bytes(memory)


def _relocate(
    memory: bytearray, dynamic: DynamicSegment, relocation: Relocation, base: int
) -> None:
    place, kind, number = (relocation[f"r_{n}"] for n in ("offset", "info_type", "info_sym"))
    target = base + relocation["r_addend"]
    if number:
        symbol = dynamic.get_symbol(number)
        if symbol["st_shndx"] == "SHN_UNDEF":
            raise DeviceError(
                f"the code object needs symbol {symbol.name}, which it does not define"
            )
        target += symbol["st_value"]
    if kind in (_ABS64, _RELATIVE64):
        struct.pack_into("<Q", memory, place, target)
    elif kind in (_ABS32_LO, _ABS32_HI):
        struct.pack_into("<I", memory, place, (target >> 32 * (kind == _ABS32_HI)) & 0xFFFFFFFF)
    else:
        raise DeviceError(
            f"the code object has a relocation of type {kind}, which the loader does not know"
        )


@dataclass(frozen=True)
class Descriptor:
    """A kernel descriptor (kernel_descriptor_t): what the hardware reads before a launch."""

    shared_bytes: int
    scratch_bytes: int
    """Of one lane."""
    kernarg_bytes: int
    entry: int
    """The first instruction, from the descriptor's own address."""
    rsrc1: int
    rsrc2: int
    properties: int
    preload: int

    @classmethod
    def read(cls, memory: bytes, at: int) -> Descriptor:
        shared, scratch, kernarg, entry, _, rsrc1, rsrc2, properties, preload = (
            _DESCRIPTOR.unpack_from(memory, at)
        )
        return cls(shared, scratch, kernarg, entry, rsrc1, rsrc2, properties, preload)

    @property
    def flushes_single(self) -> bool:
        """Whether float32 subnormals are lost, on input or output (FLOAT_DENORM_MODE_32 is not
        "allow both")."""
        return self.rsrc1 >> 16 & 3 != 3

    @property
    def user_registers(self) -> int:
        """How many scalar registers the driver fills in (USER_SGPR_COUNT)."""
        return self.rsrc2 >> 1 & 31


def hidden_arguments(launch: LaunchConfig) -> dict[str, int]:
    """The hidden arguments that a launch determines; the others (printf's buffer, the heap, …) are
    null."""
    dimensions = max((i + 1 for i in range(3) if launch.grid[i] * launch.block[i] > 1), default=1)
    values = {
        "hidden_grid_dims": dimensions,
        "hidden_dynamic_lds_size": launch.shared_bytes,
    }
    for i, axis in enumerate("xyz"):
        values[f"hidden_block_count_{axis}"] = launch.grid[i]
        values[f"hidden_group_size_{axis}"] = launch.block[i]
    return values


def kernarg(
    kernel: Mapping[str, Any], descriptor: Descriptor, arguments: bytes, launch: LaunchConfig
) -> bytes:
    """The segment of arguments: the packed ones as they are, then the hidden ones where the
    metadata say."""
    segment = bytearray(max(kernel[".kernarg_segment_size"], descriptor.kernarg_bytes, 16))
    segment[: len(arguments)] = arguments
    hidden = hidden_arguments(launch)
    for a in kernel.get(".args", ()):
        if a[".value_kind"].startswith("hidden_"):
            value = hidden.get(a[".value_kind"], 0)
            segment[a[".offset"] : a[".offset"] + a[".size"]] = value.to_bytes(a[".size"], "little")
    return bytes(segment)


def dispatch_packet(
    descriptor: Descriptor, launch: LaunchConfig, kernel: int, arguments: int
) -> bytes:
    """hsa_kernel_dispatch_packet_t, for kernels that ask for its address. ``kernel``,
    ``arguments``: addresses."""
    grid, block = launch.grid, launch.block
    threads = [g * b for g, b in zip(grid, block, strict=True)]
    shared = descriptor.shared_bytes + launch.shared_bytes
    return struct.pack(
        "<HHHHHHIIIIIQQQQ",
        2,
        3,
        *block,
        0,
        *threads,
        descriptor.scratch_bytes,
        shared,
        kernel,
        arguments,
        0,
        0,
    )


def user_registers(
    descriptor: Descriptor, arguments: bytes, arguments_at: int, packet_at: int
) -> list[int]:
    """The scalar registers that a wave finds filled in, in the order of the descriptor's
    properties.

    ``arguments``: the kernarg segment, parts of which may be preloaded. Raises DeviceError where
    they are too many.
    """
    values = {
        "private_segment_buffer": (0, 0, 0, 0),
        "dispatch_ptr": _words(packet_at),
        "queue_ptr": (0, 0),
        "kernarg_segment_ptr": _words(arguments_at),
        "dispatch_id": (0, 0),
        "flat_scratch_init": (0, 0),
        "private_segment_size": (descriptor.scratch_bytes,),
    }
    registers: list[int] = []
    for bit, name in enumerate(_PROPERTIES):
        if descriptor.properties >> bit & 1:
            registers.extend(values[name])
    count, first = descriptor.preload & 0x7F, descriptor.preload >> 7  # in words
    padded = arguments + bytes(4 * (first + count))
    registers.extend(struct.unpack_from(f"<{count}I", padded, 4 * first))
    if len(registers) > descriptor.user_registers:
        raise DeviceError(
            f"the kernel's descriptor asks for {len(registers)} user registers and has "
            f"{descriptor.user_registers}"
        )
    return registers + [0] * (descriptor.user_registers - len(registers))


def _words(address: int) -> tuple[int, int]:
    return address & 0xFFFFFFFF, address >> 32
