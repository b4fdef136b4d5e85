"""The graph: immutable, typed nodes over the coordinates of one element.

A node is its structure: nodes of equal structure are equal, and a root's digest is the key of the
binaries made of it. Nodes are folded, simplified and put into one order as they are made. Floats
are never reassociated; only the sign of a zero may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from kernelseam.expressions.operations import OPERATIONS


class Type(IntEnum):
    """Where two types meet, the larger one wins."""

    BOOLEAN = 0
    INT32 = 1
    INT64 = 2
    FLOAT = 3
    """float32 in kernels; in NumPy the dtype that ``evaluate`` is given."""


class Node:
    """An operation of ``OPERATIONS`` on its arguments, or one of these:

    ``constant`` (its number), ``coordinate`` (its name), ``argument`` (its index among the
    function's numbers), ``load`` (an array's index, dtype and rank; its arguments are the indices),
    ``cast``, ``detach`` (a value without derivatives), and in bounds ``least`` and ``most`` (of the
    elements of a load between the ends of each index, first and last).
    """

    __slots__ = ("operation", "type", "arguments", "value", "digest", "reads")

    digest: bytes

    def __init__(
        self, operation: str, type: Type, arguments: tuple[Node, ...] = (), value: Any = None
    ) -> None:
        self.operation, self.type, self.arguments, self.value = operation, type, arguments, value
        digest = hashlib.blake2b(repr((operation, int(type), value)).encode(), digest_size=16)
        for x in arguments:
            digest.update(x.digest)
        self.digest = digest.digest()
        own = {value} if operation == "coordinate" else set()
        self.reads: frozenset[str] = frozenset(own.union(*(x.reads for x in arguments)))
        """Names of the coordinates that it depends on."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        if self.operation in ("constant", "coordinate"):
            return str(self.value)
        if self.operation == "argument":
            return f"number{self.value}"
        inner = ", ".join(map(str, self.arguments))
        if self.operation == "load":
            return f"array{self.value[0]}[{inner}]"
        name = self.type.name.lower() if self.operation == "cast" else self.operation
        return f"{name}({inner})"


def constant(x: bool | int | float, type: Type | None = None) -> Node:
    """A number that is part of the structure."""
    if type is None:
        kinds = ((bool, Type.BOOLEAN), (int, Type.INT32), (float, Type.FLOAT))
        type = next(t for python, t in kinds if isinstance(x, python))
        if type is Type.INT32 and not -(2**31) <= x < 2**31:
            type = Type.INT64 if -(2**63) <= x < 2**63 else Type.FLOAT
    convert = {Type.BOOLEAN: bool, Type.FLOAT: float}.get(type, int)
    return Node("constant", type, (), convert(x))


def coordinate(name: str, type: Type = Type.INT32) -> Node:
    return Node("coordinate", type, (), name)


def cast(x: Node, type: Type) -> Node:
    if x.type == type:
        return x
    return constant(x.value, type) if x.operation == "constant" else Node("cast", type, (x,))


_LEAST = {"number": Type.INT32, "bits": Type.INT32, "float": Type.FLOAT}


def make(operation: str, *arguments: Node) -> Node:
    """``operation`` of the arguments, converted to one type."""
    how = OPERATIONS[operation]
    first = 1 if operation == "where" else 0
    met = max(max(x.type for x in arguments[first:]), _LEAST.get(how.rule, Type.BOOLEAN))
    if how.rule == "logic":
        met = Type.BOOLEAN
    x = (
        *(cast(a, Type.BOOLEAN) for a in arguments[:first]),
        *(cast(a, met) for a in arguments[first:]),
    )
    if how.commutes:
        x = tuple(sorted(x, key=lambda n: (n.operation == "constant", n.digest)))
    type = Type.BOOLEAN if how.rule == "compare" else met
    if all(a.operation == "constant" for a in x):
        with np.errstate(all="ignore"):
            values = (np.asarray(a.value) for a in x)
            return constant(np.asarray(how.compute(np, *values)).item(), type)
    return _simpler(operation, x) or Node(operation, type, x)


def _simpler(operation: str, arguments: tuple[Node, ...]) -> Node | None:
    """An equal node that is shorter, if there is one."""
    x, y = arguments[0], arguments[-1]
    number = y.value if y.operation == "constant" else None
    match operation:
        case "add" | "sub" | "shl" | "shr" if number == 0:
            return x
        case "mul" | "div" if number == 1:
            return x
        case "floordiv" if number == 1:
            return x if x.type is not Type.FLOAT else make("floor", x)
        case "mul" if number == -1:
            return make("neg", x)
        case "and" | "or" if number is not None:
            return x if number == (operation == "and") else y
        case "and" | "or" | "min" | "max" if x == y:
            return x
        case "not" | "neg" if x.operation == operation:
            return x.arguments[0]
        case "not" if x.operation in ("lt", "le") and x.arguments[0].type is not Type.FLOAT:
            # Not of floats: every comparison with NaN is false.
            return make("le" if x.operation == "lt" else "lt", x.arguments[1], x.arguments[0])
        case "where" if arguments[1] == arguments[2]:
            return arguments[1]
        case "where" if x.operation == "constant":
            return arguments[1] if x.value else arguments[2]
        case "mul":
            return _softcap(x, y) or _softcap(y, x)
    return None


def _softcap(cap: Node, t: Node) -> Node | None:
    """cap·tanh(x / cap) as a node of its own, for which kernels have a faster form."""
    if t.operation == "tanh" and t.arguments[0].operation == "div":
        x, below = t.arguments[0].arguments
        if below == cap:
            return make("softcap", x, cap)
    return None


def order(roots: Iterable[Node], known: Container[Node] = ()) -> list[Node]:
    """Every node under ``roots`` once, arguments before what uses them; without those that are
    known, and what is under these alone."""
    found: dict[Node, None] = {}
    stack = [(n, False) for n in reversed(list(roots))]
    while stack:
        n, entered = stack.pop()
        if n in found or n in known:
            continue
        if entered:
            found[n] = None
        else:
            stack.append((n, True))
            stack += [(x, False) for x in reversed(n.arguments)]
    return list(found)


def rebuilt(n: Node, arguments: tuple[Node, ...]) -> Node:
    """``n`` of other arguments."""
    if arguments == n.arguments:
        return n
    if n.operation == "cast":
        return cast(arguments[0], n.type)
    if n.operation in OPERATIONS:
        return make(n.operation, *arguments)
    return Node(n.operation, n.type, arguments, n.value)


def substitute(root: Node, by: Mapping[Node, Node]) -> Node:
    """``root`` with other nodes in the place of some."""
    done: dict[Node, Node] = {}
    for n in order([root]):
        done[n] = by[n] if n in by else rebuilt(n, tuple(done[x] for x in n.arguments))
    return done[root]
