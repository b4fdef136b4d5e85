"""Kernel signatures: they pack the argument buffer and are checked against the binary's parameters,
since drivers check neither."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import replace

from kernelseam.contract import TENSOR_MAP_BYTES, KernelFacts
from kernelseam.errors import DeviceError
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

Value = int | float | bytes


@dataclass(frozen=True)
class Kind:
    """How ``struct`` packs a scalar, its size and its alignment in bytes."""

    code: str
    size: int
    alignment: int


KINDS = {
    "pointer": Kind("Q", 8, 8),
    "i64": Kind("q", 8, 8),
    "i32": Kind("i", 4, 4),
    "f32": Kind("f", 4, 4),
    "f64": Kind("d", 8, 8),
    "tensor_map": Kind(f"{TENSOR_MAP_BYTES}s", TENSOR_MAP_BYTES, 64),
}
"""Type of a parameter → how it is packed. A tensor map is opaque: the bytes that the toolchain
encoded."""

_C_ALIGNMENT = 16
"""The alignment of parameter memory that every compiler guarantees: for members of at most this
alignment, offsets are those of a C structure."""

Member = tuple[str, "str | Structure"]
"""A member's name, and its type or structure."""


@dataclass(frozen=True)
class Structure:
    """Members laid out as in a C structure, each at the next multiple of its alignment.

    ``fields``: the members' names in the device source; by default the same names.
    """

    members: tuple[Member, ...]
    fields: tuple[str, ...] = ()

    @property
    def alignment(self) -> int:
        return max(_alignment(kind) for _, kind in self.members)

    @cached_property
    def scalars(self) -> tuple[tuple[str, str, int], ...]:
        """(name, type, offset) of each scalar, inner structures' included."""
        flat: list[tuple[str, str, int]] = []
        for (name, kind), at in zip(self.members, self._offsets[:-1], strict=True):
            inner = kind.scalars if isinstance(kind, Structure) else ((name, kind, 0),)
            flat += [(n, k, at + offset) for n, k, offset in inner]
        return tuple(flat)

    @cached_property
    def places(self) -> tuple[tuple[str, int, int], ...]:
        """Each scalar's name in the device source (an inner structure's after a dot) → its offset
        and size."""
        places: list[tuple[str, int, int]] = []
        fields = self.fields or tuple(name for name, _ in self.members)
        for field, (_, kind), at in zip(fields, self.members, self._offsets[:-1], strict=True):
            if isinstance(kind, Structure):
                places += [(f"{field}.{name}", at + offset, n) for name, offset, n in kind.places]
            else:
                places.append((field, at, _size(kind)))
        return tuple(places)

    @property
    def size(self) -> int:
        return _aligned(self._offsets[-1], self.alignment)

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """The offset of each member, then the end of the last."""
        at, places = 0, []
        for _, kind in self.members:
            at = _aligned(at, _alignment(kind))
            places.append(at)
            at += _size(kind)
        return (*places, at)


def _alignment(kind: str | Structure) -> int:
    return kind.alignment if isinstance(kind, Structure) else KINDS[kind].alignment


def _size(kind: str | Structure) -> int:
    return kind.size if isinstance(kind, Structure) else KINDS[kind].size


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


@dataclass(frozen=True)
class Signature:
    """A kernel's parameters in order: a name with a type of KINDS, or with a structure, whose
    members are then given by their names. A name may occur twice; both places get its value."""

    parameters: tuple[Member, ...]
    offsets: tuple[int, ...] | None = None
    flat: bool = False
    generated: bool = False
    in_place: bool = False
    optional: tuple[str, ...] = ()

    @cached_property
    def passed(self) -> tuple[Member, ...]:
        """The binary's parameters: structures by value, or, where ``flat``, their members."""
        if not self.flat:
            return self.parameters
        return tuple((name, kind) for name, kind, _ in Structure(self.parameters).scalars)

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter."""
        sizes = [_size(kind) for _, kind in self.passed]
        return tuple(zip(self._places, sizes, strict=True))

    @cached_property
    def _places(self) -> tuple[int, ...]:
        return Structure(self.passed)._offsets[:-1] if self.offsets is None else self.offsets

    def placed(self, facts: KernelFacts) -> Signature:
        """This signature with the parameter offsets of a binary.

        They may differ from a C structure's: a compiler may align a parameter relative to parameter
        memory, which is itself aligned to less than a tensor map. Raises DeviceError where number,
        order or sizes of parameters differ, or offsets that a C structure determines.
        """
        sizes = tuple(size for _, size in facts.parameters)
        offsets = tuple(offset for offset, _ in facts.parameters)
        ends = (0, *(offset + size for offset, size in facts.parameters))
        opaque = any(_alignment(kind) > _C_ALIGNMENT for _, kind in self.passed)
        fits = sizes == tuple(size for _, size in self.layout) and (
            all(at >= end for at, end in zip(offsets, ends, strict=False))
            if opaque
            else facts.parameters == self.layout
        )
        if not fits:
            raise DeviceError(
                f"kernel {facts.name} takes parameters at {facts.parameters}, the host packs "
                f"{self.layout}: "
                f"its device source and its kernel definition disagree"
            )
        return replace(self, offsets=offsets)

    @cached_property
    def scalars(self) -> tuple[tuple[str, str, int], ...]:
        """(name, type, offset) of every argument, members of structures included."""
        flat: list[tuple[str, str, int]] = []
        for (name, kind), at in zip(self.passed, self._places, strict=True):
            inner = kind.scalars if isinstance(kind, Structure) else ((name, kind, 0),)
            flat += [(n, k, at + offset) for n, k, offset in inner]
        return tuple(flat)

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """The names of the pointer arguments."""
        return tuple(name for name, kind, _ in self.scalars if kind == "pointer")

    @cached_property
    def _opaque(self) -> tuple[str, ...]:
        return tuple(name for name, kind, _ in self.scalars if kind == "tensor_map")

    @cached_property
    def packer(self) -> struct.Struct:
        form, end = "<", 0
        for _, kind, offset in self.scalars:
            form += "x" * (offset - end) + KINDS[kind].code
            end = offset + KINDS[kind].size
        whole = max((offset + size for offset, size in self.layout), default=0)
        return struct.Struct(form + "x" * (whole - end))

    def pack(self, values: Mapping[str, Value]) -> bytes:
        """The argument buffer. Every scalar must be given; a number beyond float32's range becomes
        an infinity."""
        scalars = self.scalars
        for name in self._opaque:  # struct would pad or cut them
            if not isinstance(value := values[name], bytes) or len(value) != TENSOR_MAP_BYTES:
                raise DeviceError(
                    f"argument {name} = {value!r} is not a tensor_map of {TENSOR_MAP_BYTES} bytes"
                )
        try:
            return self.packer.pack(*[values[name] for name, _, _ in scalars])
        except OverflowError:
            rounded = {
                n: ctypes.c_float(values[n]).value  # type: ignore[arg-type]
                for n, kind, _ in scalars
                if kind == "f32"
            }
            return self.packer.pack(*[{**values, **rounded}[name] for name, _, _ in scalars])
        except struct.error:
            for name, kind, _ in scalars:
                try:
                    struct.pack("<" + KINDS[kind].code, values[name])
                except struct.error as e:
                    raise DeviceError(
                        f"argument {name} = {values[name]!r} is not a {kind}: {e}"
                    ) from None
            raise
