"""The inverse rotation of gradients by rotated q and k, in operations of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Tensor = Any


def inverse_rotation(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """The gradient by what was rotated → that by what it was before: rotated by the opposite angle,
    in float32 (float64 of float64). ``options``: layout, rotary_style, first_position."""
    half, heads_first = cos.shape[-1], options["layout"] == "bhsd"
    if positions is not None:
        cos, sin = (table[positions.long()] for table in (cos, sin))
    else:
        first = options["first_position"]
        at = slice(first, first + x.shape[-2 if heads_first else -3])
        cos, sin = cos[at], sin[at]
    cos, sin = (table.unsqueeze(-3 if heads_first else -2) for table in (cos, sin))
    pairs = options["rotary_style"] == "pairs"
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if pairs
        else (slice(0, half), slice(half, 2 * half))
    )
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    result[..., 2 * half :] = x[..., 2 * half :]
    a, b = x[..., first], x[..., second]
    # as wide as the tables, without a wide copy of x
    result[..., first] = torch.addcmul(a * cos, b, sin)
    result[..., second] = torch.addcmul(b * cos, a, sin, value=-1)
    return result
