"""A subset of specs, and so of cases, that covers every field value."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.expressions.epilogues import epilogue_of
from kernelseam.expressions.text import structure_of


def flat(spec: Any) -> Iterator[tuple[str, Hashable]]:
    """(field, value) pairs, those of nested specs included; of an expression what it has, of which
    cases have the name alone."""
    for f in fields(spec):
        value = getattr(spec, f.name)
        if is_dataclass(value):
            yield from flat(value)
        elif f.name == "expression" and value is not None:
            kind = structure_of(value)
            yield f.name, (kind.has_score, kind.has_mask, bool(kind.arrays), bool(kind.numbers))
        elif f.name == "epilogue" and value is not None and isinstance(spec, GemmSpec):
            epilogue = epilogue_of(value)
            yield f.name, (epilogue.pairs, bool(epilogue.arrays), bool(epilogue.numbers))
            yield "reductions", bool(epilogue.reductions)
        else:
            yield f.name, value


def covering(specs: Iterable[Any], each_dtype: bool = True) -> list[Any]:
    """The specs, in order, that have a field value which no earlier spec of the same dtype had, or
    which none had."""
    seen: set[object] = set()
    chosen = []
    for spec in specs:
        kind = (type(spec), spec.dtype if each_dtype else None)
        new = {(kind, name, value) for name, value in flat(spec)} - seen
        if new:
            chosen.append(spec)
            seen |= new
    return chosen


def fewest(specs: Iterable[Any]) -> list[Any]:
    """A small choice of the specs that has every field value which they have: again and again the
    first of those with the most values that none chosen before had."""
    left = {s: {(type(s), *pair) for pair in flat(s)} for s in specs}
    chosen = []
    while left:
        best = max(left, key=lambda s: len(left[s]))
        new = left.pop(best)
        chosen.append(best)
        left = {s: rest for s, values in left.items() if (rest := values - new)}
    return chosen
