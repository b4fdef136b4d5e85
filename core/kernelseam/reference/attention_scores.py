"""Masks and score options of one head.

Blocks of scores are stored keys-first, [keys, queries]. Query i and key j are at the distance d = j
− i − offset, where the offset is S_k − S_q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Scores:
    """One head's scores for one entry of the batch.

    In base 2, x·log2(e), where x is scale·q·k alone; else x itself: a bias near the largest
    float32, which is often used as a mask, would overflow in base 2.
    """

    S_q: int
    S_k: int
    scale: float
    left: int | None = None
    """The window to the left and right of the diagonal; None: no limit."""
    right: int | None = None
    prefix: int = 0
    """Keys that are always visible, also outside the window."""
    cap: float = 0.0
    slope: float = 0.0
    bias: Array | None = None
    """[S_q, S_k], as the mask, which is True where a key may be attended to."""
    mask: Array | None = None
    sink: float = -math.inf

    @property
    def offset(self) -> int:
        return self.S_k - self.S_q

    @property
    def plain(self) -> bool:
        """Whether scores are in base 2."""
        return not self.cap and not self.slope and self.bias is None and self.sink == -math.inf

    @property
    def factor(self) -> float:
        """The factor of q·k."""
        return self.scale * math.log2(math.e) if self.plain else self.scale

    def runs(self, i: int, n: int, most: int) -> Iterator[tuple[int, int]]:
        """Ranges [j, stop) of the keys that window and prefix make visible to any of the queries
        i … i + n − 1, at most ``most`` keys each."""
        begin = 0 if self.left is None else i + self.offset - self.left
        end = self.S_k if self.right is None else i + n + self.offset + self.right
        for start, last in ((0, self.prefix), (max(begin, self.prefix), min(end, self.S_k))):
            for j in range(start, last, most):
                yield j, min(j + most, last)

    def change(self, s: Array, i: int, n: int, j: int, slope: Array | None = None) -> None:
        """Apply softcap, ALiBi and bias to scale·q·k in place: s [keys, queries] from key j and
        query i on; the first ``n`` queries exist. Under a softcap, 1 − tanh², the derivative by the
        product, is written to ``slope``."""
        if self.cap:
            info = np.finfo(s.dtype)
            # others round to 0 or infinity
            cap = min(max(self.cap, float(info.tiny)), float(info.max))
            np.divide(s, cap, out=s)
            np.tanh(s, out=s)
            if slope is not None:
                np.multiply(s, s, out=slope)
                np.subtract(1, slope, out=slope)
            np.multiply(s, cap, out=s)
        if self.slope:
            keys, queries = (np.arange(x) for x in s.shape)
            distance = np.subtract.outer(
                (keys + (j - i - self.offset)).astype(s.dtype), queries.astype(s.dtype)
            )
            np.abs(distance, out=distance)
            steepest = float(np.finfo(s.dtype).max) / 2**31  # its products are finite
            distance *= min(max(self.slope, -steepest), steepest)
            s -= distance
        if self.bias is not None:
            s[:, :n] += self.bias[i : i + n, j : j + len(s)].T

    def hidden(self, i: int, n: int, j: int, shape: tuple[int, ...]) -> tuple[int, Array | None]:
        """The mask of a block of scores as (visible, hidden): the first ``visible`` keys are
        visible to all queries, and hidden is bool [keys − visible, queries]; None where no key is
        hidden."""
        keys, wide = shape
        visible = 0 if self.mask is not None else self._visible_to_all(i, n, j, keys)
        if visible == keys:
            return keys, None
        key, diagonal = (
            np.arange(j + visible, j + keys)[:, None],
            np.arange(i, i + wide) + self.offset,
        )
        hidden = np.zeros((keys - visible, wide), np.bool_)
        if j >= self.prefix:  # a range of ``runs`` is either before or after the prefix
            if self.right is not None:
                np.greater(key, diagonal + self.right, out=hidden)
            if self.left is not None:
                hidden |= key < diagonal - self.left
        if self.mask is not None:
            hidden[:, :n] |= ~self.mask[i : i + n, j : j + keys].T
        return visible, hidden

    def _visible_to_all(self, i: int, n: int, j: int, keys: int) -> int:
        """The number of keys from j on that are visible to all queries i … i + n − 1."""
        if j < self.prefix:
            return keys
        if self.left is not None and j < i + n - 1 + self.offset - self.left:
            return 0
        return (
            keys if self.right is None else min(max(i + self.offset + self.right + 1 - j, 0), keys)
        )
