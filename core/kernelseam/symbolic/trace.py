"""What was computed with symbols and on what conditions, and its text as a function."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kernelseam.symbolic.symbol import Symbol, value_of

Range = tuple[float, float]
"""The least and the largest value of an integer that are known."""
_ANY: Range = (-math.inf, math.inf)

_FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "+": (operator.add, "{} + {}"),
    "-": (operator.sub, "{} - {}"),
    "*": (operator.mul, "{} * {}"),
    "//": (operator.floordiv, "{} // {}"),
    "/": (operator.truediv, "{} / {}"),
    "%": (operator.mod, "{} % {}"),
    "**": (operator.pow, "{} ** {}"),
    "<<": (operator.lshift, "{} << {}"),
    ">>": (operator.rshift, "{} >> {}"),
    "&": (operator.and_, "{} & {}"),
    "|": (operator.or_, "{} | {}"),
    "^": (operator.xor, "{} ^ {}"),
    "negative": (operator.neg, "-{}"),
    "abs": (abs, "abs({})"),
    "bits": (int.bit_length, "{}.bit_length()"),
    "float": (float, "float({})"),
}
"""What is recorded: how it is computed, and its text."""


@dataclass
class _Node:
    """A step of a trace, or one of its inputs (no text)."""

    text: str
    operands: tuple[str, ...]
    known: Range
    """By its operands."""
    factor: int
    """Divides its value, an integer's."""
    wanted: Range = _ANY
    """By conditions on it."""
    unlike: frozenset[int] = frozenset()
    """Values that it must not have."""
    bound: bool = False
    """Whether it has such conditions."""

    @property
    def range(self) -> Range:
        return max(self.known[0], self.wanted[0]), min(self.known[1], self.wanted[1])


@dataclass(frozen=True)
class _Condition:
    """``text`` must be true, or, where it is empty, the one node be as it is wanted. ``after``: how
    many nodes there were."""

    text: str
    nodes: tuple[str, ...]
    after: int


