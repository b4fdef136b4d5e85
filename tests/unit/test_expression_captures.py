"""A remembered trace serves a function only where it is what a new trace of it would be; and what
cannot be remembered is refused."""

from __future__ import annotations

import collections
import enum
import fractions
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import epilogues
from kernelseam.errors import InvalidValue
from kernelseam.expressions import tracing
from kernelseam.expressions.scores import score_expression

Mod = Callable[..., Any]
X, Y = np.arange(1.0, 5.0), np.arange(3.0, 7.0)


class Mode(enum.Enum):
    DOUBLED = 1
    PLAIN = 2


class Text(enum.StrEnum):
    DOUBLED = "doubled"
    PLAIN = "plain"


@dataclass(slots=True)
class Slots:
    factor: float


Pair = collections.namedtuple("Pair", "factor other")


class Sequence:
    def __init__(self, *factors: float) -> None:
        self.factors = factors

    def __len__(self) -> int:
        return len(self.factors)

    def __getitem__(self, i: int) -> float:
        return self.factors[i]


class Called:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * self.factor


def of_mode(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * 2 if x == Mode.DOUBLED else s


def of_identity(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * 2 if x is Mode.DOUBLED else s


def of_text(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * 2 if x == Text.DOUBLED else s


def of_length(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * len(x)


def of_membership(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * 2 if 3 in x else s


def of_elements(x: Any) -> Mod:
    return lambda s, b, h, q, kv: sum((s * y for y in x), s)


def of_a_float(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * float(x)


def of_an_attribute(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * x.factor


def of_a_default(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * getattr(x, "factor", 3.0)


def of_truth(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * 2 if x else s


def of_a_kind(x: Any) -> Mod:
    return lambda s, b, h, q, kv: s * 2 if isinstance(x, Slots) else s


def of_two_arrays(x: Any) -> Mod:
    first, second = x
    return lambda s, b, h, q, kv: s * first[h] + second[h]


def of_two_functions(x: Any) -> Mod:
    first, second = x
    return lambda s, b, h, q, kv: second(first(s))


def scaled(x: float) -> Mod:
    return lambda s: s * x


def namespace(**values: Any) -> Any:
    return types.SimpleNamespace(**values)


def module(factor: float) -> Any:
    made = types.ModuleType("made")
    made.__dict__["factor"] = factor
    return made


def kind(factor: float) -> Any:
    return type("Kind", (type("Base", (), {"factor": factor}),), {})


TWICE, THRICE = scaled(2.0), scaled(3.0)
CASES: dict[str, tuple[Callable[[Any], Mod], Any, Any]] = {
    "members of an Enum": (of_mode, Mode.DOUBLED, Mode.PLAIN),
    "by identity": (of_identity, Mode.PLAIN, Mode.DOUBLED),
    "that are strings": (of_text, Text.DOUBLED, Text.PLAIN),
    "an array's length": (of_length, np.ones((3, 2)), np.ones((5, 2))),
    "an object's length": (of_length, Sequence(1.0), Sequence(1.0, 2.0)),
    "a set": (of_membership, {3}, {4}),
    "a frozenset": (of_membership, frozenset({4}), frozenset({3})),
    "a range": (of_elements, range(2), range(4)),
    "a deque": (of_elements, collections.deque([2.0]), collections.deque([2.0, 3.0])),
    "an object's elements": (of_elements, Sequence(2.0), Sequence(2.0, 3.0)),
    "a fraction": (of_a_float, fractions.Fraction(1, 2), fractions.Fraction(1, 4)),
    "slots": (of_an_attribute, Slots(2.0), Slots(3.0)),
    "a named tuple": (of_an_attribute, Pair(2.0, 1), Pair(3.0, 1)),
    "a class": (of_an_attribute, kind(2.0), kind(3.0)),
    "a module": (of_an_attribute, module(2.0), module(3.0)),
    "an attribute that is not there": (of_a_default, namespace(), namespace(factor=2.0)),
    "truth": (of_truth, Sequence(), Sequence(1.0)),
    "a kind": (of_a_kind, Slots(1.0), namespace()),
    "one array, and two": (of_two_arrays, (X, X), (X, Y)),
    "one function, and two": (of_two_functions, (TWICE, TWICE), (TWICE, THRICE)),
    "an object that is called": (Called, 2.0, 3.0),
}


def written(function: Mod) -> tuple[str, tuple[Any, ...], tuple[int, ...]]:
    e = score_expression(function)
    return str(e), e.numbers, tuple(map(id, e.arrays))


@pytest.mark.parametrize("name", CASES)
def test_what_a_function_reads_is_looked_at_again(name: str) -> None:
    make, *values = CASES[name]
    new = []
    for x in values:
        tracing.forget()
        new.append(written(make(x)))
    assert new[0] != new[1]
    tracing.forget()
    assert [written(make(x)) for x in values] == new


def test_what_is_changed_in_place_is_looked_at_again() -> None:
    seen = {3}
    function = of_membership(seen)
    assert str(score_expression(function)) == "score_mod=mul(score, 2.0)"
    seen.remove(3)
    assert str(score_expression(function)) == ""


def test_one_array_twice_and_then_two() -> None:
    """In an epilogue: the second array was taken for the first one."""
    tracing.forget()
    a, b = np.ones((1, 3, 5)), np.ones((1, 5, 4))
    for first, second in ((X, X), (X, Y), (Y, X)):
        epilogue: Any = [epilogues.column_bias(first), epilogues.column_factor(second)]
        np.testing.assert_array_equal(
            kernelseam.bmm(a, b, epilogue=epilogue),
            np.broadcast_to((5 + first) * second, (1, 3, 4)),
        )


def test_objects_are_not_compared() -> None:
    """Their stand-ins would all differ."""
    one, same = Slots(2.0), Slots(2.0)
    with pytest.raises(InvalidValue, match="a Slots is compared. Compare a number"):
        score_expression(lambda s, b, h, q, kv: s * 2 if one == same else s)


def test_a_captured_array_has_elements() -> None:
    """Python's iteration did not end."""
    pair = X[:2]
    e = score_expression(lambda s, b, h, q, kv: sum((s * x for x in pair), s))
    assert str(e) == str(score_expression(lambda s, b, h, q, kv: s + s * pair[0] + s * pair[1]))


def drawn(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + np.random.rand()


def counted(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * next(COUNT)


def looked_up(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * {0: 1.0}.get(h, 2.0)


def among(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * 2 if h in {0, 1} else s


def asked(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * 2 if X else s


COUNT = iter(range(99))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (drawn, "two calls of it differ: it draws random numbers"),
        (counted, "two calls of it differ"),
        (looked_up, "a dict's or a set's key needs one value, and this differs"),
        (among, "a dict's or a set's key needs one value"),
        (asked, "an array is used without indices"),
    ],
)
def test_what_has_no_expression_is_refused(function: Mod, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        score_expression(function)


def test_a_captured_number_may_be_a_key() -> None:
    def of(window: int) -> Mod:
        return lambda s, b, h, q, kv: s * {1: 2.0}.get(window, 3.0)

    found = [str(score_expression(of(n))) for n in (1, 2)]
    assert found == [f"score_mod=mul(score, {x})" for x in (2.0, 3.0)]
