"""Derivatives of expressions: by a value, and by captured arrays, with the order of their sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from kernelseam.expressions.nodes import Node, Type, constant, make, order, substitute

Partial = Callable[[Node, Node, Node, Node], tuple[Node | None, ...]]
"""(the node, what its derivative is multiplied by, its first and last argument) → what each of its
arguments gets; None: nothing."""


def _add(x: Node, y: Node) -> Node:
    return make("add", x, y)


def _mul(x: Node, *factors: Node) -> Node:
    for y in factors:
        x = make("mul", x, y)
    return x


def _neg(x: Node) -> Node:
    return make("neg", x)


def _div(x: Node, y: Node) -> Node:
    return make("div", x, y)


def _one_minus(x: Node) -> Node:
    return make("sub", constant(1.0), x)


def _extremum(inner: str) -> Partial:
    """Of the larger or smaller; half each where both are equal, as torch has it."""

    def partial(n: Node, g: Node, x: Node, y: Node) -> tuple[Node, Node]:
        first, second = make("lt", x, y), make("lt", y, x)
        if inner == "max":
            first, second = second, first
        half, zero = _mul(g, constant(0.5)), constant(0.0)
        return (
            make("where", first, g, make("where", second, zero, half)),
            make("where", second, g, make("where", first, zero, half)),
        )

    return partial


def _where(n: Node, g: Node, condition: Node, y: Node) -> tuple[Node | None, ...]:
    zero = constant(0.0)
    return None, make("where", condition, g, zero), make("where", condition, zero, g)


def _power(n: Node, g: Node, x: Node, y: Node) -> tuple[Node, Node]:
    below = make("pow", x, make("sub", y, constant(1.0)))
    return _mul(g, y, below), _mul(g, n, make("log", x))


def _softcap(n: Node, g: Node, x: Node, cap: Node) -> tuple[Node, Node]:
    t = _div(n, cap)
    slope = _one_minus(_mul(t, t))
    return _mul(g, slope), _mul(g, make("sub", t, _mul(_div(x, cap), slope)))


PARTIALS: dict[str, Partial] = {
    "add": lambda n, g, x, y: (g, g),
    "sub": lambda n, g, x, y: (g, _neg(g)),
    "mul": lambda n, g, x, y: (_mul(g, y), _mul(g, x)),
    "div": lambda n, g, x, y: (_div(g, y), _neg(_mul(g, _div(n, y)))),
    "mod": lambda n, g, x, y: (g, _neg(_mul(g, make("floor", _div(x, y))))),
    "neg": lambda n, g, x, y: (_neg(g),),
    "abs": lambda n, g, x, y: (_mul(g, make("sign", x)),),
    "min": _extremum("min"),
    "max": _extremum("max"),
    "where": _where,
    "exp": lambda n, g, x, y: (_mul(g, n),),
    "exp2": lambda n, g, x, y: (_mul(g, n, constant(math.log(2))),),
    "log": lambda n, g, x, y: (_div(g, x),),
    "log2": lambda n, g, x, y: (_div(_mul(g, constant(1 / math.log(2))), x),),
    "log1p": lambda n, g, x, y: (_div(g, _add(constant(1.0), x)),),
    "sqrt": lambda n, g, x, y: (_div(_mul(g, constant(0.5)), n),),
    "rsqrt": lambda n, g, x, y: (_mul(g, constant(-0.5), n, n, n),),
    "sin": lambda n, g, x, y: (_mul(g, make("cos", x)),),
    "cos": lambda n, g, x, y: (_neg(_mul(g, make("sin", x))),),
    "tanh": lambda n, g, x, y: (_mul(g, _one_minus(_mul(n, n))),),
    "sigmoid": lambda n, g, x, y: (_mul(g, n, _one_minus(n)),),
    "erf": lambda n, g, x, y: (
        _mul(g, constant(2 / math.sqrt(math.pi)), make("exp", _neg(_mul(x, x)))),
    ),
    "ndtr": lambda n, g, x, y: (
        _mul(g, constant(1 / math.sqrt(2 * math.pi)), make("exp", _mul(constant(-0.5), x, x))),
    ),
    "pow": _power,
    "softcap": _softcap,
}
"""Operations without an entry (comparisons, floor, sign, casts to integers) have none."""


def _adjoints(root: Node, wanted: Callable[[Node], bool]) -> dict[Node, Node]:
    """∂root/∂n of every node that is wanted."""
    nodes, below, by = order([root]), set[Node](), {root: constant(1.0)}
    for n in nodes:
        carries = n.type is Type.FLOAT and n.operation != "detach"
        if carries and (wanted(n) or any(x in below for x in n.arguments)):
            below.add(n)
    for n in reversed(nodes):
        if n in by and n.operation in PARTIALS:
            partials = PARTIALS[n.operation](n, by[n], n.arguments[0], n.arguments[-1])
            for x, g in zip(n.arguments, partials, strict=True):
                if x in below and g is not None:
                    by[x] = _add(by[x], g) if x in by else g
    return {n: by[n] for n in nodes if n in by and n in below and wanted(n)}


def slope(root: Node, value: str = "score") -> Node:
    """∂root/∂value."""
    by = _adjoints(root, lambda n: n.operation == "coordinate" and n.value == value)
    return next(iter(by.values()), constant(0.0))


def affine(root: Node, value: str = "score") -> tuple[Node, Node] | None:
    """(a, b) where root = a·value + b and neither depends on the value."""
    a = slope(root, value)
    if value in a.reads:
        return None
    if any(_steps(n) and value in n.reads for n in order([root])):
        return None
    at_zero = {n: constant(0.0) for n in order([root]) if n.value == value and not n.arguments}
    return a, substitute(root, at_zero)


def _steps(n: Node) -> bool:
    """Whether its slope does not say by how much it changes."""
    return n.operation in ("floor", "sign", "detach", "cast", "mod", "floordiv", "lt", "le", "eq")


class ArrayGradient(NamedTuple):
    """array[indices] += (what arrives at the score) · factor, over all elements."""

    array: int
    indices: tuple[Node, ...]
    factor: Node
    order: str
    """How the sums are ordered. each: there are none, every element is its own; axes: over whole
    coordinates; row, column: over the keys or the queries first, then what is left by its index;
    diagonal: over equal distances first; scatter: by no order that the indices give."""


def _on_diagonals(n: Node) -> bool:
    """Whether it depends on query and key only by their difference."""
    if n.operation == "sub" and {x.value for x in n.arguments if not x.arguments} == _BOTH:
        return True
    if not n.reads & _BOTH:
        return True
    return n.operation != "coordinate" and all(map(_on_diagonals, n.arguments))


_BOTH = frozenset({"q_idx", "kv_idx"})
_ALL = _BOTH | {"b", "h"}


def _order_of_sums(indices: tuple[Node, ...]) -> str:
    names = [i.value for i in indices if i.operation == "coordinate"]
    reads = frozenset[str]().union(*(i.reads for i in indices))
    plain = all(i.operation == "coordinate" or not i.reads for i in indices)
    if plain and len(names) == len(set(names)):
        return "each" if reads >= _ALL else "axes"
    if not reads >= _BOTH:
        return "column" if "kv_idx" in reads else "row"
    return "diagonal" if all(map(_on_diagonals, indices)) else "scatter"


def array_gradients(root: Node) -> list[ArrayGradient]:
    """By every load of a float array, in a fixed order."""
    by = _adjoints(root, lambda n: n.operation == "load" and n.type is Type.FLOAT)
    return [
        ArrayGradient(n.value[0], n.arguments, factor, _order_of_sums(n.arguments))
        for n, factor in by.items()
    ]
