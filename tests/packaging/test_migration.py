"""Each row of docs/migration.md: both sides run on the same data, and give the same.

torch's side is torch's own. The other libraries need a GPU: stand-ins compute in float64 what their
documentation says, causal masks from the bottom right.
"""

from __future__ import annotations

import ctypes
import math
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernelseam
import numpy as np
import pytest
from attention_formula import attention

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ROWS = [block.split("# kernelseam", 1) for block in BLOCKS]
NAMES = [theirs.split("\n")[0].removeprefix("# ") for theirs, _ in ROWS]
B, H, H_KV, S_Q, S_K, D, PAGE_SIZE = 3, 4, 2, 5, 9, 16, 4
RANK, ROTATED, BLOCK = 24, 8, 8
EIGHT = (("q8", S_Q, H), ("k8", S_K, H_KV), ("v8", S_K, H_KV))
Tensor = Any


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of one entry: q [S_q, H, D], k and v [S_k, H_kv, D] → [S_q, H, D] and the LSE [H, S_q]."""
    out, lse = attention(
        *(x.transpose(0, 1) for x in (q, k, v)),
        scale=scale,
        causal=causal,
        window=[None if n < 0 else n for n in window],
        softcap=softcap,
        alibi_slopes=slopes,
    )
    return out.transpose(0, 1), lse


def heads_of(scale: Tensor, x: Tensor) -> Tensor:
    """Scales [B, H_kv] as factors of x [B, S, H, D]."""
    return scale.double().repeat_interleave(x.shape[2] // H_KV, 1)[:, None, :, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    q, k, v = (
        x if scale is None else x.double() * heads_of(scale, x)
        for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale))
    )
    each = [
        softmax_attention(*x, causal, window_size, softmax_scale, softcap, alibi_slopes)
        for x in zip(q, k, v, strict=True)
    ]
    out, lse = (torch.stack(x) for x in zip(*each, strict=True))
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Tensor, causal: bool = False) -> Tensor:
    return flash_attn_func(*qkv.unbind(2), causal=causal)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:
    at_q, at_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return torch.cat(
        [
            softmax_attention(q[a:b], k[c:d], v[c:d], causal)[0]
            for a, b, c, d in zip(at_q, at_q[1:], at_k, at_k[1:], strict=False)
        ]
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    assert cache_seqlens is not None
    found = []
    for b, n in enumerate(cache_seqlens.tolist()):
        keys, values = (
            x[b] if block_table is None else x[block_table[b].clamp(min=0).long()].flatten(0, 1)
            for x in (k_cache, v_cache)
        )
        keys, values = keys[:n], values[:n]
        if k is not None and v is not None:
            keys, values = torch.cat([keys, k[b]]), torch.cat([values, v[b]])
        found.append(softmax_attention(q[b], keys, values, causal)[0])
    return torch.stack(found)


class Ragged:
    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self, qo: Tensor, kv: Tensor, heads: int, kv_heads: int, dim: int, causal: bool = False
    ) -> None:
        assert (heads, kv_heads, dim) == (H, H_KV, D)
        self.offsets, self.causal = (qo, kv), causal

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, *self.offsets, 0, 0, causal=self.causal)


class Paged(Ragged):
    def plan(self, *given: Any) -> None:  # type: ignore[override]
        self.indptr, self.indices, self.last, heads, kv_heads, dim, self.size = given
        assert (heads, kv_heads, dim) == (H, H_KV, D)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        found = []
        for b in range(len(q)):
            mine = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            n = (len(mine) - 1) * self.size + int(self.last[b])
            keys, values = (x[mine].flatten(0, 1)[:n] for x in pages)
            found.append(softmax_attention(q[b : b + 1], keys, values)[0][0])
        return torch.stack(found)


class PagedPrefill(Ragged):
    def plan(  # type: ignore[override]
        self, qo: Tensor, *given: Any, causal: bool = False, custom_mask: Tensor | None = None
    ) -> None:
        self.indptr, self.indices, self.last, heads, kv_heads, dim, self.size = given
        assert (heads, kv_heads, dim, causal) == (H, H_KV, D, custom_mask is None)
        self.queries, self.seen = qo, custom_mask

    def rows(self, b: int, pages: Tensor, keys: int) -> Tensor:
        mine = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
        return pages[mine].flatten(0, 1)[:keys]

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        found, at = [], 0
        for b, (first, end) in enumerate(pairwise(self.queries.tolist())):
            n = int(self.indptr[b + 1] - self.indptr[b] - 1) * self.size + int(self.last[b])
            keys, values = (self.rows(b, x, n) for x in pages)
            if self.seen is None:
                found.append(softmax_attention(q[first:end], keys, values, True)[0])
                continue
            seen = self.seen[at : at + (end - first) * n].reshape(-1, n)
            at += seen.numel()
            # a query at a time, over the keys that it sees
            rows = zip(q[first:end, None], seen, strict=True)
            found += [softmax_attention(x, keys[s], values[s])[0] for x, s in rows]
        return torch.cat(found)


class Latent(PagedPrefill):
    def __init__(self, workspace: Tensor) -> None:
        super().__init__(workspace, "NHD")

    def plan(self, *given: Any) -> None:  # type: ignore[override]
        self.queries, self.indptr, self.indices, self.lengths, heads, *dims, size, causal = given[
            :9
        ]
        assert (heads, dims, size, causal) == (H, [RANK, ROTATED], PAGE_SIZE, True)
        self.scale = given[9]

    def run(  # type: ignore[override]
        self, q_nope: Tensor, q_pe: Tensor, ckv_pages: Tensor, kpe_pages: Tensor
    ) -> Tensor:
        found = []
        for b, (first, end) in enumerate(pairwise(self.queries.tolist())):
            n = int(self.lengths[b])
            ckv, kpe = (self.rows(b, x, n) for x in (ckv_pages, kpe_pages))
            scores = torch.einsum("qhc,kc->hqk", q_nope[first:end], ckv)
            scores = (scores + torch.einsum("qhc,kc->hqk", q_pe[first:end], kpe)) * self.scale
            seen = torch.ones(scores.shape[1:]).tril(n - (end - first)).bool()
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqk,kc->qhc", p, ckv))
        return torch.cat(found)


def concat_and_cache_mla(
    ckv: Tensor, kpe: Tensor, pages: Tensor, slots: Tensor, kind: str, scale: Tensor
) -> None:
    assert scale.item() == 1
    there = slots >= 0
    rows = torch.cat((ckv, kpe), -1)
    if kind == "fp8_ds_mla":
        x = ckv.unflatten(-1, (-1, BLOCK))
        scales = x.abs().amax(-1) / 448
        numbers = (x / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
        parts = (numbers, scales, kpe.to(torch.bfloat16))
        rows = torch.cat([part.view(torch.uint8) for part in parts], -1)
    pages.view(-1, pages.shape[-1])[slots[there]] = rows[there]


def flash_mla_with_kvcache(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    rank: int,
    metadata: None,
    splits: None,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    found = []
    for x, row, n in zip(q, table.clamp(min=0).long(), lengths.tolist(), strict=True):
        k = pages[row].flatten(0, 1)[:n]
        found.append(softmax_attention(x, k, k[..., :rank], causal, scale=softmax_scale))
    out, lse = zip(*found, strict=True)
    return torch.stack(out), torch.stack(lse)


def merge_attn_states(
    out: Tensor, one: Tensor, lse_one: Tensor, two: Tensor, lse_two: Tensor, lse: Tensor
) -> None:
    lse.copy_(torch.logaddexp(lse_one, lse_two))
    weights = ((x - lse).exp().T[..., None] for x in (lse_one, lse_two))
    out.copy_(sum(x * w for x, w in zip((one, two), weights, strict=True)))


def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """LSEs of base 2."""
    weights = torch.exp2(lses.double() - lses.double().amax(1, keepdim=True))
    lse = torch.log2(weights.sum(1)) + lses.double().amax(1)
    return (outs.double() * weights[..., None]).sum(1) / weights.sum(1)[..., None], lse


def batch_indices_positions(offsets: Tensor, lengths: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The entry and the position of each packed row."""
    entry = torch.repeat_interleave(torch.arange(len(lengths)), offsets.diff().long())
    return entry, lengths[entry] - offsets[entry + 1] + torch.arange(rows)


