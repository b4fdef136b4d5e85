"""A launch whose numbers stay while addresses change: what does not depend on an address is packed
once, to bytes, and each call packs its addresses between them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernelseam.contract import TENSOR_MAP_BYTES
from kernelseam.kernels.signature import KINDS
from kernelseam.kernels.traced_text import Text
from kernelseam.kernels.tracing import Encoded, TracedStep

_ADDRESS = "Q"
"""How ``struct`` packs one; a tensor map's tail follows it."""
_ADDRESS_BYTES = 8
IsLate = Callable[[Any], bool]
"""Whether a number depends on an address."""


@dataclass(frozen=True)
class Template:
    """``packed`` packs the launch. ``once``: lines that come before, once for the same numbers;
    ``always``: those that come before it each time. All may return None."""

    once: list[str]
    always: list[str]
    packed: str


@dataclass
class _Bytes:
    """Arguments next to each other that do not depend on an address."""

    start: int
    form: str = "<"
    end: int = 0
    values: list[str] | None = None

    def add(self, code: str, offset: int, size: int, value: str) -> None:
        self.values = [*(self.values or ()), value]
        self.form += "x" * (offset - max(self.end, self.start)) + code
        self.end = offset + size


def template(text: Text, place: int, step: TracedStep, is_late: IsLate) -> Template | None:
    """Of a trace's ``place``-th step; None where its launch keeps its arguments, or its blocks, an
    extent or a stride depend on an address."""
    signature, once_by = step.signature, step.once_by
    blocks, *arguments = step.arguments
    if signature is None or once_by is None or is_late(blocks):
        return None
    whole = signature.packer.size
    once, always, form, given = list[str](), list[str](), "<", list[str]()
    part = _Bytes(0)

    def close(end: int) -> None:
        """The bytes up to here are one value."""
        nonlocal form
        if end == part.start:
            return
        name, packer = f"c{place}_{part.start}", f"s{place}_{part.start}"
        part.form += "x" * (end - max(part.end, part.start))
        text.namespace[packer] = struct.Struct(part.form).pack
        once.append(f"{name} = {packer}({', '.join(part.values or ())})")
        form += f"{end - part.start}s"
        given.append(name)

    for i, ((_, kind, offset), x) in enumerate(zip(signature.scalars, arguments, strict=True)):
        code, size = KINDS[kind].code, KINDS[kind].size
        number = x.address if isinstance(x, Encoded) else x
        if not is_late(number):
            part.add(code, offset, size, text.argument(f"e{place}_{i}", x))
            continue
        close(offset)
        form += _ADDRESS if isinstance(x, Encoded) else code
        given.append(text.number(number))
        if not isinstance(x, Encoded):
            part = _Bytes(offset + size)
            continue
        if x.tail is None or any(map(is_late, (*x.extents, *x.strides))):
            return None
        tail, name = f"tail{place}_{i}", f"m{place}_{i}"
        text.namespace[tail] = x.tail
        once += [
            f"{name} = {tail}({text.of(x.extents)}, {text.of(x.strides)}, {2 * TENSOR_MAP_BYTES})",
            f"if {name} is None: return None",
            f"{name}, end{place}_{i} = {name}",
        ]
        always.append(f"if {text.number(number)} >= end{place}_{i}: return None")
        part = _Bytes(offset + _ADDRESS_BYTES)
        rest = TENSOR_MAP_BYTES - _ADDRESS_BYTES
        part.add(f"{rest}s", part.start, rest, name)
    close(whole)
    text.namespace[f"again{place}"] = once_by(struct.Struct(form))
    return Template(once, always, f"again{place}({', '.join((text.number(blocks), *given))})")
