"""A choice of specs, and so of cases, that covers them all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any


def flat(spec: Any) -> Iterator[tuple[str, Hashable]]:
    """Fields and their values, those of a spec within it among them."""
    for f in fields(spec):
        value = getattr(spec, f.name)
        if is_dataclass(value):
            yield from flat(value)
        else:
            yield f.name, value


def covering(specs: Iterable[Any]) -> list[Any]:
    """Those, in order, that have a value in a field which none before had with the same dtype."""
    seen: set[object] = set()
    found = []
    for spec in specs:
        new = {(type(spec), spec.dtype, name, value) for name, value in flat(spec)} - seen
        if new:
            found.append(spec)
            seen |= new
    return found
