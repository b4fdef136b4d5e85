"""Masks that follow a pattern, in few elements: what ``transformers_mask`` hands through a model to
``transformers_attention``. Imports torch.

Padding alone is a mask [batch, 1, 1, keys] of bool. Any other has five axes, [batch, extent, 1, 1,
keys], with stride 0 along those between:

- extent: 1 where there is no window and a query sees keys after its own, 2 where it does not
  (causal). In steps of 2 beside that, left + 1 times: keys up to ``left`` before the query are seen
  (causal), or up to ``left`` on both sides.
- elements, by dtype. uint8: every key is seen, and no element is read. bool: True where a key is no
  padding. int8: 1 where a key is seen, 0 where it is padding, −1 where a cache of fixed length
  holds none yet. int32: the number of the packed sequence that a row belongs to.

The last query meets the last key, or the last that the cache holds. A model that goes on with its
last queries alone (Gemma 4) slices the third axis, where a mask of four has them: that changes
nothing, as they are still the last. Transformers' own masks never have five axes: a model that adds
one, or reads its elements, as if it had four fails, and does not misread it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

Tensor = Any
Kept = TypeVar("Kept")
_AXES = 5


class Pattern(NamedTuple):
    """``keys``: elements [batch, keys] as above; None where every key is seen."""

    keys: Tensor | None
    causal: bool
    left: int | None = None


SEES_ALL, CAUSAL = Pattern(None, False), Pattern(None, True)
"""Those of no mask."""


def encoded(pattern: Pattern, batch: int, keys: int, device: Any) -> Tensor:
    """The mask of a pattern, for a single forward of a model."""
    elements = pattern.keys
    if elements is not None and not pattern.causal and pattern.left is None:
        mask = elements[:, None, None].expand(batch, 1, 1, keys)
    else:
        if elements is None:
            elements = torch.ones((), dtype=torch.uint8, device=device)
        else:
            elements = elements[:, None, None, None]
        steps = 0 if pattern.left is None else pattern.left + 1
        mask = elements.expand(batch, 1 + pattern.causal + 2 * steps, 1, 1, keys)
    if not torch.compiler.is_compiling():
        mask._kernelseam_kept = None
    return mask


def decoded(mask: Tensor, queries: int) -> Pattern | None:
    """The pattern of a mask; None where it has none. That of a single query is not looked for in
    four axes."""
    if mask.dim() == _AXES:
        steps, causal = divmod(mask.shape[1] - 1, 2)
        keys = None if mask.dtype == torch.uint8 else mask[:, 0, 0, 0]
        return Pattern(keys, causal=causal == 1, left=steps - 1 if steps else None)
    by_key = mask.dim() == 4 and mask.shape[1:3] == (1, 1) and queries > 1
    return Pattern(mask[:, 0, 0], False) if by_key and mask.dtype == torch.bool else None


def kept(mask: Tensor, question: Any, answer: Callable[[], Kept]) -> Kept:
    """An answer that is kept with a mask until that is written to. Under torch's inference mode
    that cannot be seen: there a mask of the caller's own is asked every time, and one that
    ``encoded`` made is not."""
    if not mask.is_inference():
        version = mask._version
    elif hasattr(mask, "_kernelseam_kept"):
        version = None
    else:
        return answer()
    known = getattr(mask, "_kernelseam_kept", None)
    if known is None or known[0] != (version, question):
        known = ((version, question), answer())
        mask._kernelseam_kept = known
    return known[1]
