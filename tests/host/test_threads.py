"""Shared kernels from several threads: functions on arrays, and calls with a workspace each, with
split keys and without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import Attention, plan
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray

RNG = np.random.default_rng(3)


def normal(*shape: int) -> Any:
    return HostArray(RNG.standard_normal(shape).astype(np.float16))


@pytest.mark.parametrize(
    ("keys", "kernels"), [(64, ["attention_forward"]), (600, ["attention_forward", "merge_states"])]
)
def test_attention(hostcpp: Plugins, keys: int, kernels: list[str]) -> None:
    q, k, v = normal(1, 1, 7, 16), normal(1, 1, keys, 16), normal(1, 1, keys, 16)
    with kernelseam.trace() as launches:
        expected = kernelseam.attention(q, k, v).host
    assert [r.kernel for r in launches] == kernels
    call = plan(Attention.from_arrays(q, k, v, HostArray(np.empty_like(expected)))).bind()
    assert (call.plan.workspace_bytes > 0) == (len(kernels) > 1)

    def work(_: int) -> tuple[Any, Any]:
        mine = HostArray(np.empty_like(expected))
        call.rebind(out=mine)()
        return mine.host, kernelseam.attention(q, k, v).host

    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(work, range(40)):
            for x in actual:
                np.testing.assert_array_equal(x, expected)


def test_gradients(hostcpp: Plugins) -> None:
    q, k, v, bias = (
        normal(1, 2, 7, 16),
        normal(1, 2, 20, 16),
        normal(1, 2, 20, 16),
        normal(1, 1, 7, 20),
    )
    out, lse = kernelseam.attention(q, k, v, bias=bias, return_lse=True)

    def work(_: int) -> list[Any]:
        return [
            x.host
            for x in kernelseam.attention_bwd(q, q, k, v, out, lse, bias=bias, bias_gradient=True)[
                :4
            ]
        ]

    expected = work(0)
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(work, range(40)):
            for x, w in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(x, w)
