"""Checks of a paged cache's integer operands: places and positions must stay within memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernelseam.contract import ArrayInfo, Device, Runtime, host_copy
from kernelseam.descriptors.cache.places import Places, places_of
from kernelseam.descriptors.cache.problem import PagedCacheProblem
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

Ints = npt.NDArray[np.int64]
_READ = (
    "slot_mapping",
    "block_table",
    "kv_lengths",
    "positions",
    "cu_seqlens",
    "sources",
)


def check(problem: PagedCacheProblem, resolved: Resolved, runtime: Runtime, device: Device) -> None:
    """Raise InvalidValue, naming the entry, where one points beyond its operand. Copies them to the
    host; operands that are not bound are refused elsewhere."""
    p, read = problem, dict[str, Ints]()
    for r in p.operands:
        if r.name not in _READ or not r.span:
            continue
        if not (address := resolved.pointers.get(r.name)):
            return
        info = ArrayInfo(address, r.shape, r.strides, r.dtype or DType.int32, device, "", None)
        read[r.name] = host_copy(info, runtime).astype(np.int64)
    if not p.tokens:
        return
    if "cu_seqlens" in read:
        _offsets(read["cu_seqlens"], p.S)
    if "kv_lengths" in read:
        room = p.table_width * p.page_size
        x = read["kv_lengths"]
        _refuse_any(
            "kv_lengths",
            x,
            (x < 0) | (x > room),
            f"must be from 0 to {room}, which the table has room for",
            "Correct it, or give a wider table",
        )
    places = places_of(p, read)
    _named(p, read, places)
    if p.spec.rotary:
        bad = places.stored & ((places.position < 0) | (places.position >= p.max_position))
        if bad.any():
            where = np.unravel_index(int(bad.argmax()), bad.shape)
            index = tuple(int(i) for i in where)
            given = p.spec.position == "given"
            name = "positions" if given else "the position of token"
            _refuse(
                name,
                index,
                int(places.position[index]),
                f"must be from 0 to {p.max_position - 1}, as cos has rows",
                "Correct it, or give longer tables",
            )


def _named(p: PagedCacheProblem, read: dict[str, Ints], places: Places) -> None:
    """The pages that are read or written."""
    if "slot_mapping" in read:
        x, room = read["slot_mapping"], p.pages * p.page_size
        _refuse_any(
            "slot_mapping",
            x,
            x >= room,
            f"must be a slot, below pages·page_size = {room}, or negative",
            "Correct it",
        )
        return
    bad = places.named & ((places.page < 0) | (places.page >= p.pages))
    if bad.any():
        index = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
        entry, column = int(places.entry[index]), int(places.column[index])
        _refuse(
            "block_table",
            (entry, column),
            int(places.page[index]),
            f"must be a page, from 0 to {p.pages - 1}",
            f"Name a page for token {list(index)}",
        )
    if "sources" in read:
        x = read["sources"]
        _refuse_any(
            "sources",
            x,
            (x < 0) | (x >= p.pages),
            f"must be a page, from 0 to {p.pages - 1}",
            "Correct it",
        )


def _refuse(name: str, index: tuple[int, ...], value: int, rule: str, remedy: str) -> None:
    raise InvalidValue(f"{name}[{', '.join(map(str, index))}]", value, rule, remedy)


def _refuse_any(name: str, x: Ints, bad: npt.NDArray[np.bool_], rule: str, remedy: str) -> None:
    if bad.any():
        index = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), x.shape))
        _refuse(name, index, int(x[index]), rule, remedy)


def _offsets(x: Ints, rows: int) -> None:
    if x[0] < 0:
        _refuse("cu_seqlens", (0,), int(x[0]), "must not be negative", "Offsets start at 0")
    steps = np.diff(x)
    if (steps < 0).any():
        i = int((steps < 0).argmax()) + 1
        rule = f"must not be below its predecessor, {x[i - 1]}"
        _refuse("cu_seqlens", (i,), int(x[i]), rule, "Offsets never decrease")
    if x[-1] > rows:
        rule = f"must not exceed the {rows} rows"
        _refuse("cu_seqlens", (len(x) - 1,), int(x[-1]), rule, "Correct the last offset")
