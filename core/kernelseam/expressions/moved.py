"""An expression over a part of what it was written for: where that begins is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from kernelseam.expressions.lowering import Structure
from kernelseam.expressions.nodes import Node, Type, coordinate, make, substitute
from kernelseam.expressions.scores import ScoreExpression


def moved(
    expression: ScoreExpression, first: Mapping[str, int], lengths: Mapping[str, int]
) -> ScoreExpression:
    """``expression`` where the indices named in ``first`` count from so many ahead of a call's own,
    and ``lengths`` are these. Other numbers are the same structure. Blocks in memory, which are of
    the whole, have no such form."""
    s = expression.structure
    assert s.blocks is None
    read = s.score.reads | s.visible.reads
    ahead, fixed = ({n: x for n, x in of.items() if n in read} for of in (first, lengths))
    numbers = (*expression.numbers, *ahead.values(), *fixed.values())
    structure = _structure(s, tuple(ahead), tuple(fixed))
    return ScoreExpression(structure, numbers, expression.arrays)


@lru_cache(512)
def _structure(s: Structure, ahead: tuple[str, ...], fixed: tuple[str, ...]) -> Structure:
    count = len(s.numbers)
    names = (*ahead, *fixed)
    numbers = {n: Node("argument", Type.INT32, (), count + i) for i, n in enumerate(names)}
    by = {
        coordinate(n): make("add", coordinate(n), x) if n in ahead else x
        for n, x in numbers.items()
    }
    return s._replace(
        score=substitute(s.score, by),
        visible=substitute(s.visible, by),
        numbers=(*s.numbers, *(x.type for x in numbers.values())),
    )
