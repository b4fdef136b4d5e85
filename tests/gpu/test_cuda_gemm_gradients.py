"""On an NVIDIA GPU: gradients of products, also over axes that two strides do not walk: a launch each, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelseam import bmm_bwd, trace
from kernelseam.plugins import plugins

pytestmark = pytest.mark.gpu
pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
BACKEND = plugins().registry.backends.get("cuda")
if BACKEND is None or not BACKEND.runtime.devices():
    pytest.skip("gpu is missing: no NVIDIA device here", allow_module_level=True)
cupy = pytest.importorskip("cupy")
RNG = np.random.default_rng(50)
Array = np.ndarray[Any, Any]
KINDS = ("cupy", "torch")


def integers(*shape: int, dtype: str = "float32") -> Array:
    return RNG.integers(-3, 4, shape).astype(dtype)


def there(x: Array, kind: str) -> Any:
    """An array of the host's, its base's memory and its strides, in device memory."""
    flat = x if x.base is None else x.base
    while flat.base is not None:
        flat = flat.base
    start = (x.ctypes.data - flat.ctypes.data) // x.itemsize
    if kind == "cupy":
        return cupy.lib.stride_tricks.as_strided(cupy.asarray(flat).reshape(-1)[start:], x.shape, x.strides)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(flat).to("cuda").as_strided(x.shape, [s // x.itemsize for s in x.strides], start)


def back(x: Any) -> Array:
    return x.get() if isinstance(x, cupy.ndarray) else x.cpu().numpy()


def uneven(dtype: str) -> tuple[list[Array], list[Array]]:
    """dc, a that repeats over heads and rows, b of fewer heads, heads of dc with gaps; and what da and db are."""
    dc, b = integers(2, 9, 40, 24, dtype=dtype)[:, :6, :33, :17], integers(2, 2, 20, 17, dtype=dtype)
    a = np.broadcast_to(integers(2, 1, 1, 20, dtype=dtype), (2, 6, 33, 20))
    wide = [x.astype(np.float64) for x in (dc, a, b)]
    da = np.einsum("bhmn,bhkn->bk", wide[0], np.repeat(wide[2], 3, axis=1))[:, None, None]
    db = np.einsum("bghmk,bghmn->bgkn", *(wide[i].reshape(2, 2, 3, *wide[i].shape[2:]) for i in (1, 0)))
    return [dc, a, b], [da, db]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_that_two_strides_do_not_walk(kind: str, dtype: str) -> None:
    """Products of one row each, by their addresses; accumulated into what is given as well."""
    given, wanted = uneven(dtype)
    arrays = [there(x, kind) for x in given]
    with trace() as launches:
        found = bmm_bwd(*arrays, out_dtype="float32", implementation="shared")
    assert [r.kernel for r in launches] == ["gemm", "gemm"]
    for y, w in zip(found, wanted, strict=True):
        assert type(y).__module__.partition(".")[0] == kind
        np.testing.assert_array_equal(back(y), w)
    with trace() as launches:
        again = bmm_bwd(*arrays, alpha=2, beta=1, da=found.da, db=found.db)
    assert len(launches) == 2 and again.da is found.da and again.db is found.db
    for y, w in zip(again, wanted, strict=True):
        np.testing.assert_array_equal(back(y), 3 * w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broadcast", ["", "b", "h", "bh", "r"])
@pytest.mark.parametrize("group", [1, 3])
def test_gradients_of_what_repeats(kind: str, broadcast: str, group: int) -> None:
    a, b, dc = integers(4, 6, 33, 20), integers(4, 6 // group, 20, 17), integers(4, 6, 33, 17)
    keep = tuple(slice(0, 1) if n in broadcast else slice(None) for n in "bhr")
    a, b = np.broadcast_to(a[keep], a.shape), np.broadcast_to(b[keep[:2] if group == 1 else keep[:1]], b.shape)
    each = np.repeat(b, group, axis=1)
    wanted = [dc @ each.swapaxes(2, 3), (a.swapaxes(2, 3) @ dc).reshape(4, 6 // group, group, 20, 17).sum(2)]
    with trace() as launches:
        found = bmm_bwd(*(there(x, kind) for x in (dc, a, b)))
    assert len(launches) == 2
    for x, y, w in zip((a, b), found, wanted, strict=True):
        for axis in range(4):
            w = w.sum(axis, keepdims=True) if x.strides[axis] == 0 else w
        np.testing.assert_array_equal(back(y), w)


def test_lists_on_torchs_current_stream() -> None:
    """What a stream is still writing is read after it, and the lists live as long as they are read."""
    torch = pytest.importorskip("torch")
    given, wanted = uneven("float32")
    dc, a, b = (there(x, "torch") for x in given)
    bmm_bwd(dc, a, b)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros(2, 9, 40, 24, device="cuda")[:, :6, :33, :17]
        torch.cuda._sleep(100_000_000)
        late.copy_(dc)
        found = bmm_bwd(late, a, b)
        del late
        torch.empty(2, 9, 40, 24, device="cuda").fill_(1e30)
    stream.synchronize()
    for y, w in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(back(y), w)
