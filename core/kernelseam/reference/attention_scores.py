"""Masks and score options of a stack of heads.

Blocks of scores are [batch, KV heads, keys, heads of a group, queries]. Query i and key j are at
the distance d = j − i − offset, where the offset is S_k − S_q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.frozen import dataclass
from kernelseam.reference.attention_expression import Expression

Array = npt.NDArray[Any]

SCORE_OPTIONS = (
    SpecOption.causal
    | SpecOption.window
    | SpecOption.prefix
    | SpecOption.mask
    | SpecOption.alibi
    | SpecOption.softcap
    | SpecOption.bias
    | SpecOption.sinks
)
"""The options that ``Scores`` has."""


@dataclass(frozen=True)
class Scores:
    """The scores of a stack of heads whose sequences have the same lengths."""

    S_q: int
    S_k: int
    scale: float
    left: int | None = None
    """The window to the left and right of the diagonal; None: no limit."""
    right: int | None = None
    prefix: int = 0
    """Keys that are always visible, also outside the window."""
    softcap: float = 0.0
    slopes: Array | None = None
    """[batch, KV heads, group]"""
    bias: Array | None = None
    """[batch, KV heads, group, S_q, S_k], as the mask, which is True where a key may be attended
    to."""
    mask: Array | None = None
    sinks: Array | None = None
    """[KV heads, group]"""
    expression: Expression | None = None
    """A score_mod and a mask_mod."""

    @property
    def has_slope(self) -> bool:
        """Whether the derivative of a score by scale·q·k is not 1."""
        written = self.expression is not None and self.expression.structure.has_score
        return bool(self.softcap) or written

    @property
    def offset(self) -> int:
        return self.S_k - self.S_q

    def runs(self, i: int, n: int, most: int) -> Iterator[tuple[int, int]]:
        """Ranges [j, stop) of the keys that window, prefix and block lists make visible to any of
        the queries i … i + n − 1, at most ``most`` keys each."""
        begin = 0 if self.left is None else i + self.offset - self.left
        end = self.S_k if self.right is None else i + n + self.offset + self.right
        for start, last in ((0, self.prefix), (max(begin, self.prefix), min(end, self.S_k))):
            for j in range(start, last, most):
                stop = min(j + most, last)
                if self.expression is None or not self.expression.passed_over(i, n, j, stop - j):
                    yield j, stop

    def change(self, s: Array, heads: slice, i: int, j: int, slope: Array | None = None) -> None:
        """Apply softcap, ALiBi and bias to scale·q·k in place: s [batch, KV heads, keys, heads,
        queries] from key j and query i on. The derivative by the product, as 1 − tanh² under a
        softcap, is written to ``slope``."""
        keys, n = s.shape[2], s.shape[4]
        if self.softcap:
            info = np.finfo(s.dtype)
            # others round to 0 or infinity
            cap = min(max(self.softcap, float(info.tiny)), float(info.max))
            np.divide(s, cap, out=s)
            np.tanh(s, out=s)
            if slope is not None:
                np.multiply(s, s, out=slope)
                np.subtract(1, slope, out=slope)
            np.multiply(s, cap, out=s)
        if self.slopes is not None:
            key, query = np.arange(keys) + (j - i - self.offset), np.arange(n)
            distance = np.abs(np.subtract.outer(key.astype(s.dtype), query.astype(s.dtype)))
            steepest = float(np.finfo(s.dtype).max) / 2**31  # its products are finite
            slopes = np.clip(self.slopes[:, :, None, heads, None], -steepest, steepest)
            s -= distance[:, None] * slopes.astype(s.dtype)
        if self.bias is not None:
            s += np.moveaxis(self.bias[:, :, heads, i : i + n, j : j + keys], 4, 2)
        if self.expression is not None and self.expression.structure.has_score:
            if slope is not None and not self.softcap:
                slope[...] = 1
            self.expression.change(s, heads, i, j, slope)

    def hidden(self, heads: slice, i: int, n: int, j: int, keys: int) -> tuple[int, Array | None]:
        """The mask of a block of scores as (visible, hidden): the first ``visible`` keys are
        visible to all queries, and hidden is bool, broadcast over [batch, KV heads, keys − visible,
        heads, queries]; None where no key is hidden."""
        visible = 0 if self._masked else self._visible_to_all(i, n, j, keys)
        if visible == keys:
            return keys, None
        hidden = _outside(*self._window(i, n, j, keys, visible))
        if self.mask is not None:
            mask = self.mask[:, :, heads, i : i + n, j : j + keys]
            hidden = hidden | ~np.moveaxis(mask, 4, 2)
        if self.expression is not None and self.expression.structure.has_mask:
            hidden = hidden | ~self.expression.visible(heads, i, n, j, keys)
        return visible, hidden

    def hide(self, s: Array, heads: slice, i: int, j: int) -> tuple[int, Array | None]:
        """Set the scores of hidden keys to −∞, NaN too: s as in ``change``. Returns ``hidden``."""
        keys, n = s.shape[2], s.shape[4]
        visible, hidden = self.hidden(heads, i, n, j, keys)
        if hidden is None:
            return visible, None
        rest = s[:, :, visible:]
        if self._masked:
            np.copyto(rest, -math.inf, where=hidden)
        else:
            limits = _limits(*self._window(i, n, j, keys, visible), s.dtype)
            np.fmin(rest, limits, out=rest)
        return visible, hidden

    @property
    def _masked(self) -> bool:
        """Whether more than a window hides keys."""
        written = self.expression is not None and self.expression.structure.has_mask
        return self.mask is not None or written

    def _window(
        self, i: int, n: int, j: int, keys: int, visible: int
    ) -> tuple[int, int, int, int | None, int | None]:
        """The arguments of ``_outside`` for a block's keys after the first ``visible``."""
        # a range of ``runs`` is either before or after the prefix
        before = j < self.prefix
        left, right = (None, None) if before else (self.left, self.right)
        return j + visible - i - self.offset, keys - visible, n, left, right

    def _visible_to_all(self, i: int, n: int, j: int, keys: int) -> int:
        """The number of keys from j on that are visible to all queries i … i + n − 1."""
        if j < self.prefix:
            return keys
        if self.left is not None and j < i + n - 1 + self.offset - self.left:
            return 0
        return (
            keys if self.right is None else min(max(i + self.offset + self.right + 1 - j, 0), keys)
        )


