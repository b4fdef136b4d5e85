"""The blocks of queries × keys that a mask leaves, as a value."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelseam.arrays import describe
from kernelseam.descriptors.common.validation import extent
from kernelseam.errors import InvalidValue
from kernelseam.expressions.block_mask import SIZE, BlockMask
from kernelseam.expressions.block_states import block_words
from kernelseam.expressions.scores import MaskMod, score_expression


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
    empty, mixed or whole, for ``attention(…, block_mask=…)``: empty ones are passed over, whole
    ones are not masked. No array of q_len × kv_len elements is made.

    ``batch`` and ``heads`` are the attention's, or None where the mask does not tell its entries,
    or its query heads, apart. The value is kept and used again, by attentions of at most ``q_len``
    queries and ``kv_len`` keys; a mask_mod that reads ``q_len`` or ``kv_len`` needs exactly these.
    It tells what captured arrays hold now: make it anew where their contents change.

    ``like``: an array on the attention's device, where the blocks are to lie; by default the first
    one that the mask captures. They are made on the host, from copies of captured arrays.

    Raises InvalidValue for what does not fit together, and with its line for a function that cannot
    be traced.
    """
    entries, of_heads = (
        1 if n is None else extent(f, n, 1) for f, n in (("batch", batch), ("heads", heads))
    )
    lengths = extent("q_len", q_len, 1), extent("kv_len", kv_len, 1)
    sizes = _sizes(block_size)
    expression = score_expression(mask_mod=mask_mod)
    mask = expression.structure.visible
    for field, name, given in (("batch", "b", batch), ("heads", "h", heads)):
        if given is None and name in mask.reads:
            raise InvalidValue(
                field, None, f"the mask_mod reads {name}", "Give the attention's number of them"
            )
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
