"""Splits a call's options into numbers, which are launch arguments as extents are, and others,
which are part of the plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, cast

from kernelseam.ops.array_call import put

Options = tuple[Any, ...]
Getter = Callable[[Options], Options]


class Split:
    """Where the numbers are among options of given types. Tuples are searched; bools are no
    numbers."""

    def __init__(self, options: Options) -> None:
        numbers, others = list[str](), list[str]()
        for i, x in enumerate(options):
            for place, y in (
                [(f"{i}", x)]
                if type(x) is not tuple
                else [(f"{i}][{j}", y) for j, y in enumerate(x)]
            ):
                (numbers if type(y) in (int, float) else others).append(place)
        self.numbers: Getter | None = _getter(numbers) if numbers else None
        """``numbers(options)``: a tuple; None where there are none."""
        self.others: Getter = _getter(others)

    def parted(self, options: Options) -> tuple[Options, Options]:
        """The numbers, and the others."""
        if self.numbers is None:
            return (), options
        return self.numbers(options), self.others(options)

    @staticmethod
    def replaced(options: Options, number: Callable[[Any], Any]) -> Options:
        """The options with ``number(x)`` for each number, called in the order of ``parted``."""

        def other(x: Any) -> Any:
            return number(x) if type(x) in (int, float) else x

        return tuple([tuple(map(other, x)) if type(x) is tuple else other(x) for x in options])


def _getter(places: list[str]) -> Getter:
    """A tuple of what is at these places, made without a function of Python's where possible."""
    if not any("[" in x for x in places) and (flat := picked([int(x) for x in places])):
        return flat
    getter: Getter = eval(f"lambda o: ({''.join(f'o[{x}], ' for x in places)})")
    return getter


def picked(places: list[int]) -> Getter | None:
    """A function, none of Python's, that gives a tuple of what is at these places of a tuple; None
    where there are none."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1)) if places else None


def _kind(x: Any) -> Hashable:
    kind: Any = tuple(map(type, x)) if type(x) is tuple else type(x)
    return cast(Hashable, kind)


SPLITS: dict[Hashable, Split] = {}
"""By the types of options, of tuples by those of their elements."""


def split_of(options: Options) -> Split:
    """The same for all options of the same types."""
    kinds = tuple(map(_kind, options))
    split = SPLITS.get(kinds)
    if split is None:
        put(SPLITS, kinds, split := Split(options))
    return split