class Trace:
    """Symbols, what was computed with them and on what conditions."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._steps: dict[tuple[str, tuple[str, ...]], str] = {}
        self._conditions: list[_Condition] = []
        self._facts: dict[tuple[str, str, str], bool] = {}
        self._same: dict[str, str] = {}
        self.namespace: dict[str, object] = {"inf": math.inf, "nan": math.nan}

    def input(self, name: str, value: Any) -> Any:
        """A symbol for a number that the function takes; an integer must not be negative."""
        known = (0, math.inf) if type(value) is int else _ANY
        self._nodes[name] = _Node("", (), known, 1)
        return Symbol(self, name, value)

    @contextmanager
    def branch(self, late: frozenset[str]) -> Iterator[None]:
        """Within the block, a continuation of the trace, where conditions that need no ``late``
        input hold already; then the trace is what it was before."""
        whole = (self._nodes, self._steps, self._conditions, self._facts, self._same)
        depends = self._depending(late)
        self._nodes = {
            n: replace(x) if depends[n] else replace(x, known=x.range, wanted=_ANY, bound=False)
            for n, x in self._nodes.items()
        }
        self._conditions = [c for c in self._conditions if any(depends[n] for n in c.nodes)]
        self._steps, self._facts, self._same = (
            dict(self._steps),
            dict(self._facts),
            dict(self._same),
        )
        try:
            yield
        finally:
            self._nodes, self._steps, self._conditions, self._facts, self._same = whole

    def _depending(self, late: frozenset[str]) -> dict[str, bool]:
        """Of each node, whether it needs a late input."""
        depends: dict[str, bool] = {}
        for name, node in self._nodes.items():
            depends[name] = name in late or any(depends.get(x, False) for x in node.operands)
        return depends

    def dependence(self, late: frozenset[str]) -> Callable[[Any], bool]:
        """Whether a value needs a late input."""
        depends = self._depending(late)
        return lambda x: depends.get(self.text(x), False)

    def step(self, name: str, form: str, value: Any, operands: Sequence[Any]) -> Any:
        """A symbol for a step's result."""
        texts = tuple([self.text(x) for x in operands])
        key = (name, texts)
        node = self._steps.get(key)
        if node is None:
            node = self._steps[key] = f"t{len(self._nodes)}"
            known, factor = _ANY, 1
            if type(value) is int:
                ranges = [self.range(x) for x in operands]
                known, factor = _range_of(name, ranges), self._factor_of(name, operands)
            self._nodes[node] = _Node(form.format(*texts), texts, known, factor)
        return Symbol(self, node, value)

    def arithmetic(self, name: str, operands: Sequence[Any]) -> Any:
        """An operator's result: plain where conditions leave no other."""
        plain = [self.plain(x) for x in operands]
        compute, form = _FORMS[name]
        value = compute(*[x.value if type(x) is Symbol else x for x in plain])
        if not any(type(x) is Symbol for x in plain):
            return value
        if type(value) is int:
            x, y = plain[0], plain[-1]
            if (name in ("+", "|", "^") and _is(x, 0)) or (name == "*" and _is(x, 1)):
                return y
            if (name in ("+", "-", "|", "^", "<<", ">>") and _is(y, 0)) or (
                name in ("*", "//") and _is(y, 1)
            ):
                return x
            if name == "*" and (_is(x, 0) or _is(y, 0)):
                return 0
            if name == "%" and type(y) is int and y and self._factor(x) % y == 0:
                return 0
            low, high = _range_of(name, [self.range(x) for x in plain])
            if low == high:
                return int(low)
        return self.step(name, form, value, plain)

    def compare(self, name: str, x: Any, y: Any) -> bool:
        """Whether ``x name y``, of "<" and "==", which becomes a condition where others do not say
        so already."""
        x, y = self.plain(x), self.plain(y)
        a, b = (z.value if type(z) is Symbol else z for z in (x, y))
        holds = bool(a < b if name == "<" else a == b)
        if not (type(x) is Symbol or type(y) is Symbol):
            return holds
        texts = self.text(x), self.text(y)
        if texts[0] == texts[1] and a == a:
            return name == "=="
        if type(a) is type(b) is int:
            (low, high), (least, most) = self.range(x), self.range(y)
            if name == "<" and (high < least or low >= most):
                return high < least
            if name == "==" and (high < least or low > most):
                return False
            if type(y) is int or type(x) is int:
                self._bound(name, x, y, holds)
                return holds
        known = self._facts.get((name, *texts))
        if known is None:
            self._facts[name, *texts] = holds
            if name == "==":
                self._facts[name, texts[1], texts[0]] = holds
            text = f"{texts[0]} {name} {texts[1]}"
            nodes = tuple(t for t in texts if t in self._nodes)
            self._condition(text if holds else f"not {text}", nodes)
            if name == "==" and holds and type(a) is type(b) is int:
                self._unite(*texts)
        return holds

    def _bound(self, name: str, x: Any, y: Any, holds: bool) -> None:
        """A condition on an integer, the other side of which is a number."""
        text = self.text(x if type(x) is Symbol else y)
        node, (low, high) = self._nodes[text], _ANY
        if name == "<":
            if type(x) is Symbol:
                low, high = (low, y - 1) if holds else (y, high)
            else:
                low, high = (x + 1, high) if holds else (low, x)
        else:
            n = y if type(x) is Symbol else x
            if holds:
                low = high = n
            elif n in node.unlike:
                return
            else:
                node.unlike |= {n}
        if not node.bound:
            node.bound = True
            self._condition("", (text,))
        node.wanted = max(node.wanted[0], low), min(node.wanted[1], high)

    def know(self, symbol: Any, known: Range) -> None:
        """What is known of a step beside what its operands' ranges say."""
        self._nodes[self.text(symbol)].known = known

    def _condition(self, text: str, nodes: tuple[str, ...]) -> None:
        self._conditions.append(_Condition(text, nodes, len(self._nodes)))

    def _unite(self, x: str, y: str) -> None:
        """Two nodes are equal: from now on the first of them stands for both."""
        names = list(self._nodes)
        first, other = sorted((x, y), key=names.index)
        self._same[other] = first
        a, b = self._nodes[first], self._nodes[other]
        low, high = b.range
        a.known = max(a.known[0], low), min(a.known[1], high)

    def plain(self, x: Any) -> Any:
        """A number instead of a symbol that can have no other value; booleans as integers."""
        if type(x) is Symbol:
            low, high = self.range(x)
            return x.value if low == high else x
        return int(x) if type(x) is bool else x

    def text(self, x: Any) -> str:
        """A number or a symbol in the function's source."""
        if type(x) is Symbol:
            if x.trace is not self:
                raise TypeError("a symbol of another trace")
            name = x.node
            while name in self._same:
                name = self._same[name]
            return name
        text = repr(x)
        return f"({text})" if text.startswith("-") else text

    def range(self, x: Any) -> Range:
        """What is known of an integer."""
        if type(x) is not Symbol:
            return (x, x) if type(x) is int else _ANY
        return self._nodes[self.text(x)].range if type(x.value) is int else _ANY

    def _factor(self, x: Any) -> int:
        return self._nodes[self.text(x)].factor if type(x) is Symbol else abs(x)

    def _factor_of(self, name: str, operands: Sequence[Any]) -> int:
        factors = [self._factor(x) if type(value_of(x)) is int else 1 for x in operands]
        if name == "*":
            return math.prod(factors)
        return math.gcd(*factors) if name in ("+", "-", "negative") else 1

    def code(self, outputs: Iterable[Any], late: frozenset[str]) -> tuple[list[str], list[str]]:
        """Lines that compute outputs, and return None where a condition does not hold: those that
        need no ``late`` input, and those that do."""
        depends = self._depending(late)
        needed: set[str] = set()
        ahead = [self.text(x) for x in outputs] + [n for c in self._conditions for n in c.nodes]
        while ahead:
            name = ahead.pop()
            if name in self._nodes and name not in needed:
                needed.add(name)
                ahead += self._nodes[name].operands
        lines: tuple[list[str], list[str]] = ([], [])
        texts: tuple[list[str], list[str]] = ([], [])
        conditions = iter([*self._conditions, _Condition("", (), len(self._nodes) + 1)])
        condition = next(conditions)

        def flush(when: int) -> None:
            if texts[when]:
                lines[when].append(f"if not ({' and '.join(texts[when])}): return None")
                texts[when].clear()

        for i, name in enumerate([*self._nodes, ""]):
            while condition.after <= i:
                when = any(depends[n] for n in condition.nodes)
                texts[when].extend([condition.text] if condition.text else self._bounds(condition))
                condition = next(conditions)
            if name in needed and self._nodes[name].text:
                flush(depends[name])
                lines[depends[name]].append(f"{name} = {self._nodes[name].text}")
        flush(0)
        flush(1)
        return lines

    def _bounds(self, condition: _Condition) -> list[str]:
        (name,) = condition.nodes
        node = self._nodes[name]
        (low, high), (least, most) = node.wanted, node.known
        if low == high:
            return [f"{name} == {low}"]
        texts = []
        if low > least and high < most:
            texts.append(f"{low} <= {name} <= {high}")
        elif low > least:
            texts.append(f"{name} >= {low}")
        elif high < most:
            texts.append(f"{name} <= {high}")
        return texts + [f"{name} != {n}" for n in sorted(node.unlike) if low <= n <= high]


def _is(x: Any, n: int) -> bool:
    return type(x) is int and x == n


def _range_of(name: str, ranges: Sequence[Range]) -> Range:
    """What is known of a step's integer result, by its operands' ranges."""
    (a, b), (c, d) = ranges[0], ranges[-1]
    if name == "+":
        return a + c, b + d
    if name == "-" and len(ranges) == 2:
        return a - d, b - c
    if name == "negative":
        return -b, -a
    if name == "*" and a >= 0 and c >= 0:
        return a * c, b * d if b and d else 0
    if name == "//" and a >= 0 and c > 0:
        return a // d if d < math.inf else 0, b // c if b < math.inf else b
    if name == "%" and c > 0:
        return 0, min(d - 1, b) if a >= 0 else d - 1
    if name in (">>", "bits") and a >= 0:
        return 0, b
    if name in ("&", "|", "<<", "abs") and a >= 0 and c >= 0:
        return 0, math.inf
    return _ANY
