"""Interval arithmetic on expressions: their range over a block of queries × keys.

``bounds(n)`` are two nodes, lower and upper bound of ``n`` over the block: functions of b, h, the
lengths and the block's first and last query and key (q_first, q_last, kv_first, kv_last). Of a
condition they are whether it holds everywhere and whether it may hold anywhere. They are
conservative: NaN makes no comparison certain. An element of a captured array is bounded by those
between its index's ends where one axis varies within the block; where several do, it is unbounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from kernelseam.expressions.nodes import (
    Node,
    Type,
    cast,
    constant,
    coordinate,
    make,
    order,
    rebuilt,
)

INCREASING = frozenset(
    (
        *("exp", "exp2", "log", "log2", "log1p", "sqrt", "tanh", "sigmoid", "erf", "ndtr"),
        *("floor", "sign"),
    )
)
_PARTIAL = frozenset(("log", "log2", "log1p", "sqrt"))
"""Those that are NaN below some argument."""
CORNERS = {"q_idx": ("q_first", "q_last"), "kv_idx": ("kv_first", "kv_last")}
_NO, _YES = constant(False), constant(True)


class Bounds(NamedTuple):
    low: Node
    high: Node

    @property
    def point(self) -> bool:
        """Whether the value is the same in the whole block, and not NaN."""
        return self.low == self.high and self.low.value == self.low.value


def bounds(root: Node) -> Bounds:
    done: dict[Node, Bounds] = {}
    for n in order([root]):
        done[n] = _bounds(n, [done[x] for x in n.arguments])
    return done[root]


def _unknown(n: Node) -> Bounds:
    """The range of the node's type, itself of a wider one: sums of ends then do not overflow."""
    if n.type is Type.BOOLEAN:
        return Bounds(_NO, _YES)
    if n.type is Type.INT32:
        return Bounds(constant(-(2**31), Type.INT64), constant(2**31, Type.INT64))
    return Bounds(constant(-math.inf), constant(math.inf))


def _hull(operation: str, corners: list[tuple[Node, Node]]) -> Bounds:
    values = [make(operation, *c) for c in corners]
    low = high = values[0]
    for x in values[1:]:
        low, high = make("min", low, x), make("max", high, x)
    return Bounds(low, high)


def _magnitude(x: Bounds) -> tuple[Node, Node]:
    """The least and the most of |x|."""
    zero, negated = constant(0), (make("neg", x.high), make("neg", x.low))
    return make("max", make("max", x.low, negated[0]), zero), make("max", x.high, negated[1])


def _both(*x: Node) -> Node:
    return make("and", *x)


def _not(x: Node) -> Node:
    return make("not", x)


def _bounds(n: Node, x: list[Bounds]) -> Bounds:
    if n.operation == "coordinate" and n.value in CORNERS:
        return Bounds(*map(coordinate, CORNERS[n.value]))
    if n.operation == "coordinate" and n.type is Type.FLOAT:  # a score
        return _unknown(n)
    if all(b.point for b in x):  # the same for the whole block
        same = rebuilt(n, tuple(b.low for b in x))
        return Bounds(same, same)
    if n.operation == "cast":
        return _cast(n, x[0])
    if n.operation in INCREASING:
        low, high = (make(n.operation, end) for end in x[0])
        return _nan_if(_is_nan(low) if n.operation in _PARTIAL else _NO, low, high)
    if (rule := _RULES.get(n.operation)) is not None:
        return rule(n, x) or _unknown(n)
    return _unknown(n)


def _is_nan(x: Node) -> Node:
    return _not(make("eq", x, x))


def _nan_if(condition: Node, low: Node, high: Node) -> Bounds:
    """Bounds that are NaN, and so make no comparison certain, where ``condition`` holds."""
    nan = constant(math.nan)
    return Bounds(make("where", condition, nan, low), make("where", condition, nan, high))


def _cast(n: Node, x: Bounds) -> Bounds:
    if n.type is Type.BOOLEAN:
        zero = constant(0)
        never_zero = make("or", make("lt", zero, x.low), make("lt", x.high, zero))
        return Bounds(never_zero, _not(_both(make("eq", x.low, zero), make("eq", x.high, zero))))
    if n.type is Type.FLOAT:
        return Bounds(cast(x.low, n.type), cast(x.high, n.type))
    if n.arguments[0].type is not Type.FLOAT:
        return x
    unknown = make("or", _is_nan(x.low), _is_nan(x.high))  # NaN becomes 0
    least, most = constant(-(2**31), n.type), constant(2**31 - 1, n.type)
    if n.type is Type.INT64:
        least, most = constant(-(2**63), n.type), constant(2**63 - 1, n.type)
    return Bounds(
        make("where", unknown, least, cast(x.low, n.type)),
        make("where", unknown, most, cast(x.high, n.type)),
    )


