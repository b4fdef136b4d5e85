"""On an NVIDIA GPU: keys in pages of device memory; tables, lengths and offsets there that lead
astray are refused by name where that is asked for, before anything is launched."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from attention_formula import attention
from kernelseam import Attention, attention_paged, plan
from kernelseam.errors import InvalidValue
from nvidia_gpu import DEVICE, cupy

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(8)
PAGES, PAGE, H, G, D = 40, 16, 4, 2, 64
LENGTHS = (70, 33, 0, 1, 80)
KINDS = ("cupy", "torch")


def there(x: Any, kind: str = "cupy") -> Any:
    """An array of the host's in device memory."""
    return (
        cupy.asarray(x) if kind == "cupy" else pytest.importorskip("torch").from_numpy(x).to("cuda")
    )


def back(x: Any) -> Any:
    """An array's numbers, in float64."""
    return (x.get() if isinstance(x, cupy.ndarray) else x.cpu().numpy()).astype(np.float64)


def drawn(queries: int, lengths: tuple[int, ...] = LENGTHS, size: int = PAGE) -> dict[str, Any]:
    """Operands on the host. What holds no key is NaN, and entries of the table that no length
    reaches name nothing."""
    width = -(-max(lengths) // size)
    table = np.full((len(lengths), width), 2**31 - 1, np.int32)
    pages = iter(RNG.permutation(PAGES))
    k, v = (np.full((PAGES, size, G, D), np.nan, np.float16) for _ in "kv")
    for entry, length in enumerate(lengths):
        for n, begin in enumerate(range(0, length, size)):
            table[entry, n] = page = next(pages)
            rows = min(size, length - begin)
            k[page, :rows], v[page, :rows] = RNG.standard_normal((2, rows, G, D))
    q = RNG.standard_normal((len(lengths), queries, H, D)).astype(np.float16)
    return {"q": q, "k": k, "v": v, "block_table": table, "kv_lengths": np.array(lengths, np.int32)}


def wanted(given: dict[str, Any]) -> tuple[Any, Any]:
    """out [B, S_q, H, D] and the LSE [B, H, S_q] in float64; the last query sees all keys."""
    q, table, lengths = given["q"], given["block_table"], given["kv_lengths"]
    found = []
    for b, length in enumerate(lengths):
        used = table[b, : -(-length // given["k"].shape[1])]
        k, v = (given[n][used].reshape(-1, G, D)[:length].swapaxes(0, 1) for n in "kv")
        found.append(attention(q[b].swapaxes(0, 1), k, v, causal=True))
    out, lse = (np.stack(x) for x in zip(*found, strict=True))
    return out.swapaxes(1, 2), lse


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_keys_in_pages(kind: str, queries: int, kv_layout: str) -> None:
    given = drawn(queries)
    out, lse = wanted(given)
    if kv_layout == "hnd":
        given |= {n: np.ascontiguousarray(given[n].swapaxes(1, 2)) for n in "kv"}
    actual, sums = attention_paged(
        *(there(x, kind) for x in given.values()), kv_layout=kv_layout, return_lse=True
    )
    assert type(actual).__module__.partition(".")[0] == kind
    np.testing.assert_allclose(back(actual), out, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(back(sums), lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_keys_beside_values(queries: int, order: str) -> None:
    """Pages as vLLM has them: [pages, H_kv, rows, 2·D], in either order of memory."""
    given = drawn(queries)
    out = wanted(given)[0]
    both = np.concatenate([given["k"], given["v"]], -1)
    if order == "hnd":
        pages = there(np.ascontiguousarray(both.swapaxes(1, 2)), "torch")
    else:
        pages = there(both, "torch").transpose(1, 2)
    q, table, lengths = (there(given[n], "torch") for n in ("q", "block_table", "kv_lengths"))
    starts = there(np.arange(0, len(q) * queries + 1, queries, dtype=np.int32), "torch")
    packed = q.reshape(-1, H, D)
    actual = attention_paged(
        packed,
        pages[..., :D],
        pages[..., D:],
        table,
        lengths,
        cu_seqlens_q=starts,
        max_seqlen_q=queries,
        max_seqlen_k=table.shape[1] * PAGE,
        kv_layout="hnd",
    )
    np.testing.assert_allclose(back(actual).reshape(out.shape), out, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("size", [1, 3, 128])
def test_pages_of_any_size(size: int) -> None:
    given = drawn(3, (29, 5), size)
    actual = attention_paged(*(there(x) for x in given.values()))
    np.testing.assert_allclose(back(actual), wanted(given)[0], rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(DEVICE.arch != "sm_90a", reason=f"{DEVICE.arch} has not that kernel")
@pytest.mark.parametrize("size", [8, 16, 24, 128])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_hoppers_own_kernel(size: int, queries: int) -> None:
    """In boxes of 8 and of 16 rows of a page."""
    given = drawn(queries, size=size)
    arrays = {n: there(x) for n, x in given.items()}
    out = nan_like(arrays["q"])
    described = Attention.from_arrays(**arrays, out=out, layout="bshd", causal=True)
    plan(described, implementation="sm90").bind()()
    np.testing.assert_allclose(back(out), wanted(given)[0], rtol=2e-3, atol=2e-3)


def test_packed_queries_of_different_lengths() -> None:
    given = drawn(6)
    out, counts = wanted(given)[0], (6, 1, 2, 1, 3)
    rows = [(b, 6 - n + i) for b, n in enumerate(counts) for i in range(n)]  # the last of each
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    packed = np.stack([given["q"][at] for at in rows])
    actual = attention_paged(
        there(packed),
        *(there(given[n]) for n in ("k", "v", "block_table", "kv_lengths")),
        cu_seqlens_q=there(offsets),
        max_seqlen_q=6,
    )
    np.testing.assert_allclose(
        back(actual), np.stack([out[at] for at in rows]), rtol=2e-3, atol=2e-3
    )


def nan_like(q: Any) -> Any:
    return cupy.full(q.shape, np.nan, np.float16)


def refused(
    given: dict[str, Any], name: str, at: Any, value: int, message: str, **options: Any
) -> None:
    """A checked call works, refuses once ``name`` holds ``value``, and works again; nothing is
    launched in between."""
    out = given["out"]
    planned = plan(Attention.from_arrays(**given, **options))
    call = planned.bind(check=True)
    call()
    right = back(out)
    assert not np.isnan(right).any()
    out[...] = np.nan
    held = given[name][at].copy()
    given[name][at] = value
    for ask in (call, lambda: planned.bind(check=True), lambda: call.rebind()):
        with kernelseam.trace() as launches, pytest.raises(InvalidValue) as caught:
            ask()
        assert str(caught.value).startswith(message) and launches == []
    planned.bind()  # nobody asked: nothing is read
    assert np.isnan(back(out)).all()
    given[name][at] = held
    call()
    np.testing.assert_array_equal(back(out), right)


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("block_table", (0, 4), PAGES, "block_table[0, 4] = 40: must be a page, from 0 to 39."),
        ("block_table", (1, 2), -1, "block_table[1, 2] = -1: must be a page, from 0 to 39."),
        ("kv_lengths", (1,), 81, "kv_lengths[1] = 81: must be from 0 to S_k = 80."),
        ("kv_lengths", (4,), -1, "kv_lengths[4] = -1: must be from 0 to S_k = 80."),
        ("kv_lengths", (3,), 17, "block_table[3, 1] = 2147483647: must be a page, from 0 to 39."),
    ],
)
def test_a_checked_call_refuses_tables_and_lengths(
    name: str, at: Any, value: int, message: str
) -> None:
    given = {n: there(x) for n, x in drawn(5).items()}
    refused(
        {**given, "out": nan_like(given["q"])}, name, at, value, message, layout="bshd", causal=True
    )


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("cu_seqlens_q", 0, -1, "cu_seqlens_q[0] = -1: must not be negative."),
        ("cu_seqlens_q", 2, 4, "cu_seqlens_q[2] = 4: must not be below its predecessor, 5."),
        (
            "cu_seqlens_k",
            1,
            8,
            "cu_seqlens_k[1] = 8: gives entry 0 of the batch 8 rows, more than S_k = 7.",
        ),
        ("cu_seqlens_k", 3, 14, "cu_seqlens_k[3] = 14: must not exceed total_k = 13."),
    ],
)
def test_a_checked_call_refuses_offsets(name: str, at: int, value: int, message: str) -> None:
    q, k, v = (
        there(RNG.standard_normal((n, h, D)).astype(np.float16))
        for n, h in ((11, H), (13, G), (13, G))
    )
    starts = {"cu_seqlens_q": [0, 5, 5, 11], "cu_seqlens_k": [0, 7, 9, 13]}
    offsets = {n: there(np.array(x, np.int32)) for n, x in starts.items()}
    refused(
        {"q": q, "k": k, "v": v, "out": nan_like(q), **offsets},
        name,
        at,
        value,
        message,
        max_seqlen_q=6,
        max_seqlen_k=7,
    )


def test_torchs_current_stream() -> None:
    """A table that a stream is still writing is read after it."""
    torch = pytest.importorskip("torch")
    given = drawn(5)
    q, k, v, table, lengths = (there(x, "torch") for x in given.values())
    attention_paged(q, k, v, table, lengths)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late, counts = torch.zeros_like(table), torch.zeros_like(lengths)
        torch.cuda._sleep(100_000_000)
        late.copy_(table)
        counts.copy_(lengths)
        actual = attention_paged(q, k, v, late, counts)
    stream.synchronize()
    np.testing.assert_allclose(back(actual), wanted(given)[0], rtol=2e-3, atol=2e-3)


def test_lengths_beyond_the_table_are_cut_and_negative_ones_are_0() -> None:
    given = {n: there(x) for n, x in drawn(5, (80, 33)).items()}
    given["out"] = nan_like(given["q"])
    call = plan(Attention.from_arrays(**given, layout="bshd", causal=True)).bind()
    given["kv_lengths"][...] = there(np.array([80, 0], np.int32))
    call()
    right = back(given["out"])
    assert right[0].any() and not right[1].any()
    given["kv_lengths"][...] = there(np.array([2**31 - 1, -(2**31)], np.int32))
    given["block_table"][1] = 2**31 - 1
    given["out"][...] = np.nan
    call()
    np.testing.assert_array_equal(back(given["out"]), right)
