"""Masks that vLLM's batches ask for beside a causal one, as a ``mask_mod``. Imports no vLLM."""

from __future__ import annotations

from typing import Any

from kernelseam.expressions.scores import MaskMod

Tensor = Any


def batch_mask(
    starts: Tensor,
    lengths: Tensor,
    window: int | None,
    *,
    causal: Tensor | None = None,
    ranges: Tensor | None = None,
    clamped: bool = False,
) -> MaskMod:
    """What queries see: the last of each request's keys, up to and with their own.

    ``starts`` int32 [B + 1] and ``lengths`` int32 [B] as ``attention_paged`` has them. ``window``:
    so many keys before a query's own, and behind it where a request is not causal. ``causal`` int32
    [B]: 0 for requests whose queries see later keys, too. ``ranges`` int32 [B, n, 2]: first and
    last positions of tokens that see each other, an image's; first = last = 0 for none. They see
    beyond the window, unless ``clamped``.
    """

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = lengths[b] - (starts[b + 1] - starts[b]) + q_idx
        before = at - kv_idx
        seen = before >= 0
        if causal is not None:
            seen = seen | (causal[b] == 0)
        if window is not None:
            seen = seen & (before <= window) & (before >= -window)
        if ranges is None:
            return seen
        for i in range(ranges.shape[1]):
            first, last = ranges[b, i, 0], ranges[b, i, 1]
            both = (first < last) & (at >= first) & (at <= last)
            both = both & (kv_idx >= first) & (kv_idx <= last)
            if clamped and window is not None:
                both = both & (before <= window)
            seen = seen | both
        return seen

    return sees