def _increasing(n: Node, x: list[Bounds]) -> Bounds:
    a, b = x[0], x[-1]
    return Bounds(make(n.operation, a.low, b.low), make(n.operation, a.high, b.high))


def _decreasing(n: Node, x: list[Bounds]) -> Bounds:
    return Bounds(make(n.operation, x[0].high), make(n.operation, x[0].low))


def _scaled(n: Node, x: list[Bounds]) -> Bounds | None:
    """Operations that are monotone in the first argument, where the second is the same in the whole
    block."""
    a, b = x
    if not b.point or (n.operation == "shr" and a.low.type is Type.FLOAT):
        return None
    ends = _hull(n.operation, [(a.low, b.low), (a.high, b.low)])
    if n.type is not Type.FLOAT or (b.low.operation == "constant" and b.low.value):
        return ends
    return _nan_if(make("eq", b.low, constant(0.0)), *ends)


def _product(n: Node, x: list[Bounds]) -> Bounds:
    a, b = x
    if n.arguments[0] == n.arguments[1]:
        near, far = _magnitude(a)
        return Bounds(make("mul", near, near), make("mul", far, far))
    ends = [(p, q) for p in (a.low, a.high) for q in (b.low, b.high)]
    return _hull("mul", ends)


def _modulo(n: Node, x: list[Bounds]) -> Bounds | None:
    a, b = x
    if not b.point or Type.FLOAT in (a.low.type, a.high.type, b.low.type):
        return None
    y, one, zero = b.low, constant(1), constant(0)
    together = make("eq", make("floordiv", a.low, y), make("floordiv", a.high, y))
    least, most = make("min", make("add", y, one), zero), make("max", make("sub", y, one), zero)
    return Bounds(
        make("where", together, make("mod", a.low, y), least),
        make("where", together, make("mod", a.high, y), most),
    )


def _compared(n: Node, x: list[Bounds]) -> Bounds:
    a, b = x
    opposite = "le" if n.operation == "lt" else "lt"
    # It may hold unless the opposite is certain: with NaN neither is.
    return Bounds(make(n.operation, a.high, b.low), _not(make(opposite, b.high, a.low)))


def _equal(n: Node, x: list[Bounds]) -> Bounds:
    a, b = x
    must = _both(make("le", a.high, b.low), make("le", b.high, a.low))
    apart = make("or", make("lt", a.high, b.low), make("lt", b.high, a.low))
    return Bounds(must, _not(apart))


def _chosen(n: Node, x: list[Bounds]) -> Bounds:
    condition, a, b = x

    def end(p: Node, q: Node, extremum: str) -> Node:
        either = make("where", condition.high, make(extremum, p, q), q)
        return make("where", condition.low, p, either)

    return Bounds(end(a.low, b.low, "min"), end(a.high, b.high, "max"))


def _masked_bits(n: Node, x: list[Bounds]) -> Bounds | None:
    for b in x:
        if b.point and b.low.operation == "constant" and b.low.value >= 0:
            return Bounds(constant(0, n.type), b.low)
    return None


def _loaded(n: Node, x: list[Bounds]) -> Bounds | None:
    ranging = tuple(not b.point for b in x)
    ends = tuple(e for b in x for e in b)
    if sum(ranging) != 1 or any(e.type is Type.FLOAT for e in ends):
        return None
    type = Type.INT64 if n.type is Type.INT32 else n.type
    value = (*n.value, ranging)
    return Bounds(Node("least", type, ends, value), Node("most", type, ends, value))


_RULES: dict[str, Callable[[Node, list[Bounds]], Bounds | None]] = {
    **dict.fromkeys(("add", "min", "max", "and", "or"), _increasing),
    "sub": lambda n, x: Bounds(make("sub", x[0].low, x[1].high), make("sub", x[0].high, x[1].low)),
    **dict.fromkeys(("neg", "not"), _decreasing),
    "abs": lambda n, x: Bounds(*_magnitude(x[0])),
    "mul": _product,
    **dict.fromkeys(("div", "floordiv", "softcap", "shr"), _scaled),
    "mod": _modulo,
    **dict.fromkeys(("lt", "le"), _compared),
    "eq": _equal,
    "where": _chosen,
    "bitand": _masked_bits,
    "load": _loaded,
}
