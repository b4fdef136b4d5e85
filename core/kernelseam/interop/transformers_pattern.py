"""Masks that follow a pattern, in few elements: what ``transformers_mask`` hands through a model to
``transformers_attention``. Imports torch.

Such a mask has five axes, [batch, sides, extent, 1, keys], with stride 0 along those between:

- sides: 2 where a query sees no key after its own (causal), 1 where it does.
- extent: left + 2 where keys up to ``left`` before the query are seen (causal), or up to ``left``
  on both sides; 1 where there is no window.
- elements, by dtype. uint8: every key is seen, and no element is read. bool: True where a key is no
  padding. int8: 1 where a key is seen, 0 where it is padding, −1 where a cache of fixed length
  holds none yet. int32: the number of the packed sequence that a row belongs to.

The last query meets the last key, or the last that the cache holds. No other mask has five axes: a
model that reads or adds one as if it had four fails, and does not misread it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Tensor = Any
AXES = 5


class Pattern(NamedTuple):
    """``keys``: elements [batch, keys] as above; None where every key is seen."""

    keys: Tensor | None
    causal: bool
    left: int | None = None


def encoded(pattern: Pattern, batch: int, keys: int, device: Any) -> Tensor:
    """The mask of a pattern."""
    if pattern.keys is None:
        elements = torch.ones((), dtype=torch.uint8, device=device)
    else:
        elements = pattern.keys[:, None, None, None]
    extent = 1 if pattern.left is None else pattern.left + 2
    return elements.expand(batch, 2 if pattern.causal else 1, extent, 1, keys)


def decoded(mask: Tensor) -> Pattern:
    """The pattern of a mask."""
    sides, extent = mask.shape[1:3]
    return Pattern(
        None if mask.dtype == torch.uint8 else mask[:, 0, 0, 0],
        causal=sides == 2,
        left=None if extent == 1 else extent - 2,
    )
