"""Checks of a projection's integer operands: positions and block tables must stay within memory."""

from __future__ import annotations

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.cache import contents as appended
from kernelseam.descriptors.common.contents import (
    Ints,
    first_of,
    read_integers,
    refuse,
    refuse_any,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.projection.problem import QkvProjectionProblem


def check(
    problem: QkvProjectionProblem, resolved: Resolved, runtime: Runtime, device: Device
) -> None:
    """Raise InvalidValue, naming the entry, where one points beyond its operand. Copies them to the
    host; operands that are not bound are refused elsewhere."""
    p, h = problem, problem.heads
    if p.append is not None:
        appended.check(p.append, resolved, runtime, device)
    names = ("positions", "block_table")[: 1 + p.spec.heads.paged]
    read = read_integers(p.operands, names, resolved, runtime, device)
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
            b, i = first_of(bad)
            refuse(
                "block_table",
                (b, int(pages[b, i])),
                int(named[b, i]),
                f"must be a page, from 0 to {p.pages - 1}",
                f"Name a page for position {positions[b, i]}",
            )


def _within(name: str, x: Ints, end: int, what: str, required: bool) -> None:
    if required:
        rule = f"must be a position, from 0 to {end - 1}: {what} is {end}"
        refuse_any(name, x, (x < 0) | (x >= end), rule, "Correct it, or give longer tables")
