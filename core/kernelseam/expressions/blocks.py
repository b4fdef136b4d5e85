"""Which blocks of queries × keys a mask leaves empty, mixed or whole, as bits in memory, and as
expressions over these.

An int32 array [B, H, block rows, words, 2]: bit i of a word stands for block column 32·word + i.
The first plane has the blocks of which a query may see a key, the second those of which each query
sees every key. B and H are 1 where the mask does not tell entries or heads apart.
"""

from __future__ import annotations

from typing import NamedTuple

from kernelseam.expressions.bounds import CORNERS, Bounds, bounds
from kernelseam.expressions.nodes import Node, Type, cast, constant, coordinate, make

SOME, WHOLE = 0, 1
"""The planes."""
WORD = 32
"""Blocks of a word."""
RANK, DTYPE = 5, "int32"


class Blocks(NamedTuple):
    """The block lists of an expression, whose last captured array they are; the numbers that it
    captured end with the queries and keys that they are for."""

    q_size: int
    """Queries of a block; ``kv_size`` keys."""
    kv_size: int
    decide: bool
    """Whether a block that is not listed is hidden and one that is listed as whole is seen,
    whatever the mask says: so torch's are. Else they tell what the mask does."""

    def over(self, mask: Node, array: int) -> tuple[Node, Bounds]:
        """(whether a query sees a key; whether every query of a block sees all of its keys, and
        whether some query may see one), given the mask and the array's number."""
        low, high = bounds(mask)
        some, whole = self._block(array, SOME), self._block(array, WHOLE)
        if not self.decide:
            return mask, Bounds(make("or", whole, low), make("and", some, high))
        seen = make("or", self._bit(array, WHOLE), make("and", self._bit(array, SOME), mask))
        return seen, Bounds(whole, some)

    def _bit(self, array: int, plane: int) -> Node:
        """A plane's bit for one query and key."""
        row = make("floordiv", coordinate("q_idx"), constant(self.q_size))
        column = make("floordiv", coordinate("kv_idx"), constant(self.kv_size))
        at = coordinate("b"), coordinate("h"), row, make("shr", column, constant(5))
        word = Node("load", Type.INT32, (*at, constant(plane)), (array, DTYPE, RANK))
        shifted = make("shr", word, make("bitand", column, constant(WORD - 1)))
        return cast(make("bitand", shifted, constant(1)), Type.BOOLEAN)

    def _block(self, array: int, plane: int) -> Node:
        """Whether any of a plane's bits is set in a block of queries × keys, of WHOLE all."""
        sizes = {"q_idx": constant(self.q_size), "kv_idx": constant(self.kv_size)}
        ends = [
            make("floordiv", coordinate(corner), sizes[name])
            for name, corners in CORNERS.items()
            for corner in corners
        ]
        at = coordinate("b"), coordinate("h"), *ends
        return Node("block_bits", Type.BOOLEAN, at, (array, plane))
