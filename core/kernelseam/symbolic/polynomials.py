"""Integers of a trace as polynomials of those that it computes otherwise: they show that two steps
are the same, that one is constant, or that a condition is one on fewer numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Terms = dict[tuple[str, ...], int]
"""Factors of a product, sorted, and how often it is added; no product of none counts ones."""
_MOST = 32
"""Terms beyond which a product is a number of its own."""


def constant(n: int) -> Terms:
    return {(): n} if n else {}


def combined(name: str, x: Terms, y: Terms) -> Terms | None:
    """What an operator makes of two; None where that is no polynomial."""
    if name in ("+", "-"):
        result = dict(x)
        for factors, n in y.items():
            result[factors] = result.get(factors, 0) + (n if name == "+" else -n)
    elif name == "*" and len(x) * len(y) <= _MOST:
        result = {}
        for a, n in x.items():
            for b, m in y.items():
                factors = tuple(sorted(a + b))
                result[factors] = result.get(factors, 0) + n * m
    elif name in ("//", "%") and y.keys() == {()} and not any(n % y[()] for n in x.values()):
        return {f: n // y[()] for f, n in x.items()} if name == "//" else {}
    else:
        return None
    return {f: n for f, n in result.items() if n}


def factor(terms: Mapping[tuple[str, ...], int], *others: int) -> int:
    """The largest that divides the value, whatever its numbers are, and the others."""
    return math.gcd(*terms.values(), *others)


def linear(terms: Terms) -> Sequence[tuple[int, Terms, int]]:
    """Factors, polynomials and numbers of which it is the product and sum, other than itself."""
    rest = {f: n for f, n in terms.items() if f}
    if not rest:
        return ()
    most, added = factor(rest), terms.get((), 0)
    found = [(n, {f: c // n for f, c in rest.items()}, added) for n in (most, -most)]
    return [x for x in found if x[1] != terms]
