"""The block lists of a mask, made in NumPy: the reference of what a kernel makes on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.expressions.block_bits import packed
from kernelseam.expressions.blocks import WORD
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.nodes import Node

Array = npt.NDArray[Any]


def words_shape(
    batch: int, heads: int, lengths: tuple[int, int], sizes: tuple[int, int]
) -> tuple[int, int, int, int, int]:
    """The shape of the lists for so many queries and keys, in blocks of such sizes."""
    rows, columns = (-(-n // size) for n, size in zip(lengths, sizes, strict=True))
    return batch, heads, rows, -(-columns // WORD), 2


def block_words(
    mask: Node,
    numbers: Sequence[int | float],
    arrays: Sequence[Array],
    batch: int,
    heads: int,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
) -> Array:
    """The lists of a mask: a row of blocks at a time, of which each pair is evaluated."""
    (q_len, kv_len), (q_size, kv_size) = lengths, sizes
    words = np.zeros(words_shape(batch, heads, lengths, sizes), np.int32)
    at: dict[str, Any] = {
        "b": np.arange(batch)[:, None, None, None],
        "h": np.arange(heads)[:, None, None],
        "kv_idx": np.arange(kv_len),
        "q_len": q_len,
        "kv_len": kv_len,
    }
    edges = np.arange(0, kv_len, kv_size)
    for row, first in enumerate(range(0, q_len, q_size)):
        queries = np.arange(first, min(first + q_size, q_len))
        if not len(edges):
            break
        (seen,) = evaluate([mask], {**at, "q_idx": queries[:, None]}, numbers, arrays)
        seen = np.broadcast_to(seen, (batch, heads, len(queries), kv_len))
        some = np.logical_or.reduceat(seen.any(2), edges, axis=-1)
        whole = np.logical_and.reduceat(seen.all(2), edges, axis=-1)
        words[:, :, row] = packed(np.stack([some, whole], -1))
    return words