def append_to_pages(
    k: Tensor,
    v: Tensor,
    entries: Tensor,
    positions: Tensor,
    pages: tuple[Tensor, Tensor],
    indices: Tensor,
    indptr: Tensor,
    last: Tensor,
) -> None:
    for i, (e, at) in enumerate(zip(entries.tolist(), positions.tolist(), strict=True)):
        page = indices[indptr[e] + at // PAGE_SIZE]
        for into, x in zip(pages, (k, v), strict=True):
            into[page, at % PAGE_SIZE] = x[i]


def reshape_and_cache_flash(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    kind: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    assert (kind, k_scale.item(), v_scale.item()) == ("auto", 1, 1)
    for pages, x in ((k_pages, k), (v_pages, v)):
        pages.view(-1, *pages.shape[2:])[slots[slots >= 0]] = x[slots >= 0]


def cp_gather_cache(pages: Tensor, out: Tensor, table: Tensor, starts: Tensor, batch: int) -> None:
    for b, (first, end) in enumerate(pairwise(starts.tolist())):
        out[first:end] = pages[table[b].clamp(min=0).long()].flatten(0, 1)[: end - first]
    assert batch == len(table)


def copy_blocks(keys: list[Tensor], values: list[Tensor], pairs: Tensor) -> None:
    for pages in (*keys, *values):
        pages[pairs[:, 1]] = pages[pairs[:, 0]]


def of_rows(x: Tensor, w: Tensor, out: Tensor, experts: Tensor) -> None:
    """Each row by its expert's weights."""
    out.copy_(torch.einsum("tk,tnk->tn", x.double(), w.double()[experts.long()]))


def matrix(address: int, rows: int, columns: int, leading: int) -> Any:
    """A column-major matrix of float32 at an address."""
    flat = np.ctypeslib.as_array(
        ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (leading * columns,)
    )
    return flat.reshape(columns, leading)[:, :rows].T


def gemm(
    op_a: int,
    op_b: int,
    m: int,
    n: int,
    k: int,
    alpha: float,
    a: tuple[int, int],
    b: tuple[int, int],
    beta: float,
    c: tuple[int, int],
) -> None:
    """One product by cuBLAS's words: column-major, (address, leading dimension)."""
    left = matrix(a[0], k, m, a[1]).T if op_a else matrix(a[0], m, k, a[1])
    right = matrix(b[0], n, k, b[1]).T if op_b else matrix(b[0], k, n, b[1])
    out = matrix(c[0], m, n, c[1])
    old = beta * out.astype(np.float64) if beta else 0.0
    out[...] = alpha * left.astype(np.float64) @ right.astype(np.float64) + old


def cublasSgemmStridedBatched(handle: None, *x: Any) -> None:
    op_a, op_b, m, n, k, alpha, a, lda, step_a, b, ldb, step_b, beta, c, ldc, step_c, count = x
    for i in range(count):
        places = ((a, lda, step_a), (b, ldb, step_b), (c, ldc, step_c))
        one, two, out = ((start + 4 * i * step, leading) for start, leading, step in places)
        gemm(op_a, op_b, m, n, k, alpha, one, two, beta, out)


def cublasSgemmBatched(handle: None, *x: Any) -> None:
    op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, count = x
    for i in range(count):
        gemm(op_a, op_b, m, n, k, alpha, (a[i], lda), (b[i], ldb), beta, (c[i], ldc))


def cublasSgemmGroupedBatched(handle: None, *x: Any) -> None:
    ops_a, ops_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, count, sizes = x
    assert sizes == [1] * count
    for i in range(count):
        one, two, out = ((p[i], leading[i]) for p, leading in ((a, lda), (b, ldb), (c, ldc)))
        gemm(ops_a[i], ops_b[i], m[i], n[i], k[i], alpha[i], one, two, beta[i], out)


def names(row: str) -> dict[str, Any]:
    """What a row's code finds: the same numbers each time."""
    import kernelseam.interop.torch as ks
    import torch.nn.functional as F
    from torch.nn.attention import flex_attention as flex
    from torch.nn.attention.bias import causal_lower_right

    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    gradients = "gradients" in row
    q, k, v = (normal(B, H, n, D).requires_grad_(gradients) for n in (S_Q, S_K, S_K))
    offsets_q, offsets_k = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 9, 15])
    )
    lengths = torch.tensor([5, 8, 2], dtype=torch.int32)
    found = {
        "torch": torch,
        "F": F,
        "ks": ks,
        "kernelseam": kernelseam,
        "math": math,
        "causal_lower_right": causal_lower_right,
        "flex_attention": flex.flex_attention,
        "create_block_mask": flex.create_block_mask,
        "q": q,
        "k": k,
        "v": v,
        "dout": normal(B, H, S_Q, D),
        "k_few": normal(B, H_KV, S_K, D),
        "v_few": normal(B, H_KV, S_K, D),
        "seen": normal(B, 1, S_Q, S_K) > -0.5,
        "added": normal(B, H, S_Q, S_K),
        "qt": normal(B, S_Q, H, D),
        **{n: normal(B, S_K, H if "torch" in row else H_KV, D) for n in ("kt", "vt")},
        "qkv": normal(B, S_K, 3, H, D),
        **{n: normal(B, S, heads, D).to(torch.float8_e4m3fn) for n, S, heads in EIGHT},
        **{f"{n}_scale": normal(B, H_KV).abs() + 0.5 for n in "qkv"},
        "slopes": torch.tensor([2.0 ** -(i + 1) for i in range(H)]),
        "qp": normal(8, H, D),
        "kp": normal(15, H_KV, D),
        "vp": normal(15, H_KV, D),
        "cu_seqlens_q": offsets_q,
        "cu_seqlens_k": offsets_k,
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
        "q1": normal(B, 1, H, D),
        "k1": normal(B, 1, H_KV, D),
        "v1": normal(B, 1, H_KV, D),
        **{n: normal(B, S_K, H_KV, D) for n in ("k_cache", "v_cache")},
        **{n: normal(7, PAGE_SIZE, H_KV, D) for n in ("k_pages", "v_pages")},
        "lengths": lengths,
        "block_table": torch.tensor([[6, 2], [0, 5], [3, -1]], dtype=torch.int32),
        "indptr": torch.tensor([0, 2, 4, 5], dtype=torch.int32),
        "indices": torch.tensor([6, 2, 0, 5, 3], dtype=torch.int32),
        "last_page_len": torch.tensor([1, 4, 2], dtype=torch.int32),
        **{n: normal(5, H_KV, D) for n in ("k_new", "v_new")},
        "cu_seqlens_new": torch.tensor([0, 2, 3, 5], dtype=torch.int32),
        "cu_lengths": torch.tensor([0, 5, 13, 15], dtype=torch.int32),
        "gathered": torch.zeros(15, RANK + ROTATED),
        # Two beside each other, one, and one after the other.
        "ancestors": torch.tensor([0b01, 0b10, 0b1, 0b01, 0b11], dtype=torch.int32),
        "drafts_see": torch.tensor(
            [*[1, 1, 1, 1, 0], *[1, 1, 1, 0, 1], *[1] * 8, *[1, 0, 1, 1]]
        ).bool(),
        "slot_mapping": torch.tensor([3, -1, 0, 27, 11]),
        "pairs": torch.tensor([[6, 1], [0, 4]]),
        "q_new": normal(5, H, D),
        "q_nope": normal(5, H, RANK),
        "q_pe": normal(5, H, ROTATED),
        "ckv_pages": normal(7, PAGE_SIZE, RANK),
        "kpe_pages": normal(7, PAGE_SIZE, ROTATED),
        "latent_pages": normal(7, PAGE_SIZE, RANK + ROTATED),
        "scaled_pages": torch.zeros(
            7, PAGE_SIZE, RANK + 4 * (RANK // BLOCK) + 2 * ROTATED, dtype=torch.uint8
        ),
        "q_latent": normal(B, 2, H, RANK + ROTATED),
        "ckv_new": normal(5, RANK),
        "kpe_new": normal(5, ROTATED),
        "rank": RANK,
        "rotated": ROTATED,
        "block": BLOCK,
        "scale": 0.3,
        "one": torch.ones(()),
        "ops": SimpleNamespace(
            reshape_and_cache_flash=reshape_and_cache_flash,
            copy_blocks=copy_blocks,
            cp_gather_cache=cp_gather_cache,
            concat_and_cache_mla=concat_and_cache_mla,
            merge_attn_states=merge_attn_states,
        ),
        "page_size": PAGE_SIZE,
        "num_heads": H,
        "num_kv_heads": H_KV,
        "head_dim": D,
        "q_one": normal(S_Q, H, D),
        "k_one": normal(S_K, H_KV, D),
        "v_one": normal(S_K, H_KV, D),
        "part_outs": normal(S_Q, 3, H, D),
        "part_lses": normal(S_Q, 3, H),
        "workspace": None,
        "tokens": normal(8, 16),
        "experts": normal(3, 16, 12),
        "weights": normal(3, 12, 16),
        "results": normal(8, 12),
        "offs": torch.tensor([2, 2, 8], dtype=torch.int32),
        "m_indices": torch.tensor([0, 0, *[2] * 6], dtype=torch.int32),
        "deep_gemm": SimpleNamespace(m_grouped_bf16_gemm_nt_contiguous=of_rows),
        **{
            f.__name__: f
            for f in (
                *(flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func),
                *(flash_attn_with_kvcache, cublasSgemmStridedBatched, cublasSgemmBatched),
                cublasSgemmGroupedBatched,
            )
        },
        "flash_mla": SimpleNamespace(
            get_mla_metadata=lambda lengths, rows, kv_heads: (None, None),
            flash_mla_with_kvcache=flash_mla_with_kvcache,
        ),
        "flashinfer": SimpleNamespace(
            single_prefill_with_kv_cache=lambda q, k, v, causal: softmax_attention(q, k, v, causal)[
                0
            ],
            single_decode_with_kv_cache=lambda q, k, v: softmax_attention(q[None], k, v)[0][0],
            BatchPrefillWithRaggedKVCacheWrapper=Ragged,
            BatchDecodeWithPagedKVCacheWrapper=Paged,
            BatchPrefillWithPagedKVCacheWrapper=PagedPrefill,
            mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent),
            merge_states=merged,
            get_batch_indices_positions=batch_indices_positions,
            append_paged_kv_cache=append_to_pages,
        ),
    }
    if row.startswith("cuBLAS"):
        count, M, N, K = 3, 4, 5, 6
        rng = np.random.default_rng(0)
        a, b, out = (
            rng.standard_normal((count, *shape), np.float32) for shape in ((M, K), (N, K), (M, N))
        )
        lists = {
            f"{n}_list": [x[i].ctypes.data for i in (2, 0, 1)]
            for n, x in (("a", a), ("b", b), ("c", out))
        }
        found |= {"count": count, "M": M, "N": N, "K": K, "handle": None, "OP_N": 0, "OP_T": 1}
        found |= {"Ms": [2, 4, 3], "Ns": [5, 2, 3], "Ks": [6, 4, 1], "no": [0] * 3}
        found |= {"ones": [1] * 3, "twos": [2] * 3}
        found |= {"a": a.ctypes.data, "b": b.ctypes.data, "c": out.ctypes.data, **lists}
        found |= {"device": "numpy:0", "kept": (a, b, out), "out": out}
    return found


