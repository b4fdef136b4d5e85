"""The block lists of a mask, made in NumPy: the reference of what a kernel makes on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.expressions.block_bits import packed
from kernelseam.expressions.bounds import bounds
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.nodes import Node

Array = npt.NDArray[Any]


def block_words(
    mask: Node,
    numbers: Sequence[int | float],
    arrays: Sequence[Array],
    batch: int,
    heads: int,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
) -> Array:
    """The lists of a mask. By bounds of it where these decide; the pairs of other blocks are
    evaluated, a row of blocks at a time."""
    (q_len, kv_len), (q_size, kv_size) = lengths, sizes
    at: dict[str, Any] = {
        "b": np.arange(batch)[:, None, None, None],
        "h": np.arange(heads)[:, None, None],
        "q_len": q_len,
        "kv_len": kv_len,
    }
    q_first, kv_first = np.arange(0, q_len, q_size)[:, None], np.arange(0, kv_len, kv_size)
    corners = {
        "q_first": q_first,
        "q_last": np.minimum(q_first + q_size, q_len) - 1,
        "kv_first": kv_first,
        "kv_last": np.minimum(kv_first + kv_size, kv_len) - 1,
    }
    shape = batch, heads, len(q_first), len(kv_first)
    low, high = evaluate(bounds(mask), {**at, **corners}, numbers, arrays)
    whole = np.broadcast_to(low, shape).copy()
    some = np.broadcast_to(high, shape).copy()
    unsure = (some & ~whole).any((0, 1))
    within = np.arange(kv_size)
    for row in map(int, np.flatnonzero(unsure.any(1))):
        columns = np.flatnonzero(unsure[row])
        queries = np.arange(row * q_size, min((row + 1) * q_size, q_len))[:, None]
        # Keys behind the last one are the last one once more.
        keys = np.minimum(kv_first[columns][:, None] + within, kv_len - 1).reshape(-1)
        (seen,) = evaluate([mask], {**at, "q_idx": queries, "kv_idx": keys}, numbers, arrays)
        seen = np.broadcast_to(seen, (batch, heads, len(queries), len(keys)))
        blocks = seen.reshape(batch, heads, len(queries), len(columns), kv_size)
        some[:, :, row, columns] = blocks.any((2, 4))
        whole[:, :, row, columns] = blocks.all((2, 4))
    return packed(np.stack([some, whole], -1))
