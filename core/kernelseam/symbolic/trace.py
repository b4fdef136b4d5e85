"""A record of computations with symbols and of the conditions that they took, and its source as a
Python function."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kernelseam.symbolic.polynomials import Terms, combined, constant, factor, linear
from kernelseam.symbolic.source import ANY, Condition, Node, Range, Source
from kernelseam.symbolic.symbol import Symbol, value_of

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
"""Recorded operators: how each is computed, and its source."""
Facts = Mapping[str, Range | str]
"""Input → the range that conditions leave it, or an earlier input that it equals."""


class Trace:
    """Symbols, the operations on them, and the conditions under which these hold."""

    def __init__(self, facts: Facts | None = None) -> None:
        """``facts``: from an earlier trace of the same computation over the same values. They are
        this trace's first conditions; conditions that follow from them are not recorded."""
        self._nodes: dict[str, Node] = {}
        self._steps: dict[tuple[str, tuple[str, ...]], str] = {}
        self._by_terms: dict[frozenset[tuple[tuple[str, ...], int]], str] = {}
        self._conditions: list[Condition] = []
        self._facts: dict[tuple[str, str, str], bool] = {}
        self._same: dict[str, str] = {}
        self._given = facts or {}
        self.namespace: dict[str, object] = {"inf": math.inf, "nan": math.nan}

    def input(self, name: str, value: Any, most: float = math.inf) -> Any:
        """A symbol for a number that the function takes; an integer must not be negative. If
        ``value`` is at most ``most``, the function refuses larger ones, and more is known of the
        symbol."""
        known = (0, math.inf) if type(value) is int else ANY
        node = Node(len(self._nodes), "", "", (), {(name,): 1}, known, known)
        result = self._new(name, node, value)
        if type(value) is int:
            fact = self._given.get(name, (0, most if value <= most else math.inf))
            if isinstance(fact, str):
                self.compare("==", Symbol(self, fact, value), result)
            elif fact != known:
                node.bound = True
                node.want(*fact)
                self._condition("", (name,))
        return result

    def facts(self, late: frozenset[str]) -> Facts:
        """The facts of all inputs but the ``late`` ones."""
        inputs = [n for n, x in self._nodes.items() if not x.form and n not in late]
        found: dict[str, Range | str] = {n: self._nodes[n].range for n in inputs}
        for name in inputs:
            first = self._first(name)
            if first != name and first in inputs:
                found[name] = first
        return found

    def _new(self, name: str, node: Node, value: Any) -> Symbol:
        self._nodes[name] = node
        if type(value) is int:
            self._by_terms.setdefault(frozenset(node.terms.items()), name)
        return Symbol(self, name, value)

    @contextmanager
    def branch(self, late: frozenset[str]) -> Iterator[None]:
        """Continue the trace within the block, where conditions without a ``late`` input are taken
        to hold already; afterwards the trace is as before."""
        whole = {n: x for n, x in vars(self).items() if n != "namespace"}
        depends = self._depending(late)
        for name in ("_steps", "_by_terms", "_facts", "_same"):
            setattr(self, name, dict(whole[name]))
        self._nodes = {
            n: replace(x) if depends[n] else replace(x, known=x.range, wanted=ANY, bound=False)
            for n, x in self._nodes.items()
        }
        self._conditions = [c for c in self._conditions if any(depends[n] for n in c.nodes)]
        try:
            yield
        finally:
            vars(self).update(whole)

    def _depending(self, late: frozenset[str]) -> dict[str, bool]:
        """Node → whether it depends on a late input."""
        depends: dict[str, bool] = {}
        for name, node in self._nodes.items():
            depends[name] = name in late or any(depends.get(x, False) for x in node.operands)
        return depends

    def dependence(self, late: frozenset[str]) -> Callable[[Any], bool]:
        """A function that says whether a value depends on a late input."""
        depends = self._depending(late)
        return lambda x: depends.get(self.text(x), False)

    def step(
        self, name: str, form: str, value: Any, operands: Sequence[Any], terms: Terms | None = None
    ) -> Any:
        """A symbol for the result of an operation. ``terms``: an integer result as a polynomial of
        other numbers, if it is one."""
        texts = tuple([self.text(x) for x in operands])
        key = (name, texts)
        node = self._steps.get(key)
        if node is not None:
            return Symbol(self, node, value)
        place, known = len(self._nodes), ANY
        node = self._steps[key] = f"t{place}"
        if type(value) is int:
            known = _range_of(name, [self.range(x) for x in operands])
        whole = Node(place, name, form, texts, terms or {(node,): 1}, known, known)
        return self._new(node, whole, value)

    def arithmetic(self, name: str, operands: Sequence[Any]) -> Any:
        """An operator's result; a plain number where conditions allow no other."""
        plain = [self.plain(x) for x in operands]
        compute, form = _FORMS[name]
        value = compute(*map(value_of, plain))
        if Symbol not in map(type, plain):
            return value
        terms = None
        if type(value) is int:
            x, y = plain[0], plain[-1]
            if name == "negative":
                terms = combined("-", {}, self._terms(x))
            else:
                terms = combined(name, self._terms(x), self._terms(y))
            if terms is not None:
                if (known := self._of(terms, value)) is not None:
                    return known
            elif type(y) is int and y > 0 and name in ("//", "%"):
                if (simpler := self._divided(name, x, y)) is not None:
                    return simpler
            elif _is(y, 0) and name in ("|", "^", "<<", ">>"):
                return x
            low, high = _range_of(name, [self.range(x) for x in plain])
            if low == high:
                return int(low)
        return self.step(name, form, value, plain, terms)

    def _place(self, x: Any) -> int:
        return self._nodes[self.text(x)].place if type(x) is Symbol else -1

    def _terms(self, x: Any) -> Terms:
        return self._nodes[self.text(x)].terms if type(x) is Symbol else constant(x)

    def _of(self, terms: Terms, value: int) -> Any:
        """The symbol with this polynomial, if there is one."""
        if terms.keys() <= {()}:
            return value
        name = self._by_terms.get(frozenset(terms.items()))
        return None if name is None else Symbol(self, name, value)

    def _divided(self, name: str, x: Symbol, y: int) -> Any:
        """A quotient or a remainder, simplified where the operands' ranges allow it."""
        terms = self._terms(x)
        if (most := factor(terms, y)) > 1:
            less = self._of({f: n // most for f, n in terms.items()}, x.value // most)
            if less is not None:
                result = self.arithmetic(name, (less, y // most))
                return result if name == "//" else result * most
        if name == "//" and max(terms.values()) < 0:
            return -((-x + (y - 1)) // y)
        return None

    def compare(self, name: str, x: Any, y: Any) -> bool:
        """Whether ``x name y``, where ``name`` is "<" or "=="; recorded as a condition unless
        others imply it."""
        x, y = self.plain(x), self.plain(y)
        a, b = (z.value if type(z) is Symbol else z for z in (x, y))
        holds = bool(a < b if name == "<" else a == b)
        if not (type(x) is Symbol or type(y) is Symbol):
            return holds
        texts = self.text(x), self.text(y)
        if texts[0] == texts[1] and a == a:
            return name == "=="
        if integers := type(a) is type(b) is int:
            (low, high), (least, most) = self.range(x), self.range(y)
            if name == "<" and (high < least or low >= most):
                return high < least
            if name == "==" and (high < least or low > most):
                return False
            if (simpler := self._simpler(name, x, y)) is not None:
                return simpler
            if type(y) is int or type(x) is int:
                self._bound(name, x, y, holds)
                return holds
        known = self._facts.get((name, *texts))
        if known is None:
            self._facts[name, *texts] = holds
            if name == "==":
                self._facts[name, texts[1], texts[0]] = holds
            nodes = tuple([t for t in texts if t in self._nodes])
            places = iter(range(2))
            sides = [f"{{{next(places)}}}" if t in self._nodes else t for t in texts]
            text = f"{sides[0]} {name} {sides[1]}"
            same = name == "==" and holds and integers
            self._condition(text if holds else f"not {text}", nodes, same)
            if same:
                self._unite(*texts)
        return holds

    def _simpler(self, name: str, x: Any, y: Any) -> bool | None:
        """Whether ``x name y``, as a comparison of a common factor of x − y with a constant; None
        where that is no simpler."""
        terms = combined("-", self._terms(x), self._terms(y)) or {}
        if terms.keys() <= {()}:
            n = terms.get((), 0)
            return n < 0 if name == "<" else n == 0
        difference = value_of(x) - value_of(y)
        for unit, rest, added in linear(terms):
            number = self._of(rest, (difference - added) // unit)
            if number is None or self._place(number) >= max(self._place(x), self._place(y)):
                continue
            if name == "==":
                return not added % unit and self.compare(name, number, -added // unit)
            if unit > 0:  # number < -added / unit
                return self.compare(name, number, -(added // unit))
            return self.compare(name, added // -unit, number)
        return None

    def _bound(self, name: str, x: Any, y: Any, holds: bool) -> None:
        """Narrow an integer's range by a comparison with a plain number."""
        text = self.text(x if type(x) is Symbol else y)
        node, (low, high) = self._nodes[text], ANY
        if name == "<":
            if type(x) is Symbol:
                low, high = (low, y - 1) if holds else (y, high)
            else:
                low, high = (x + 1, high) if holds else (low, x)
        else:
            n = y if type(x) is Symbol else x
            if holds:
                low = high = n
            elif n == node.range[0]:
                low = n + 1
            elif n in node.unlike:
                return
            else:
                node.unlike |= {n}
        if not node.bound:
            node.bound = True
            self._condition("", (text,))
        node.want(low, high)

    def know(self, symbol: Any, known: Range) -> None:
        """Add a range that is known of a result besides what its operands' ranges imply."""
        self._nodes[self.text(symbol)].know(known)

    def _condition(self, text: str, nodes: tuple[str, ...], equal: bool = False) -> None:
        self._conditions.append(Condition(text, nodes, len(self._nodes), equal))

    def _unite(self, x: str, y: str) -> None:
        """Record that two nodes are equal; the earlier one stands for both from here on."""
        first, other = sorted((x, y), key=lambda name: self._nodes[name].place)
        self._same[other] = first
        a, b = self._nodes[first], self._nodes[other]
        (low, high), (least, most) = a.known, b.range
        a.know((max(low, least), min(high, most)))

    def plain(self, x: Any) -> Any:
        """The plain number of a symbol that can have no other value; booleans as integers."""
        if type(x) is Symbol:
            low, high = self._nodes[self.text(x)].range
            return x.value if low == high else x
        return int(x) if type(x) is bool else x

    def text(self, x: Any) -> str:
        """A number or a symbol as it stands in the function's source."""
        if type(x) is Symbol:
            if x.trace is not self:
                raise TypeError("a symbol of another trace")
            first: str = self._first(x.node)
            return first
        text = repr(x)
        return f"({text})" if text.startswith("-") else text

    def _first(self, name: str) -> str:
        """The node that represents all nodes equal to this one."""
        while name in self._same:
            name = self._same[name]
        return name

    def range(self, x: Any) -> Range:
        """The range of an integer."""
        if type(x) is not Symbol:
            return (x, x) if type(x) is int else ANY
        return self._nodes[self.text(x)].range if type(x.value) is int else ANY

    def code(self, outputs: Iterable[Any], late: frozenset[str]) -> tuple[list[str], list[str]]:
        """Source lines that compute the outputs, and return None where a condition does not hold:
        (those without a ``late`` input, those with one)."""
        texts = map(self.text, outputs)
        return Source(self._nodes, self._conditions, texts, self._depending(late)).lines


def _is(x: Any, n: int) -> bool:
    return type(x) is int and x == n


def _range_of(name: str, ranges: Sequence[Range]) -> Range:
    """The range of an operation's integer result, from its operands' ranges."""
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
    return ANY
