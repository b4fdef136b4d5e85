"""A score_mod and a mask_mod of the user over a stack of heads, by evaluating their graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.expressions.derivatives import slope
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.lowering import Structure
from kernelseam.frozen import dataclass

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expression:
    """Blocks of scores are [batch, KV heads, keys, heads of a group, queries]."""

    structure: Structure
    numbers: tuple[int | float, ...]
    arrays: tuple[Array, ...]
    batch: Array
    """Numbers of the stack's entries; of its query heads [KV heads, group]."""
    heads: Array
    S_q: int
    S_k: int

    def _at(self, heads: slice, i: int, n: int, j: int, keys: int) -> dict[str, Any]:
        return {
            "b": self.batch[:, None, None, None, None],
            "h": self.heads[None, :, None, heads, None],
            "q_idx": np.arange(i, i + n),
            "kv_idx": np.arange(j, j + keys)[:, None, None],
            "q_len": self.S_q,
            "kv_len": self.S_k,
        }

    def change(self, s: Array, heads: slice, i: int, j: int, by: Array | None) -> None:
        """Replace scores, in place, from key j and query i on. The derivative by what they were is
        multiplied into ``by``, where it is given."""
        at = self._at(heads, i, s.shape[4], j, s.shape[2])
        roots = [self.structure.score, *([] if by is None else [slope(self.structure.score)])]
        score, *slopes = evaluate(roots, {**at, "score": s}, self.numbers, self.arrays, s.dtype)
        if by is not None:
            np.multiply(by, slopes[0], out=by)
        s[...] = score

    def passed_over(self, i: int, n: int, j: int, keys: int) -> bool:
        """Whether by the block lists no head sees a key of a block."""
        if self.structure.blocks is None:
            return False
        at = self._at(slice(None), i, n, j, keys)
        at |= {"q_first": i, "q_last": i + n - 1, "kv_first": j, "kv_last": j + keys - 1}
        (some,) = evaluate([self.structure.seen[1].high], at, self.numbers, self.arrays)
        return not some.any()

    def visible(self, heads: slice, i: int, n: int, j: int, keys: int) -> Array:
        """What mask_mod says of a block, broadcast."""
        at = self._at(heads, i, n, j, keys)
        (seen,) = evaluate([self.structure.seen[0]], at, self.numbers, self.arrays)
        return np.broadcast_to(seen, np.broadcast_shapes(seen.shape, (1, 1, keys, 1, n)))
