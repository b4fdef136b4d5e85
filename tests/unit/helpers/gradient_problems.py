"""Gradients of batched products of small integers, and what they are: a, b and dc of ``bmm_bwd``,
da and db."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BROADCAST = ("", "b", "h", "bh", "r")
"""Axes along which ``what_repeats`` has a and b repeat."""


def integers(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> Array:
    return rng.integers(-3, 4, shape).astype(dtype)


def what_repeats(
    rng: np.random.Generator, broadcast: str, group: int
) -> tuple[list[Array], list[Array]]:
    """dc, a and b, where a repeats along the axes named (b, h: of batches and heads, r: rows), b
    along those of them that it has (where heads are grouped, batches alone); their gradients are
    summed there."""
    a, b, dc = (
        integers(rng, *s) for s in ((4, 6, 33, 20), (4, 6 // group, 20, 17), (4, 6, 33, 17))
    )
    keep = tuple(slice(0, 1) if n in broadcast else slice(None) for n in "bhr")
    a, b = (
        np.broadcast_to(a[keep], a.shape),
        np.broadcast_to(b[keep[:2] if group == 1 else keep[:1]], b.shape),
    )
    each = np.repeat(b, group, axis=1)
    wanted = [
        dc @ each.swapaxes(2, 3),
        (a.swapaxes(2, 3) @ dc).reshape(4, 6 // group, group, 20, 17).sum(2),
    ]
    for i, x in enumerate((a, b)):
        for axis in range(4):
            wanted[i] = wanted[i].sum(axis, keepdims=True) if x.strides[axis] == 0 else wanted[i]
    return [dc, a, b], wanted


def uneven(rng: np.random.Generator, dtype: str = "float32") -> tuple[list[Array], list[Array]]:
    """dc, a that repeats over heads and rows, b of fewer heads, heads of dc with gaps: no two
    strides walk over what is summed."""
    dc, b = (
        integers(rng, 2, 9, 40, 24, dtype=dtype)[:, :6, :33, :17],
        integers(rng, 2, 2, 20, 17, dtype=dtype),
    )
    a = np.broadcast_to(integers(rng, 2, 1, 1, 20, dtype=dtype), (2, 6, 33, 20))
    wide = [x.astype(np.float64) for x in (dc, a, b)]
    da = np.einsum("bhmn,bhkn->bk", wide[0], np.repeat(wide[2], 3, axis=1))[:, None, None]
    db = np.einsum(
        "bghmk,bghmn->bgkn", *(wide[i].reshape(2, 2, 3, *wide[i].shape[2:]) for i in (1, 0))
    )
    return [dc, a, b], [da, db]
