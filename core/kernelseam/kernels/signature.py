"""Kernel arguments packed by our own signature and checked against the binary's; drivers check neither."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kernelseam.contract import KernelFacts
from kernelseam.errors import DeviceError

_CODES = {"pointer": ("Q", 8), "i64": ("q", 8), "i32": ("i", 4), "f32": ("f", 4), "f64": ("d", 8)}


@dataclass(frozen=True)
class Signature:
    """Names and types ("pointer", "i64", "i32", "f32", "f64") of a kernel's parameters, in order."""

    parameters: tuple[tuple[str, str], ...]

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter, every one aligned to its own size."""
        at, places = 0, []
        for _, kind in self.parameters:
            size = _CODES[kind][1]
            at = -(-at // size) * size
            places.append((at, size))
            at += size
        return tuple(places)

    def check(self, facts: KernelFacts) -> None:
        """Refuse a binary whose parameters lie elsewhere than ours."""
        if facts.parameters != self.layout:
            raise DeviceError(
                f"kernel {facts.name} takes parameters at {facts.parameters}, the host packs {self.layout}: "
                f"its device source and its host half disagree"
            )

    @cached_property
    def _packer(self) -> struct.Struct:
        form, end = "<", 0
        for (_, kind), (offset, size) in zip(self.parameters, self.layout, strict=True):
            form += "x" * (offset - end) + _CODES[kind][0]
            end = offset + size
        return struct.Struct(form)

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The argument buffer; every parameter must be given. What float32 cannot hold is rounded to an infinity."""
        try:
            return self._packer.pack(*[values[name] for name, _ in self.parameters])
        except OverflowError:
            rounded = {n: ctypes.c_float(values[n]).value for n, kind in self.parameters if kind == "f32"}
            return self._packer.pack(*[{**values, **rounded}[name] for name, _ in self.parameters])
        except struct.error:
            for name, kind in self.parameters:
                try:
                    struct.pack("<" + _CODES[kind][0], values[name])
                except struct.error as e:
                    raise DeviceError(f"argument {name} = {values[name]!r} is not a {kind}: {e}") from None
            raise
