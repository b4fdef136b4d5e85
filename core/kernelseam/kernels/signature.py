"""Kernel arguments packed by our own signature and checked against the binary's; drivers check neither."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from kernelseam.contract import KernelFacts
from kernelseam.errors import DeviceError
from kernelseam.forking import cached_property

_CODES = {"pointer": ("Q", 8), "i64": ("q", 8), "i32": ("i", 4), "f32": ("f", 4), "f64": ("d", 8)}

Member = tuple[str, "str | Structure"]
"""A name, and what it names."""


@dataclass(frozen=True)
class Structure:
    """Members that are passed by value together, laid out as C does: each at the next multiple of its own alignment."""

    members: tuple[Member, ...]

    @property
    def alignment(self) -> int:
        return max(_alignment(kind) for _, kind in self.members)

    @cached_property
    def scalars(self) -> tuple[tuple[str, str, int], ...]:
        """Name, type and offset of each scalar, those of inner structures among them."""
        found: list[tuple[str, str, int]] = []
        for (name, kind), at in zip(self.members, self._offsets[:-1], strict=True):
            inner = kind.scalars if isinstance(kind, Structure) else ((name, kind, 0),)
            found += [(n, k, at + offset) for n, k, offset in inner]
        return tuple(found)

    @property
    def size(self) -> int:
        return _aligned(self._offsets[-1], self.alignment)

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Of each member, and the end of the last."""
        at, places = 0, []
        for _, kind in self.members:
            at = _aligned(at, _alignment(kind))
            places.append(at)
            at += _size(kind)
        return (*places, at)


def _alignment(kind: str | Structure) -> int:
    return kind.alignment if isinstance(kind, Structure) else _CODES[kind][1]


def _size(kind: str | Structure) -> int:
    return kind.size if isinstance(kind, Structure) else _CODES[kind][1]


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


@dataclass(frozen=True)
class Signature:
    """A kernel's parameters in order: names with types ("pointer", "i64", "i32", "f32", "f64"), or with structures,
    whose members are then what is given. A name may come twice: both places get its value."""

    parameters: tuple[Member, ...]

    @cached_property
    def _all(self) -> Structure:
        return Structure(self.parameters)

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter."""
        return tuple(
            (at, _size(kind)) for (_, kind), at in zip(self.parameters, self._all._offsets[:-1], strict=True)
        )

    def check(self, facts: KernelFacts) -> None:
        """Refuse a binary whose parameters lie elsewhere than ours."""
        if facts.parameters != self.layout:
            raise DeviceError(
                f"kernel {facts.name} takes parameters at {facts.parameters}, the host packs {self.layout}: "
                f"its device source and its host half disagree"
            )

    @property
    def scalars(self) -> tuple[tuple[str, str, int], ...]:
        """Name, type and offset of everything that is given, members of structures among them."""
        return self._all.scalars

    @cached_property
    def _packer(self) -> struct.Struct:
        form, end = "<", 0
        for _, kind, offset in self.scalars:
            code, size = _CODES[kind]
            form += "x" * (offset - end) + code
            end = offset + size
        return struct.Struct(form + "x" * (self._all._offsets[-1] - end))

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The argument buffer; every scalar must be given. What float32 cannot hold is rounded to an infinity."""
        scalars = self.scalars
        try:
            return self._packer.pack(*[values[name] for name, _, _ in scalars])
        except OverflowError:
            rounded = {n: ctypes.c_float(values[n]).value for n, kind, _ in scalars if kind == "f32"}
            return self._packer.pack(*[{**values, **rounded}[name] for name, _, _ in scalars])
        except struct.error:
            for name, kind, _ in scalars:
                try:
                    struct.pack("<" + _CODES[kind][0], values[name])
                except struct.error as e:
                    raise DeviceError(f"argument {name} = {values[name]!r} is not a {kind}: {e}") from None
            raise
