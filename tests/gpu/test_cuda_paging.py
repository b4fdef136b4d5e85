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


@pytest.mark.skipif(DEVICE.arch != "sm_90a", reason=f"{DEVICE.arch} has not that kernel")
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("queries", [5, 40])
@pytest.mark.parametrize("apart", [False, True], ids=["all heads", "each head"])
def test_masks_over_pages_on_hopper(queries: int, size: int, apart: bool) -> None:
    """Blocks of keys that nobody sees lie between others, so that the walk over the block table
    leaves pieces of it out; each head's mask is its own, or heads share a tile's rows."""
    given = drawn(queries, (1500, 77, 600), size * 8)
    of_head = int(apart)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < 30 + q) | (kv % 1024 == 560 + of_head * h)

    found = []
    for b, length in enumerate(given["kv_lengths"]):
        pages = given["block_table"][b, : -(-length // (8 * size))]
        k, v = (given[n][pages].reshape(-1, G, D)[:length].astype(np.float64) for n in "kv")
        i, j, h = np.arange(queries)[:, None], np.arange(length), np.arange(H)[:, None, None]
        seen = (j < 30 + i) | (j % 1024 == 560 + of_head * h)
        scores = np.einsum("qhd,khd->hqk", given["q"][b], k.repeat(H // G, 1)) * D**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
        weights /= weights.sum(-1, keepdims=True)
        found.append(np.einsum("hqk,khd->qhd", weights, v.repeat(H // G, 1)))
    actual = attention_paged(
        *(there(x, "torch") for x in given.values()),
        causal=False,
        mask_mod=mask,
        implementation="sm90",
    )
    np.testing.assert_allclose(back(actual), np.stack(found), rtol=2e-3, atol=2e-3)


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
