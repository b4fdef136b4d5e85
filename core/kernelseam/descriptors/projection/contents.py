"""Checks of a projection's integer operands: positions and block tables must stay within memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernelseam.contract import ArrayInfo, Device, Runtime, host_copy
from kernelseam.descriptors.cache import contents as appended
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.projection.problem import QkvProjectionProblem
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

Ints = npt.NDArray[np.int64]


def check(
    problem: QkvProjectionProblem, resolved: Resolved, runtime: Runtime, device: Device
) -> None:
    """Raise InvalidValue, naming the entry, where one points beyond its operand. Copies them to the
    host; operands that are not bound are refused elsewhere."""
    p, h = problem, problem.heads
    if p.append is not None:
        appended.check(p.append, resolved, runtime, device)
    read: dict[str, Ints] = {}
    for r in p.operands:
        if (
            r.name in ("positions", "block_table")[: 1 + p.spec.heads.paged]
            and r.span
            and (address := resolved.pointers.get(r.name))
        ):
            info = ArrayInfo(address, r.shape, r.strides, DType.int32, device, "", None)
            read[r.name] = host_copy(info, runtime).astype(np.int64)
    positions = np.broadcast_to(h.first_position + np.arange(h.tokens), (p.batch, h.tokens))
    if p.spec.heads.positions:
        if "positions" not in read:
            return
        positions = read["positions"]
        _within("positions", positions, p.max_position, "max_position", bool(p.spec.heads.rotary))
        _within(
            "positions",
            positions,
            p.table_width * h.page_size,
            "table_width·page_size",
            p.spec.heads.paged,
        )
    if "block_table" in read:
        pages = positions // h.page_size
        named = np.take_along_axis(read["block_table"], pages, axis=1)
        bad = (named < 0) | (named >= p.pages)
        if bad.any():
            b, i = (int(x) for x in np.unravel_index(int(bad.argmax()), bad.shape))
            raise InvalidValue(
                f"block_table[{b}, {pages[b, i]}]",
                int(named[b, i]),
                f"must be a page, from 0 to {p.pages - 1}",
                f"Name a page for position {positions[b, i]}",
            )


def _within(name: str, x: Ints, end: int, what: str, required: bool) -> None:
    bad = (x < 0) | (x >= end)
    if required and bad.any():
        index = np.unravel_index(int(bad.argmax()), x.shape)
        raise InvalidValue(
            f"{name}[{', '.join(str(int(i)) for i in index)}]",
            int(x[index]),
            f"must be a position, from 0 to {end - 1}: {what} is {end}",
            "Correct it, or give longer tables",
        )
