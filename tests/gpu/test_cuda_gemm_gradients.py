"""On an NVIDIA GPU: gradients of products, also over axes that two strides do not walk: a launch
each, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradient_problems import Array, uneven
from kernelseam import bmm_bwd, trace
from nvidia_gpu import cupy

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(50)
KINDS = ("cupy", "torch")


def there(x: Array, kind: str) -> Any:
    """An array of the host's, its base's memory and its strides, in device memory."""
    flat = x if x.base is None else x.base
    while flat.base is not None:
        flat = flat.base
    start = (x.ctypes.data - flat.ctypes.data) // x.itemsize
    if kind == "cupy":
        return cupy.lib.stride_tricks.as_strided(
            cupy.asarray(flat).reshape(-1)[start:], x.shape, x.strides
        )
    torch = pytest.importorskip("torch")
    return (
        torch.from_numpy(flat)
        .to("cuda")
        .as_strided(x.shape, [s // x.itemsize for s in x.strides], start)
    )


def back(x: Any) -> Array:
    return x.get() if isinstance(x, cupy.ndarray) else x.cpu().numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_that_two_strides_do_not_walk(kind: str, dtype: str) -> None:
    """Products of one row each, by their addresses; accumulated into what is given as well."""
    given, wanted = uneven(RNG, dtype)
    arrays = [there(x, kind) for x in given]
    with trace() as launches:
        actual = bmm_bwd(*arrays, out_dtype="float32", implementation="shared")
    assert [r.kernel for r in launches] == ["gemm", "gemm"]
    for y, w in zip(actual, wanted, strict=True):
        assert type(y).__module__.partition(".")[0] == kind
        np.testing.assert_array_equal(back(y), w)
    with trace() as launches:
        again = bmm_bwd(*arrays, alpha=2, beta=1, da=actual.da, db=actual.db)
    assert len(launches) == 2 and again.da is actual.da and again.db is actual.db
    for y, w in zip(again, wanted, strict=True):
        np.testing.assert_array_equal(back(y), 3 * w)


def test_lists_on_torchs_current_stream() -> None:
    """What a stream is still writing is read after it, and the lists live as long as they are
    read."""
    torch = pytest.importorskip("torch")
    given, wanted = uneven(RNG)
    dc, a, b = (there(x, "torch") for x in given)
    bmm_bwd(dc, a, b)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros(2, 9, 40, 24, device="cuda")[:, :6, :33, :17]
        torch.cuda._sleep(100_000_000)
        late.copy_(dc)
        actual = bmm_bwd(late, a, b)
        del late
        torch.empty(2, 9, 40, 24, device="cuda").fill_(1e30)
    stream.synchronize()
    for y, w in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(back(y), w)