def results(code: str, row: str) -> dict[str, Any]:
    found = names(row)
    before = dict(found)
    exec(compile(code, f"docs/migration.md: {row}", "exec"), found)
    wanted = ("out", "lse", "dq", "dk", "dv")
    assert "out" in found or found["dq"] is not None
    made = {n: found[n] for n in wanted if n in found}
    assert row.startswith("cuBLAS") or all(made[n] is not before.get(n) for n in made)
    return {
        n: np.asarray(x.detach().double() if torch.is_tensor(x) else x, np.float64)
        for n, x in made.items()
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=NAMES)
def test_a_row(theirs: str, ours: str) -> None:
    row = theirs.split("\n")[0].removeprefix("# ")
    old, new = results(theirs, row), results("#" + ours, row)
    assert old.keys() == new.keys() and old
    for name, x in old.items():
        assert new[name].shape == x.shape and np.abs(x).max() > 0.1
        lost = 2**-7 if "e4m3" in row else 2e-5  # the result is bfloat16 there
        assert np.abs(new[name] - x).max() < lost * max(1, np.abs(x).max()), name


def test_all_are_there() -> None:
    """Causal alignment first, then each library that is named."""
    assert len(ROWS) == len(BLOCKS) == len(set(NAMES)) == 42
    assert all("top left" in n or "bottom right" in n for n in NAMES[:3])
    starts = [n.partition(":")[0] for n in NAMES]
    assert list(dict.fromkeys(starts)) == [
        "torch",
        "deep_gemm",
        "flash_attn",
        "flash_mla",
        "flashinfer",
        "vllm",
        "cuBLAS",
    ]


def test_the_two_diagonals_differ() -> None:
    """So that the first rows say something."""
    theirs, ours = ROWS[0][0], ROWS[2][1]
    a, b = results(theirs, NAMES[0])["out"], results("#" + ours, NAMES[0])["out"]
    assert np.abs(a - b).max() > 0.1
