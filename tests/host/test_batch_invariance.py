"""A batch-invariant attention gives a row the same bits whatever else is in the batch; others may
split its keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernelseam.descriptors import Attention
from kernelseam.planning import plan
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.runtime import HostArray

RNG = np.random.default_rng(0)
LENGTHS = np.array([1100, 40, 0], np.int32)
Q, K, V = (
    RNG.standard_normal((3, h, s, 64)).astype(np.float16) for h, s in ((4, 1), (1, 1100), (1, 1100))
)


def _out(entries: int, *, host: bool, **options: Any) -> np.ndarray:
    out = np.zeros_like(Q[:entries])
    given = {
        "q": Q[:entries],
        "k": K[:entries],
        "v": V[:entries],
        "out": out,
        "kv_lengths": LENGTHS[:entries],
    }
    arrays = {n: x if host else HostArray(x) for n, x in given.items()}
    planned = plan(Attention.from_arrays(**arrays, **options))
    planned.bind()()
    assert host or len(planned.launches) == (
        2 if entries == 1 and not options["batch_invariant"] else 1
    )
    return out[0]


@pytest.mark.parametrize("host", [False, True], ids=["shared", "reference"])
def test_a_row_has_the_same_bits_alone_and_among_others(hostcpp: Plugins, host: bool) -> None:
    alone, among = (_out(n, host=host, batch_invariant=True) for n in (1, 3))
    np.testing.assert_array_equal(alone, among)
    assert np.isfinite(alone).all() and alone.any()


def test_batch_invariance_must_be_requested(hostcpp: Plugins) -> None:
    alone, among = (_out(n, host=False, batch_invariant=False) for n in (1, 3))
    assert (alone != among).any(), "split keys are summed in another order"
    np.testing.assert_allclose(alone.astype(float), among.astype(float), atol=1e-3)
