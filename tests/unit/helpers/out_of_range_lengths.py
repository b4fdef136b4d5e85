"""Key lengths in device memory that are out of range, which only kernels can see: more than S_k is
clamped to S_k, less than 0 to 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam import Attention, AttentionBwd, plan
from kernelseam.contract import Device

Array = npt.NDArray[Any]
KEYS, PADDING, QUERIES = 70, 64, 5
GIVEN, CLAMPED = (2**31 - 1, KEYS + 1, -1), (KEYS, KEYS, 0)
"""Lengths, and what kernels must clamp them to."""


def check_clamped(
    to_device: Callable[[Array], Any],
    to_host: Callable[[Any], Array],
    into: Callable[[Any, Array], None],
    device: Device | None = None,
) -> None:
    """Compute forward and backward with both lengths: the results must be the same bits and must
    not depend on the padding after the keys, which is NaN. ``to_device`` and ``to_host`` copy an
    array; ``into(array, values)`` overwrites its memory."""
    rng = np.random.default_rng(8)
    shape = (3, 2, QUERIES, 64)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float16)

    rows = [np.full((3, 2, KEYS + PADDING, 64), np.nan, np.float16) for _ in "kv"]
    for x in rows:
        x[:, :, :KEYS] = normal(3, 2, KEYS, 64)
    q, dout = to_device(normal(*shape)), to_device(normal(*shape))
    k, v = (to_device(x)[:, :, :KEYS] for x in rows)
    lengths = to_device(np.array(CLAMPED, np.int32))
    out, lse = to_device(np.zeros(shape, np.float16)), to_device(np.zeros(shape[:3], np.float32))
    forward = Attention.from_arrays(q, k, v, out, lse, kv_lengths=lengths)
    dq, dk, dv = (
        to_device(np.zeros(s, np.float16)) for s in (shape, (3, 2, KEYS, 64), (3, 2, KEYS, 64))
    )
    backward = AttentionBwd(forward=forward, dout=dout, dq=dq, dk=dk, dv=dv)
    calls = [plan(x, device=device, implementation="shared").bind() for x in (forward, backward)]
    results: list[list[Array]] = []
    for values in (CLAMPED, GIVEN):
        into(lengths, np.array(values, np.int32))
        for call in calls:
            call()
        results.append([to_host(x) for x in (out, lse, dq, dk, dv)])
    for name, expected, actual in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert np.isfinite(expected[:2]).all() and expected[:2].any(), name
        assert not expected[2].any() if name != "lse" else np.isneginf(expected[2]).all(), name
        np.testing.assert_array_equal(actual, expected, err_msg=name)
