"""A call's options, parted into numbers, which are arguments as extents are, and the others, which
are part of what is planned."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

from kernelseam.ops.planned_call import put

Options = tuple[Any, ...]


class Split:
    """Where options of these types have numbers. Tuples are looked into; bools are no numbers."""

    def __init__(self, options: Options) -> None:
        numbers, others = "", ""
        for i, x in enumerate(options):
            for place, y in (
                [(f"o[{i}]", x)]
                if type(x) is not tuple
                else [(f"o[{i}][{j}]", y) for j, y in enumerate(x)]
            ):
                if type(y) in (int, float):
                    numbers += f"{place}, "
                else:
                    others += f"{place}, "
        parted = f"lambda o: (({numbers}), ({others}))"
        self.parted: Callable[[Options], tuple[Options, Options]] = eval(parted)
        """``parted(options)``: the numbers, and the others."""

    @staticmethod
    def replaced(options: Options, number: Callable[[Any], Any]) -> Options:
        """The options with ``number(x)`` for each number, called in the order of ``parted``."""

        def other(x: Any) -> Any:
            return number(x) if type(x) in (int, float) else x

        return tuple([tuple(map(other, x)) if type(x) is tuple else other(x) for x in options])


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
