"""bmm with all that it adds, and its gradients, through the shared kernel: small integers, so bit for bit; one launch
each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelseam import bmm, bmm_bwd, trace
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.runtime import HostArray

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(50)


def integers(*shape: int) -> Array:
    return RNG.integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize("broadcast", ["", "b", "h", "bh", "r"])
@pytest.mark.parametrize("group", [1, 3])
def test_gradients(hostcpp: Plugins, broadcast: str, group: int) -> None:
    a, b, dc = integers(4, 6, 33, 20), integers(4, 6 // group, 20, 17), integers(4, 6, 33, 17)
    keep = tuple(slice(0, 1) if n in broadcast else slice(None) for n in "bhr")
    a, b = np.broadcast_to(a[keep], a.shape), np.broadcast_to(b[keep[:2] if group == 1 else keep[:1]], b.shape)
    each = np.repeat(b, group, axis=1)
    want = [dc @ each.swapaxes(2, 3), (a.swapaxes(2, 3) @ dc).reshape(4, 6 // group, group, 20, 17).sum(2)]
    with trace() as launches:
        found = bmm_bwd(HostArray(dc), *(HostArray(x) for x in (a, b)))
    assert [r.kernel for r in launches] == ["gemm", "gemm"]
    for x, got, w in zip((a, b), found, want, strict=True):
        for axis in range(4):
            w = w.sum(axis, keepdims=True) if x.strides[axis] == 0 else w
        np.testing.assert_array_equal(got.host, w)


def test_sums_that_two_strides_do_not_walk(hostcpp: Plugins) -> None:
    """Over heads with gaps and their rows: products of one row each, by their addresses."""
    dc, b = integers(2, 9, 40, 24)[:, :6, :33, :17], integers(2, 2, 20, 17)
    a = np.broadcast_to(integers(2, 1, 1, 20), (2, 6, 33, 20))
    with trace() as launches:
        da, db = bmm_bwd(HostArray(dc), HostArray(a), HostArray(b))
    assert [r.kernel for r in launches] == ["gemm", "gemm"]
    np.testing.assert_array_equal(da.host, np.einsum("bhmn,bhkn->bk", dc, np.repeat(b, 3, axis=1))[:, None, None])
    np.testing.assert_array_equal(db.host, np.einsum("bghmk,bghmn->bgkn", *(
        x.reshape(2, 2, 3, *x.shape[2:]) for x in (a, dc)
    )))


def test_everything_in_one_launch(hostcpp: Plugins) -> None:
    a, b, bias = integers(2, 6, 33, 20), integers(2, 2, 20, 17), integers(6, 17)
    out, residual = HostArray(integers(2, 6, 33, 17)), integers(2, 33, 6, 17).transpose(0, 2, 1, 3)
    want = 2 * (a @ np.repeat(b, 3, axis=1)) - out.host + bias[:, None] + residual
    with trace() as launches:
        y = bmm(
            HostArray(a), HostArray(b), alpha=2, beta=-1, bias=HostArray(bias), residual=HostArray(residual), out=out
        )
    assert y is out and [r.kernel for r in launches] == ["gemm"]
    np.testing.assert_array_equal(out.host, want)
    again = out.host + a @ np.repeat(b, 3, axis=1)
    bmm(HostArray(a), HostArray(b), residual=out, out=out)
    np.testing.assert_array_equal(out.host, again)
