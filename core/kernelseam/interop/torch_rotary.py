"""The inverse rotation of gradients by rotated q and k: one launch, or operations of torch where
torch follows the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelseam.ops.cache import append_paged
from kernelseam.torch_dispatch import recorded, stands_for_others

Tensor = Any


def inverse_rotations(
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """The gradients by q and k that were rotated → those by what they were before: rotated by the
    opposite angle, in float32 (float64 of float64). ``options``: layout, rotary_style,
    first_position, backend.

    An append to a cache, whose pages are the result's batch entries, is such a rotation.
    """
    tensors = (dq, dk)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    traced = torch.compiler.is_compiling() or stands_for_others(tensors) or recorded(tensors)
    if traced or wanted or 0 in dq.shape or 0 in dk.shape:
        first, second = (_rotation_of_torch(x, cos, sin, positions, options) for x in tensors)
        return first, second
    if dk.dim() == 3:  # packed rows
        positions = None if positions is None else positions[None]
        first, second = inverse_rotations(dq[None], dk[None], cos, sin, positions, options)
        return first[0], second[0]
    heads_first = options["layout"] == "bhsd"
    batch, rows = dk.shape[0], dk.shape[-2 if heads_first else -3]
    slots = torch.arange(batch * rows, device=dk.device).view(batch, rows)
    if positions is None:
        begin = options["first_position"]
        positions = torch.arange(begin, begin + rows, dtype=torch.int32, device=dk.device)
    rotated = torch.empty_like(dk, memory_format=torch.contiguous_format)
    dq = append_paged(
        _with_columns(dk),
        None,
        rotated,
        None,
        slot_mapping=slots,
        positions=positions.expand(batch, rows),
        q=_with_columns(dq),
        rotary=(cos, -sin),
        rotary_style=options["rotary_style"],
        layout=options["layout"],
        kv_layout="hnd" if heads_first else "nhd",
        backend=options.get("backend"),
    )
    return dq, rotated


def _with_columns(x: Tensor) -> Tensor:
    """With a contiguous last axis."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _rotation_of_torch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
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
