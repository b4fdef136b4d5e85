"""The blocks of queries × keys that a mask leaves, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.arrays import describe
from kernelseam.descriptors.common.captured import check_read
from kernelseam.descriptors.common.validation import extent
from kernelseam.errors import InvalidValue
from kernelseam.expressions.block_bits import packed
from kernelseam.expressions.block_mask import SIZE, BlockMask
from kernelseam.expressions.bounds import bounds
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.nodes import Node
from kernelseam.expressions.scores import MaskMod, score_expression

Array = npt.NDArray[Any]


def block_mask(
    mask_mod: MaskMod,
    batch: int | None,
    heads: int | None,
    q_len: int,
    kv_len: int,
    *,
    block_size: int | tuple[int, int] = SIZE,
    like: Any = None,
) -> BlockMask:
    """Which blocks of ``block_size`` (queries, keys) ``mask_mod(b, h, q_idx, kv_idx)`` leaves
    empty, partial or full, for ``attention(…, block_mask=…)``: empty ones are skipped, full ones
    are not masked. No array of q_len × kv_len elements is made.

    ``batch`` and ``heads`` are the attention's, or None where the mask does not tell its entries,
    or its query heads, apart. The value is kept and used again, by attentions of at most ``q_len``
    queries and ``kv_len`` keys; a mask_mod that reads ``q_len`` or ``kv_len`` needs exactly these.
    It reflects the present contents of captured arrays: make it anew where these change.

    ``like``: an array on the attention's device, where the blocks are to lie; by default the first
    one that the mask captures. They are made on the host, from copies of captured arrays.

    Raises InvalidValue for what does not fit together, and with its line for a function that cannot
    be traced.
    """
    entries, of_heads = (
        1 if n is None else extent(f, n) for f, n in (("batch", batch), ("heads", heads))
    )
    lengths = extent("q_len", q_len), extent("kv_len", kv_len)
    sizes = _sizes(block_size)
    expression = score_expression(mask_mod=mask_mod)
    mask = expression.structure.visible
    for field, name, given in (("batch", "b", batch), ("heads", "h", heads)):
        if given is None and name in mask.reads:
            raise InvalidValue(
                field, None, f"the mask_mod reads {name}", "Give the attention's number of them"
            )
    check_read(expression.arrays)
    arrays = [np.asarray(_on_host(x)) for x in expression.arrays]
    words: Any = block_words(mask, expression.numbers, arrays, entries, of_heads, lengths, sizes)
    like = like if like is not None or not expression.arrays else expression.arrays[0]
    if hasattr(like, "new_tensor"):  # torch's
        words = like.new_tensor(words, dtype=like.new_empty(0).int().dtype)
    elif like is not None and not describe(like, "captured_0").device.is_host:
        raise InvalidValue(
            "like",
            f"an array on {describe(like, 'captured_0').device}",
            "blocks can be put where NumPy's arrays and torch's tensors lie",
            "Pass a torch tensor",
        )
    return BlockMask(mask_mod, *lengths, sizes, words)


def _on_host(x: Any) -> Any:
    """A captured array whose contents NumPy can read."""
    if not hasattr(x, "new_tensor"):
        return x
    host = x.detach().cpu()
    return host.float() if host.is_floating_point() and host.itemsize == 2 else host


def _sizes(given: Any) -> tuple[int, int]:
    pair = given if isinstance(given, tuple | list) else (given, given)
    if len(pair) != 2:
        raise InvalidValue(
            "block_size", given, "must be a number, or (queries, keys)", "For example 128"
        )
    q, kv = (extent(f"block_size[{i}]", n, 1) for i, n in enumerate(pair))
    return q, kv


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
    if 0 in (batch, heads, q_len, kv_len):  # one empty block: kernels are handed no empty array
        return packed(np.zeros((max(batch, 1), max(heads, 1), 1, 1, 2), np.bool_))
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
