"""Lengths in device memory that say more keys than there are, or fewer than none, found when nobody
looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam import Attention, AttentionBwd, plan
from kernelseam.contract import Device

Array = npt.NDArray[Any]
KEYS, MORE, QUERIES = 70, 64, 5
TOLD, MEANT = (2**31 - 1, KEYS + 1, -1), (KEYS, KEYS, 0)
"""What the lengths say, and what they are taken for."""


def hold(
    there: Callable[[Array], Any],
    back: Callable[[Any], Array],
    into: Callable[[Any, Array], None],
    device: Device | None = None,
) -> None:
    """Compute with both lengths, forward and backward, over arrays made by ``there``: the same
    bits, nothing of what lies behind the keys, which is NaN. ``into(array, values)`` overwrites an
    array's memory."""
    rng = np.random.default_rng(8)
    shape = (3, 2, QUERIES, 64)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float16)

    rows = [np.full((3, 2, KEYS + MORE, 64), np.nan, np.float16) for _ in "kv"]
    for x in rows:
        x[:, :, :KEYS] = normal(3, 2, KEYS, 64)
    q, dout = there(normal(*shape)), there(normal(*shape))
    k, v = (there(x)[:, :, :KEYS] for x in rows)
    lengths = there(np.array(MEANT, np.int32))
    out, lse = there(np.zeros(shape, np.float16)), there(np.zeros(shape[:3], np.float32))
    forward = Attention.from_arrays(q, k, v, out, lse, kv_lengths=lengths)
    dq, dk, dv = (
        there(np.zeros(s, np.float16)) for s in (shape, (3, 2, KEYS, 64), (3, 2, KEYS, 64))
    )
    backward = AttentionBwd(forward=forward, dout=dout, dq=dq, dk=dk, dv=dv)
    calls = [plan(x, device=device, implementation="shared").bind() for x in (forward, backward)]
    results: list[list[Array]] = []
    for output in (MEANT, TOLD):
        into(lengths, np.array(output, np.int32))
        for call in calls:
            call()
        results.append([back(x) for x in (out, lse, dq, dk, dv)])
    for name, expected, actual in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert np.isfinite(expected[:2]).all() and expected[:2].any(), name
        assert not expected[2].any() if name != "lse" else np.isneginf(expected[2]).all(), name
        np.testing.assert_array_equal(actual, expected, err_msg=name)
