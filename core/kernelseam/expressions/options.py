"""What of a score_mod and a mask_mod attention's options say: a soft cap, and bands of keys around
the diagonal. Kernels have these by hand, in both directions; the rest stays an expression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kernelseam.expressions.lowering import Structure
from kernelseam.expressions.nodes import Node, Type, constant, coordinate, make
from kernelseam.symbolic import as_float

Linear = Mapping[str | int, int]
"""A sum of coordinates and captured numbers, each times an integer; of "" the constant."""
_INTEGERS = (Type.INT32, Type.INT64)
_SHIFT: Linear = {"kv_len": 1, "q_len": -1}


class Bound(NamedTuple):
    """A condition kv_idx − q_idx ≤ ``most``, or where ``left`` q_idx − kv_idx ≤ ``most``."""

    left: bool
    most: Linear

    def distance(self, numbers: Sequence[Any], square: bool) -> int | None:
        """The bound of the distance to the diagonal that ends with the last query and key, on its
        side; None where it depends on lengths, unless queries and keys are as many: ``square``."""
        sign = 1 if self.left else -1
        lengths = {n: self.most.get(n, 0) for n in _SHIFT}
        ends_with_last = lengths == {n: -sign * x for n, x in _SHIFT.items()}
        if not (ends_with_last or (square and not any(lengths.values()))):
            return None
        result = self.most.get("", 0)
        for i, factor in self.most.items():
            if isinstance(i, int):
                result += factor * numbers[i]
        return result if 0 <= result < 1 << 31 else None


class Options(NamedTuple):
    """What options say of an expression with these numbers, and the structure of the rest, with the
    same numbers and arrays; None where nothing is left."""

    left: int | None
    right: int | None
    softcap: float | None
    rest: Structure | None


def options_of(
    structure: Structure, numbers: Sequence[int | float], square: bool, caps: bool
) -> Options:
    """``square``: of as many queries as keys, whatever the entry. ``caps``: whether the expression
    is the first to change the scores, so that a soft cap may be the option's."""
    conditions, own_cap = _parts(structure)
    ends: dict[bool, int] = {}
    taken = set()
    for i, condition in enumerate(conditions):
        found = [(x.left, x.distance(numbers, square)) for x in condition]
        if not found or any(n is None for _, n in found):
            continue
        taken.add(i)
        for left, n in found:
            assert n is not None
            ends[left] = min(n, ends.get(left, n))
    cap = None
    if caps and own_cap is not None:
        value = numbers[own_cap.value] if own_cap.operation == "argument" else own_cap.value
        cap = as_float(value) if 0 < value < math.inf else None
    rest = _rest(structure, frozenset(taken), cap is not None)
    return Options(ends.get(True), ends.get(False), cap, rest)


@lru_cache(512)
def _parts(structure: Structure) -> tuple[tuple[tuple[Bound, ...], ...], Node | None]:
    """Bounds that each condition of the mask is, if it is; the cap of a score that is capped."""
    score, cap = structure.score, None
    if score.operation == "softcap" and score.arguments[0] == coordinate("score", Type.FLOAT):
        own = score.arguments[1]
        own = own.arguments[0] if own.operation == "cast" else own
        cap = own if own.operation in ("argument", "constant") else None
    if structure.blocks is not None:
        return (), cap
    return tuple(tuple(_bounds(x)) for x in _conditions(structure.visible)), cap


def _conditions(mask: Node) -> list[Node]:
    """That hold together."""
    if mask.operation != "and":
        return [mask]
    return [x for part in mask.arguments for x in _conditions(part)]


@lru_cache(512)
def _rest(structure: Structure, taken: frozenset[int], capped: bool) -> Structure | None:
    visible = constant(True)
    for i, x in enumerate(_conditions(structure.visible)):
        if i not in taken:
            visible = make("and", visible, x)
    score = coordinate("score", Type.FLOAT) if capped else structure.score
    rest = structure._replace(score=score, visible=visible)
    nothing = not (rest.has_score or rest.has_mask or rest.arrays)
    return None if nothing else rest


def _bounds(n: Node) -> list[Bound]:
    """What a condition says of q_idx and kv_idx, if it is a band; else none."""
    if n.operation not in ("le", "lt") or n.arguments[0].type not in _INTEGERS:
        return []
    low, high = n.arguments
    signs = [1]
    if low.operation == "abs":
        low, signs = low.arguments[0], [1, -1]
    a, b = _linear(low), _linear(high)
    if a is None or b is None:
        return []
    slack: Linear = {"": -1 if n.operation == "lt" else 0}
    found = [_bound(_sum((a, -sign), (b, 1), (slack, 1))) for sign in signs]
    return [x for x in found if x is not None] if all(found) else []


def _bound(above_zero: Linear) -> Bound | None:
    """Of a sum that is not negative."""
    most = dict(above_zero)
    q, kv = most.pop("q_idx", 0), most.pop("kv_idx", 0)
    if {q, kv} != {1, -1} or most.keys() & {"b", "h"}:
        return None
    return Bound(kv == 1, most)


def _linear(n: Node) -> Linear | None:
    if n.type not in _INTEGERS:
        return None
    match n.operation:
        case "coordinate" | "argument":
            return {n.value: 1}
        case "constant":
            return {"": n.value}
        case "cast":
            return _linear(n.arguments[0])
    parts = [_linear(x) for x in n.arguments]
    known = [x for x in parts if x is not None]
    if len(known) < len(parts):
        return None
    match n.operation, known:
        case "neg", [x]:
            return _sum((x, -1))
        case "add", [x, y]:
            return _sum((x, 1), (y, 1))
        case "sub", [x, y]:
            return _sum((x, 1), (y, -1))
    return None


def _sum(*parts: tuple[Linear, int]) -> Linear:
    result: dict[str | int, int] = {}
    for linear, factor in parts:
        for name, n in linear.items():
            result[name] = result.get(name, 0) + factor * n
    return {name: n for name, n in result.items() if n}
