"""Recognises attention's options in a score_mod and a mask_mod: a soft cap, ALiBi, a prefix, and
bands around the diagonal. Kernels implement these by hand, forward and backward; the rest stays an
expression."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kernelseam.expressions.lowering import Structure
from kernelseam.expressions.nodes import Node, Type, constant, coordinate, make
from kernelseam.symbolic import as_float

Linear = Mapping[str | int, int]
"""A linear form: coordinate or captured number → integer factor; "" → the constant."""
_INTEGERS = (Type.INT32, Type.INT64)
_SCORE = coordinate("score", Type.FLOAT)
_SHIFT: Linear = {"kv_len": 1, "q_len": -1}


class Bound(NamedTuple):
    """A condition kv_idx − q_idx ≤ ``most``, or where ``left`` q_idx − kv_idx ≤ ``most``."""

    left: bool
    most: Linear

    def distance(self, numbers: Sequence[Any], square: bool) -> int | None:
        """The bound as a distance from the diagonal through the last query and key; None where that
        depends on lengths, which it does unless there are as many queries as keys (``square``)."""
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


class Source(NamedTuple):
    """A captured array of one number for each batch entry, head, or both, and its axes: "b", "h",
    or "" for its first element."""

    array: int
    axes: tuple[str, ...]


class Alibi(NamedTuple):
    """−slope·|distance| added to scores; ``behind``: only for keys up to the diagonal."""

    slopes: Source
    from_diagonal: Bound
    behind: bool


class Prefix(NamedTuple):
    """Keys before ``lengths``, which are visible besides those of a band."""

    lengths: Source
    band: Bound


class Options(NamedTuple):
    """The options that were recognised, and the structure of the rest, over the same numbers and
    arrays; None where nothing is left."""

    left: int | None
    right: int | None
    softcap: float | None
    slopes: Source | None
    prefix: Source | None
    rest: Structure | None


class Parts(NamedTuple):
    """``conditions``: for each conjunct of the mask its bounds, or its prefix; () for any other."""

    conditions: tuple[tuple[Bound, ...] | Prefix, ...]
    cap: Node | None
    alibi: Alibi | None


def options_of(
    structure: Structure,
    numbers: Sequence[int | float],
    square: bool,
    caps: bool,
    right: int | None = None,
    has: Callable[[Source, str], bool] = lambda source, dtype: False,
) -> Options:
    """``square``: of as many queries as keys, whatever the entry. ``caps``: whether the expression
    is the first to change the scores, so that a soft cap and ALiBi may be the options'. ``right``:
    the option's own band. ``has(source, dtype)``: whether options take the array, as slopes of
    float32 or as prefixes of int32."""
    conditions, own_cap, alibi = _parts(structure)
    ends: dict[bool, int] = {}
    taken = set()
    prefix = None
    for i, condition in enumerate(conditions):
        if isinstance(condition, Prefix):
            band = condition.band.distance(numbers, square)
            if prefix is None and band == 0 and has(condition.lengths, "int32"):
                prefix, taken, ends = condition.lengths, {i}, {False: 0}
            continue
        found = [(x.left, x.distance(numbers, square)) for x in condition]
        if prefix is not None or not found or any(n is None for _, n in found):
            continue
        taken.add(i)
        for left, n in found:
            assert n is not None
            ends[left] = min(n, ends.get(left, n))
    cap = None
    if caps and own_cap is not None:
        value = numbers[own_cap.value] if own_cap.operation == "argument" else own_cap.value
        cap = as_float(value) if 0 < value < math.inf else None
    slopes = None
    if alibi is not None and caps and (cap is None) == (own_cap is None):
        on_diagonal = alibi.from_diagonal.distance(numbers, square) == 0
        behind = prefix is None and 0 in (right, ends.get(False))
        if on_diagonal and (behind or not alibi.behind) and has(alibi.slopes, "float32"):
            slopes = alibi.slopes
    if alibi is not None and slopes is None:
        cap = None
    arrays = frozenset(x.array for x in (slopes, prefix) if x is not None)
    whole = cap is not None or slopes is not None
    rest = _rest(structure, frozenset(taken), whole, arrays)
    return Options(ends.get(True), ends.get(False), cap, slopes, prefix, rest)


@lru_cache(512)
def _parts(structure: Structure) -> Parts:
    inner, alibi = _alibi(structure.score)
    cap = None
    if inner.operation == "softcap" and inner.arguments[0] == _SCORE:
        own = inner.arguments[1]
        own = own.arguments[0] if own.operation == "cast" else own
        cap = own if own.operation in ("argument", "constant") else None
    if cap is None and inner != _SCORE:
        alibi = None
    if structure.blocks is not None:
        return Parts((), cap, alibi)
    conditions = _conditions(structure.visible)
    return Parts(tuple(_prefix(x) or tuple(_bounds(x)) for x in conditions), cap, alibi)


def _alibi(score: Node) -> tuple[Node, Alibi | None]:
    """(what a score was before, the ALiBi that changed it); itself without one."""
    if score.operation not in ("add", "sub"):
        return score, None
    x, y = score.arguments
    if (found := _of_distance(y, 1 if score.operation == "add" else -1)) is not None:
        return x, found
    if score.operation == "add" and (found := _of_distance(x, 1)) is not None:
        return y, found
    return score, None


def _of_distance(term: Node, sign: int) -> Alibi | None:
    """ALiBi, if an added term is the product of a slope and a distance."""
    sign, term = _signed(term, sign)
    if term.operation != "mul":
        return None
    for slope, distance in (term.arguments, term.arguments[::-1]):
        own, array = _signed(slope, sign)
        source = _source(array, "float32")
        if source is None:
            continue
        own, distance = _signed(distance, own)
        behind = distance.operation != "abs"
        inner = distance if behind else _signed(distance.arguments[0], 1)[1]
        linear = _linear(inner)
        if linear is None or (own > 0 and not behind):
            continue
        found = _bound(_sum((linear, -own)))  # of kv_idx − q_idx + …
        if found is not None and not (found.left and behind):
            return Alibi(source, found, behind)
    return None


def _signed(n: Node, sign: int) -> tuple[int, Node]:
    """(the sign, the node without negations and casts to wider types)."""
    while n.operation == "neg" or (
        n.operation == "cast" and Type.BOOLEAN < n.arguments[0].type < n.type
    ):
        sign, n = (-sign if n.operation == "neg" else sign), n.arguments[0]
    return sign, n


def _source(n: Node, dtype: str) -> Source | None:
    """The captured array that a node indexes by batch entry and head, if it does."""
    if n.operation != "load" or n.value[1] != dtype:
        return None
    places = {coordinate("b"): "b", coordinate("h"): "h", constant(0): ""}
    axes = tuple(places.get(x) for x in n.arguments)
    named = [x for x in axes if x]
    if None in axes or len({*named}) < len(named):
        return None
    return Source(n.value[0], tuple(x or "" for x in axes))


def _prefix(condition: Node) -> Prefix | None:
    """The prefix and its band, if a condition is a disjunction of the two; else None."""
    if condition.operation != "or":
        return None
    for front, band in (condition.arguments, condition.arguments[::-1]):
        if front.operation != "lt" or front.arguments[0] != coordinate("kv_idx"):
            continue
        lengths, bounds = _source(front.arguments[1], "int32"), _bounds(band)
        if lengths is not None and lengths.axes == ("b",) and len(bounds) == 1:
            return None if bounds[0].left else Prefix(lengths, bounds[0])
    return None


def _conditions(mask: Node) -> list[Node]:
    """The conjuncts of a mask."""
    if mask.operation != "and":
        return [mask]
    return [x for part in mask.arguments for x in _conditions(part)]


@lru_cache(512)
def _rest(
    structure: Structure, taken: frozenset[int], whole: bool, arrays: frozenset[int]
) -> Structure | None:
    """The structure without the conjuncts ``taken``, these arrays, and, with ``whole``, the
    score_mod."""
    visible = constant(True)
    for i, x in enumerate(_conditions(structure.visible)):
        if i not in taken:
            visible = make("and", visible, x)
    rest = structure._replace(score=_SCORE if whole else structure.score, visible=visible)
    used = len(rest.arrays) > len(arrays)
    return rest if rest.has_score or rest.has_mask or used else None


def _bounds(n: Node) -> list[Bound]:
    """The bounds of a condition on q_idx and kv_idx, if it is a band; else none."""
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
    """The bound that a non-negative linear form states."""
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