@lru_cache(8)
def _outside(d: int, keys: int, n: int, left: int | None, right: int | None) -> Array:
    """Which of so many keys, the first at a distance of d from the first query, lie outside the
    window of which of n queries: [1, 1, keys, 1, queries]."""
    distance = np.subtract.outer(np.arange(d, d + keys), np.arange(n))[None, None, :, None]
    hidden = np.zeros(distance.shape, np.bool_)
    if right is not None:
        hidden |= distance > right
    if left is not None:
        hidden |= distance < -left
    hidden.flags.writeable = False
    return hidden


@lru_cache(4)
def _limits(
    d: int, keys: int, n: int, left: int | None, right: int | None, dtype: np.dtype[Any]
) -> Array:
    """What ``np.fmin`` with scores leaves of them: −∞ of those that are ``_outside``, all of
    others, for which this is NaN. It takes a third of the time of a copy under a mask."""
    limits = np.where(_outside(d, keys, n, left, right), -math.inf, math.nan).astype(dtype)
    limits.flags.writeable = False
    return limits


def split(x: Array, inner: tuple[int, int]) -> Array:
    """The last axis, columns, as (heads, queries), without the columns that only pad; a view."""
    return x[..., : inner[0] * inner[1]].reshape(*x.shape[:-1], *inner)


def by_column(visible: int, hidden: Array, inner: tuple[int, int], wide: int) -> Array:
    """What ``Scores.hidden`` gave, of all keys and as [batch, KV heads, columns, keys]."""
    outer, keys = hidden.shape[:2], visible + hidden.shape[2]
    columns = np.zeros((*outer, keys, wide), np.bool_)
    split(columns, inner)[:, :, visible:] = hidden
    return columns.swapaxes(2, 3)
