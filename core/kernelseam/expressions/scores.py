"""What users write of an attention's scores and masks, as one expression."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from kernelseam.errors import InvalidValue
from kernelseam.expressions.block_mask import BlockMask, block_mask_of
from kernelseam.expressions.blocks import DTYPE, RANK, Blocks
from kernelseam.expressions.captures import Record, dtype_name
from kernelseam.expressions.lowering import Structure
from kernelseam.expressions.nodes import Node, Type, constant, coordinate, order, rebuilt
from kernelseam.expressions.tracing import LENGTHS, Kind, Trace, record_of, trace
from kernelseam.frozen import dataclass

ScoreMod = Callable[..., Any]
"""score_mod(score, b, h, q_idx, kv_idx)"""
MaskMod = Callable[..., Any]
"""mask_mod(b, h, q_idx, kv_idx)"""

INDICES = tuple((name, Type.INT32) for name in ("b", "h", "q_idx", "kv_idx"))
SCORE = ("score", Type.FLOAT)
_SCORE_MOD = Kind(
    "score_mod", "score_mod(score, b, h, q_idx, kv_idx)", (SCORE, *INDICES), Type.FLOAT, LENGTHS
)
_MASK_MOD = Kind("mask_mod", "mask_mod(b, h, q_idx, kv_idx)", INDICES, Type.BOOLEAN, LENGTHS)


@dataclass(frozen=True, eq=False)
class ScoreExpression:
    """A score_mod and a mask_mod, traced: the structure that binaries are made of, and what the
    functions captured. ``score_mod`` and ``mask_mod`` are the user's own."""

    structure: Structure
    numbers: tuple[int | float, ...]
    arrays: tuple[Any, ...]
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None

    def __str__(self) -> str:
        return str(self.structure)


def score_expression(
    score_mod: ScoreMod | ScoreExpression | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | Any = None,
) -> ScoreExpression:
    """Trace what is given.

    ``score_mod(score, b, h, q_idx, kv_idx)`` is the new score of a query and a key, of float32:
    ``score`` is what the other options make of scale·q·k. ``mask_mod(b, h, q_idx, kv_idx)`` is True
    where the key is visible. Indices count from 0 within a sequence's own queries and keys; a
    function that has parameters ``q_len`` or ``kv_len`` gets its lengths by keyword. Both are
    ordinary Python over operators, comparisons, ``where``, functions of NumPy and torch, and arrays
    that they capture, by element. ``block_mask``, ours or torch's, has a mask_mod of its own.
    An expression in the place of the functions is returned. Raises InvalidValue, with the line, for
    what cannot be traced.
    """
    if isinstance(score_mod, ScoreExpression):
        return score_mod
    given = None if block_mask is None else block_mask_of(block_mask)
    if given is not None:
        if mask_mod is not None:
            raise InvalidValue(
                "mask_mod",
                "given",
                "is that of block_mask where there is one",
                "Leave it out, or make a block_mask of both",
            )
        mask_mod = given.mask_mod
    score = Trace(coordinate(*SCORE), (), ())
    if score_mod is not None:
        score = trace(_SCORE_MOD, score_mod)
    visible = Trace(constant(True), (), ())
    if mask_mod is not None:
        visible = trace(_MASK_MOD, mask_mod)
    arrays = (*score.arrays, *visible.arrays)
    blocks, lengths, words = (
        (None, (), ())
        if given is None
        else (given.blocks, (given.q_len, given.kv_len), (given.words,))
    )
    structure = _joined(
        score.root,
        visible.root,
        (len(score.numbers), len(visible.numbers)),
        len(score.arrays),
        tuple((dtype_name(x), len(x.shape)) for x in arrays),
        blocks,
    )
    numbers = (*score.numbers, *visible.numbers, *lengths)
    return ScoreExpression(structure, numbers, (*arrays, *words), score_mod, mask_mod)


def records(score_mod: ScoreMod | None, mask_mod: MaskMod | None) -> tuple[Record | None, ...]:
    """What the traces of functions, which were traced, depend on beside their code."""
    kinds = (score_mod, _SCORE_MOD), (mask_mod, _MASK_MOD)
    return tuple(None if f is None else record_of(kind, f) for f, kind in kinds)


@lru_cache(512)
def _joined(
    score: Node,
    visible: Node,
    numbers: tuple[int, int],
    arrays_of_score: int,
    arrays: tuple[tuple[str, int], ...],
    blocks: Blocks | None,
) -> Structure:
    """Both in one numbering: what the mask captured comes after what the score did."""
    visible = shifted(visible, numbers[0], arrays_of_score)
    types = dict.fromkeys(range(sum(numbers)), Type.INT32)
    types |= {n.value: n.type for n in order([score, visible]) if n.operation == "argument"}
    listed = () if blocks is None else ((DTYPE, RANK),)
    lengths = (Type.INT32, Type.INT32) * len(listed)
    return Structure(score, visible, (*types.values(), *lengths), (*arrays, *listed), blocks)


def shifted(root: Node, numbers: int, arrays: int) -> Node:
    """A node whose captured numbers and arrays are counted from so many on."""
    done: dict[Node, Node] = {}
    for n in order([root]):
        inner = tuple(done[x] for x in n.arguments)
        if n.operation == "argument":
            done[n] = Node(n.operation, n.type, (), n.value + numbers)
        elif n.operation == "load":
            index, dtype, rank = n.value
            done[n] = Node(n.operation, n.type, inner, (index + arrays, dtype, rank))
        else:
            done[n] = rebuilt(n, inner)
    return done[root]
