"""What each rank of a test does: its shard of operands that every rank makes alike, forward and
backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import attention_formula
import numpy as np

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One attention over several ranks."""

    method: str = "ring"
    order: str = "balanced"
    rows: int = 48
    rows_k: int | None = None
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    dim: int = 8
    value_dim: int = 6
    dtype: str = "float64"
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    prefix: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    documents: tuple[int, ...] | None = None
    lse: bool = False
    mods: bool = False
    """Those of ``MODS``."""
    mesh: tuple[int, ...] | None = None


_TABLE = np.linspace(-1, 1, 6 * 80).reshape(6, 80)
_SHOWN = np.arange(80) % 7 != 3


def _score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any) -> Any:
    near = np.minimum(abs(q_idx - kv_idx), 79)
    return score * (1 + 0.25 * (q_idx % 3)) + _TABLE[h, near] + 0.5 * b - 0.5 * q_idx / q_len


def _visible(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, kv_len: Any) -> Any:
    return _SHOWN[kv_idx] | (kv_idx == q_idx) | (kv_idx == kv_len - 1 - h - b)


MODS: dict[str, Any] = {"score_mod": _score, "mask_mod": _visible}
"""Of all that they may read: each index, the head, the lengths, an array by head and one by key."""


def _of_entry(mod: Any, entry: int) -> Any:
    """A function of entry 0 alone, as of another one."""
    if mod is _score:
        return lambda score, b, h, q, kv, *, q_len: _score(score, b + entry, h, q, kv, q_len=q_len)
    return lambda b, h, q, kv, *, kv_len: _visible(b + entry, h, q, kv, kv_len=kv_len)


def operands(case: Case) -> Arrays:
    """The whole's operands and the gradients of its results, as float64 that the dtype holds."""
    rng = np.random.default_rng(7)
    rows_k = case.rows_k or case.rows
    batch = 1 if case.documents else case.batch
    shapes = {
        "q": (batch, case.heads, case.rows, case.dim),
        "k": (batch, case.kv_heads, rows_k, case.dim),
        "v": (batch, case.kv_heads, rows_k, case.value_dim),
        "dout": (batch, case.heads, case.rows, case.value_dim),
        "dlse": (batch, case.heads, case.rows),
    }
    found = {n: rng.standard_normal(s) for n, s in shapes.items()}
    found["alibi"] = (2.0 ** -np.arange(1, case.heads + 1)).astype(np.float32)
    found["sinks"] = rng.standard_normal(case.heads).astype(np.float32)
    return found


def attention(group: Any, case: Case, fault: str | None = None, **more: Any) -> Arrays:
    """This rank's results and gradients, as float64."""
    import distributed_faults
    import torch
    from gloo_ranks import device_of, host
    from kernelseam import distributed

    with distributed_faults.planted(fault, group):
        whole = operands(case)
        balanced = case.order == "balanced"
        kind = getattr(torch, case.dtype)

        device = device_of(group)

        def mine(name: str) -> Any:
            x = torch.from_numpy(whole[name]).to(device)
            x = x.to(kind if name != "dlse" or case.dtype == "float64" else torch.float32)
            return distributed.shard(x, dim=2, group=group, causal=balanced).detach()

        q, k, v = (mine(n).requires_grad_() for n in "qkv")
        options: dict[str, Any] = {
            "group": group if case.mesh is None else _mesh(group, case.mesh),
            "method": case.method,
            "order": case.order,
            "causal": case.causal,
            "window": case.window,
            "softcap": case.softcap,
            "return_lse": True,
            **(MODS if case.mods else {}),
            **more,
        }
        sinks = None
        if case.sinks:
            sinks = options["sinks"] = torch.from_numpy(whole["sinks"]).to(device).requires_grad_()
        if case.alibi:
            options["alibi_slopes"] = torch.from_numpy(whole["alibi"]).to(device)
        for name, lengths in (("prefix_lengths", case.prefix), ("kv_lengths", case.kv_lengths)):
            if lengths is not None:
                options[name] = torch.tensor(lengths, dtype=torch.int32, device=device)
        if case.documents is None:
            out, lse = distributed.attention(q, k, v, **options)
        else:
            a, b, c = (x[0].transpose(0, 1) for x in (q, k, v))
            out, lse = distributed.attention_varlen(a, b, c, case.documents, **options)
            out, lse = out.transpose(0, 1)[None], lse[None]
        results, given = [out], [mine("dout").to(out.dtype)]
        if case.lse:
            results.append(torch.where(lse == -torch.inf, 0, lse))
            given.append(mine("dlse"))
        torch.autograd.backward(results, given)
        return {
            "out": host(out),
            "lse": host(lse),
            "dq": host(q.grad),
            "dk": host(k.grad),
            "dv": host(v.grad),
            "dsinks": None if sinks is None else host(sinks.grad),
            "dtypes": [str(x.dtype) for x in (out, lse, q.grad, k.grad, v.grad)],
        }


_meshes: dict[tuple[int, ...], Any] = {}


def _mesh(group: Any, shape: tuple[int, ...]) -> Any:
    from gloo_ranks import device_of
    from torch.distributed.device_mesh import init_device_mesh

    if shape not in _meshes:
        names, kind = ("ring", "heads")[: len(shape)], device_of(group).type
        _meshes[shape] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return _meshes[shape]


def expected(case: Case) -> Arrays:
    """The float64 oracle of the whole; not to be written to."""
    return _expected(replace(case, method="", order="", mesh=None))


@lru_cache(maxsize=64)
def _expected(case: Case) -> Arrays:
    from kernelseam.oracle import formulas, gradients

    whole = operands(case)
    if case.dtype != "float64":
        whole = {n: _rounded(x, case.dtype) if n in "qkvdout" else x for n, x in whole.items()}
    scale = case.dim**-0.5
    if case.documents is not None:
        return _packed(case, whole, scale)
    variant = formulas.Variant(
        window=case.window or (None, None),
        prefix_lengths=case.prefix,
        softcap=case.softcap,
        alibi_slopes=np.broadcast_to(whole["alibi"], (case.batch, case.heads))
        if case.alibi
        else None,
        sinks=whole["sinks"] if case.sinks else None,
        kv_lengths=case.kv_lengths,
        **(MODS if case.mods else {}),
    )
    q, k, v = (whole[n] for n in "qkv")
    made = formulas.attention(q, k, v, case.causal, scale, variant=variant)
    found = gradients.attention_bwd(q, k, v, whole["dout"], case.causal, scale, variant)
    result: Arrays = {"out": made.out, "lse": made.lse, "dsinks": None}
    result |= {n: x.value for n, x in found.items()}
    if case.lse:
        _add_lse(result, q, k, made.lse, whole["dlse"], case, scale, variant)
    return result


def _add_lse(
    result: Arrays, q: Any, k: Any, lse: Any, dlse: Any, case: Case, scale: float, variant: Any
) -> None:
    """Add the gradients of the LSE: those of Σ dlse·lse, by the result of values that are columns
    of the identity, which is p itself."""
    from kernelseam.oracle import formulas

    rows = k.shape[2]
    eye = np.broadcast_to(np.eye(rows), (*k.shape[:3], rows))
    p = formulas.attention(q, k, eye, case.causal, scale, variant=variant).out
    group = q.shape[1] // k.shape[1]
    ds = p * dlse[..., None]
    if case.softcap is not None:
        x = scale * np.einsum("bhid,bhjd->bhij", q, np.repeat(k, group, 1))
        ds = ds * (1 - np.tanh(x / case.softcap) ** 2)
    result["dq"] = result["dq"] + scale * ds @ np.repeat(k, group, 1)
    dk = scale * ds.swapaxes(2, 3) @ q
    result["dk"] = result["dk"] + dk.reshape(*k.shape[:2], group, *k.shape[2:]).sum(2)
    if case.sinks:
        share = np.exp(variant.sinks[:, None] - lse)
        result["dsinks"] = result["dsinks"] + (share * dlse).sum((0, 2))


def _packed(case: Case, whole: Mapping[str, Any], scale: float) -> Arrays:
    """Documents one by one."""
    from kernelseam.oracle import formulas, gradients

    assert case.documents is not None
    result: Arrays = {
        "out": np.zeros_like(whole["dout"]),
        "lse": np.full(whole["dlse"].shape, -np.inf),
        **{f"d{n}": np.zeros_like(whole[n]) for n in "qkv"},
        "dsinks": np.zeros(case.heads) if case.sinks else None,
    }
    variant = formulas.Variant(
        window=case.window or (None, None),
        softcap=case.softcap,
        alibi_slopes=whole["alibi"][None] if case.alibi else None,
        sinks=whole["sinks"] if case.sinks else None,
    )
    for i, (a, b) in enumerate(zip(case.documents, case.documents[1:], strict=False)):
        if case.mods:
            variant = replace(variant, **{n: _of_entry(f, i) for n, f in MODS.items()})
        q, k, v, dout = (whole[n][:, :, a:b] for n in ("q", "k", "v", "dout"))
        made = formulas.attention(q, k, v, case.causal, scale, variant=variant)
        found = gradients.attention_bwd(q, k, v, dout, case.causal, scale, variant)
        result["out"][:, :, a:b], result["lse"][:, :, a:b] = made.out, made.lse
        for n in "qkv":
            result[f"d{n}"][:, :, a:b] = found[f"d{n}"].value
        if case.sinks:
            result["dsinks"] += found["dsinks"].value
    return result


def _rounded(x: Any, dtype: str) -> Any:
    import ml_dtypes

    kind: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return x.astype(kind).astype(np.float64)


def expected_by_torch(case: Case) -> Arrays:
    """The same by torch's operations and autograd in float64, which is quick where rows are many.
    Without documents' sinks."""
    import torch

    whole = operands(case)
    if case.dtype != "float64":
        whole = {n: _rounded(x, case.dtype) if n in "qkvdout" else x for n, x in whole.items()}
    q, k, v = (torch.from_numpy(whole[n]).double().requires_grad_() for n in "qkv")
    rows_k = k.shape[2]
    mask = torch.ones(q.shape[0], 1, case.rows, rows_k, dtype=torch.bool)
    if case.kv_lengths is not None:
        mask &= torch.arange(rows_k) < torch.tensor(case.kv_lengths)[:, None, None, None]
    if case.documents is not None:
        bounds = torch.tensor(case.documents)
        which = torch.searchsorted(bounds, torch.arange(case.rows), right=True)
        inside = (which > 0) & (which < len(bounds))
        mask &= (which[:, None] == which) & inside
    sinks = torch.from_numpy(whole["sinks"]).double().requires_grad_()
    out, lse = attention_formula.attention(
        q,
        k,
        v,
        causal=case.causal,
        window=case.window,
        prefix_lengths=case.prefix,
        softcap=case.softcap,
        alibi_slopes=whole["alibi"] if case.alibi else None,
        mask=mask,
        sinks=sinks if case.sinks else None,
    )
    loss = (out * torch.from_numpy(whole["dout"])).sum()
    if case.lse:
        loss = loss + (lse * torch.from_numpy(whole["dlse"])).sum()
    loss.backward()
    found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    result: Arrays = {n: a.detach().numpy() for n, a in found.items() if a is not None}
    result["dsinks"] = sinks.grad.numpy() if case.sinks and sinks.grad is not None else None
    return result


def worst(case: Case, shards: list[Arrays], oracle: Any = None) -> dict[str, float]:
    """The largest error of each result over its largest magnitude; that of the LSE as it is.
    ``oracle``: what is expected of a case."""
    from gloo_ranks import gathered

    want, found = (oracle or expected)(case), {}
    for name in ("out", "lse", "dq", "dk", "dv", "dsinks"):
        if want[name] is None:
            assert all(x[name] is None for x in shards)
            continue
        if name == "dsinks":
            have = sum(x[name] for x in shards)
        else:
            have = gathered([x[name] for x in shards], 2, case.order)
        assert have.shape == want[name].shape, name
        nowhere = np.isneginf(want[name])
        assert np.array_equal(nowhere, np.isneginf(have)), name
        off = np.abs(np.where(nowhere, 0, have) - np.where(nowhere, 0, want[name]))
        size = 1.0 if name == "lse" else np.abs(want[name]).max(initial=1e-300)
        found[name] = float(np.nan_to_num(off, nan=np.inf).max(initial=0) / size)
    return found


def _small(rows: int = 8) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    return {n: torch.randn(1, 2, rows, 4, dtype=torch.float64) for n in "qkv"}


def misfit(group: Any, change: str) -> None:
    """A call that no rank may make."""
    import torch
    from kernelseam import distributed

    x: dict[str, Any] = _small(3 if change == "odd" else 8)
    given: dict[str, Any] = {"group": group, "method": "ring", "causal": True}
    if change == "shard":
        distributed.shard(torch.zeros(1, 1, 10), dim=2, group=group, causal=True)
    elif change == "unshard":
        distributed.unshard(torch.zeros(1, 1, 3), dim=-1, group=group, causal=True)
    elif change in ("bias", "mask"):
        given[change] = torch.zeros(8, 24)
    elif change == "lengths":
        given["kv_lengths"] = torch.tensor([3], dtype=torch.int32)
    elif change == "method":
        given["method"] = "rings"
    elif change == "order":
        given["order"] = "zigzag"
    elif change == "ulysses":
        given["method"] = "ulysses"
    elif change == "group":
        given["group"] = "WORLD"
    elif change == "tensor":
        x["q"] = x["q"].numpy()
    elif change == "documents":
        q, k, v = (a[0].transpose(0, 1) for a in x.values())
        distributed.attention_varlen(q, k, v, [0, 30], group=group)
    distributed.attention(**x, **given)


def sharded(group: Any) -> bool:
    """Shards put together are the whole, and so are gradients."""
    import torch
    import torch.distributed as dist
    from kernelseam import distributed

    n = dist.get_world_size(group)
    for causal in (False, True):
        for dim in (0, -2, 2):
            x = torch.arange(12.0 * 12 * 12).view(12, 12, 12).requires_grad_()
            mine = distributed.shard(x, dim=dim, group=group, causal=causal)
            whole = distributed.unshard(mine, dim=dim, group=group, causal=causal)
            assert torch.equal(whole, x)
            rank = dist.get_rank(group)
            (whole * (rank + 1)).sum().backward()
            assert mine.shape[dim] == 12 // n
            part = torch.full_like(mine, n * (n + 1) / 2).detach()
            places = distributed.shard(torch.arange(12), dim=0, group=group, causal=causal)
            want = torch.zeros_like(x.detach()).index_copy_(dim, places, part)
            assert x.grad is not None and torch.equal(x.grad, want)
            chunks = [rank * 2, rank * 2 + 1, 10 - rank * 2, 11 - rank * 2]
            if n == 3 and causal:
                assert places.tolist() == chunks
    return True


def explained(group: Any) -> tuple[str, str, str]:
    import torch
    from kernelseam import distributed

    machine = distributed.Machine(6e14)

    def made(rows: int, heads: int, kv_heads: int) -> Any:
        q = torch.empty(1, heads, rows, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(1, kv_heads, rows, 128, dtype=torch.bfloat16, device="meta")
        return distributed.explain(q, k, k, group=group, causal=True, machine=machine)

    long = made(65536, 12, 3)
    return made(256, 16, 1).best.method, long.best.method, str(long)


def counted(group: Any) -> tuple[int, float]:
    from kernelseam import distributed

    with distributed.measured() as found:
        distributed.attention(**_small(), group=group, method="ring")
    return found.sent, found.waited


def lost(group: Any, how: str) -> None:
    """A rank that another waits for in vain."""
    import os
    import time

    if how == "killed":
        time.sleep(0.3)
        os._exit(9)
    time.sleep(8)


def alone(group: Any, method: str) -> tuple[str, str, list[str]]:
    """What the rank meets whose neighbour is lost: (error, its text, what was logged)."""
    import logging

    from kernelseam import distributed

    logged: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logger = logging.getLogger("kernelseam")
    logger.addHandler(Keep(logging.ERROR))
    try:
        distributed.attention(**_small(), group=group, method=method)
    except Exception as error:
        return type(error).__name__, str(error), logged
    return "nothing", "", logged


@dataclass(frozen=True)
class Decoding:
    """Pages on several ranks."""

    lengths: tuple[int, ...] = (29, 0, 3, 64)
    rows: int = 1
    page_size: int = 4
    causal: bool = True
    sinks: bool = False
    softcap: float | None = None
    kv_layout: str = "nhd"
    dtype: str = "float64"


def _tokens(case: Decoding) -> Arrays:
    rng = np.random.default_rng(3)
    batch, longest = len(case.lengths), max(case.lengths, default=0)
    return {
        "q": rng.standard_normal((batch, case.rows, 4, 8)),
        "k": rng.standard_normal((batch, longest, 2, 8)),
        "v": rng.standard_normal((batch, longest, 2, 6)),
        "sinks": rng.standard_normal(4).astype(np.float32),
    }


def decoded(group: Any, case: Decoding) -> Arrays:
    import torch
    import torch.distributed as dist
    from gloo_ranks import device_of, host
    from kernelseam import distributed

    device = device_of(group)
    rank, n, size = dist.get_rank(group), dist.get_world_size(group), case.page_size
    whole = _tokens(case)
    kind = getattr(torch, case.dtype)
    q, k, v = (torch.from_numpy(whole[x]).to(kind) for x in "qkv")
    pages = -(-max(case.lengths, default=0) // size)
    width = max(1, -(-pages // n))
    table = torch.zeros(len(case.lengths), width, dtype=torch.int32)
    order = torch.randperm(len(case.lengths) * width, generator=torch.Generator().manual_seed(rank))
    k_pages = torch.full((len(order), size, 2, 8), torch.nan, dtype=kind)
    v_pages = torch.full((len(order), size, 2, 6), torch.nan, dtype=kind)
    mine = [0] * len(case.lengths)
    for b, length in enumerate(case.lengths):
        for p in range(rank, pages, n):
            at = int(order[b * width + p // n])
            table[b, p // n] = at
            rows = slice(p * size, min(p * size + size, length))
            count = max(0, rows.stop - rows.start)
            mine[b] += count
            if count:
                k_pages[at, :count], v_pages[at, :count] = k[b, rows], v[b, rows]
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    assert distributed.shard_lengths(lengths, page_size=size, group=group).tolist() == mine
    if case.kv_layout == "hnd":
        k_pages, v_pages = (x.transpose(1, 2).contiguous() for x in (k_pages, v_pages))
    out, lse = distributed.attention_paged(
        *(x.to(device) for x in (q, k_pages, v_pages, table, lengths)),
        group=group,
        causal=case.causal,
        softcap=case.softcap,
        sinks=torch.from_numpy(whole["sinks"]).to(device) if case.sinks else None,
        kv_layout=case.kv_layout,
        return_lse=True,
        check=True,
    )
    return {"out": host(out), "lse": host(lse), "dtype": str(out.dtype)}


def expected_decoding(case: Decoding) -> Arrays:
    from kernelseam.oracle import formulas

    whole = _tokens(case)
    if case.dtype != "float64":
        whole = {n: _rounded(x, case.dtype) if n in "qkv" else x for n, x in whole.items()}
    q, k, v = (whole[x].swapaxes(1, 2) for x in "qkv")
    variant = formulas.Variant(
        softcap=case.softcap,
        sinks=whole["sinks"] if case.sinks else None,
        kv_lengths=case.lengths,
    )
    made = formulas.attention(q, k, v, case.causal, 8**-0.5, variant=variant)
    return {"out": made.out.swapaxes(1, 2), "lse": made.lse}


def layer(
    group: Any, rows: str, order: str, chunks: int, dtype: str = "float64", bias: bool = True
) -> dict[str, float]:
    """Projections of heads over ranks around an attention, beside the whole by torch alone: the
    largest error of each result over its largest magnitude."""
    import torch
    import torch.distributed as dist
    from gloo_ranks import device_of
    from kernelseam import distributed
    from kernelseam.interop.torch import attention as local_attention

    n, rank = dist.get_world_size(group), dist.get_rank(group)
    heads, kv_heads, dim, batch, length, hidden = 2 * n, n, 4, 2, 4 * n * 3, 10
    torch.manual_seed(5)
    kind, device = getattr(torch, dtype), device_of(group)

    def made(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float64).to(device, kind).requires_grad_()

    whole = {
        "x": made(batch, length, hidden),
        "w": made((heads + 2 * kv_heads) * dim, hidden),
        "b": made((heads + 2 * kv_heads) * dim),
        "wo": made(hidden, heads * dim),
        "bo": made(hidden),
    }
    dy = made(batch, length, hidden).detach()
    # The whole, by torch.
    wide = {name: a.detach().double().requires_grad_() for name, a in whole.items()}
    qkv = wide["x"] @ wide["w"].T + (wide["b"] if bias else 0)
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    q, k, v = (a.unflatten(-1, (-1, dim)).transpose(1, 2) for a in (q, k, v))
    k, v = (a.repeat_interleave(2, 1) for a in (k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y.transpose(1, 2).flatten(2) @ wide["wo"].T + wide["x"]
    y = y + (wide["bo"] if bias else 0)
    y.backward(dy.double())
    # This rank's.
    balanced, sharded = order == "balanced", rows == "sharded"

    def mine(a: Any) -> Any:
        return distributed.shard(a, dim=1, group=group, causal=balanced) if sharded else a

    x = mine(whole["x"].detach()).clone().requires_grad_()
    cut = {"group": group, "num_heads": heads, "num_kv_heads": kv_heads}
    options: dict[str, Any] = {
        "group": group, "rows": rows, "order": order, "chunks": chunks, "check": True,
    }  # fmt: skip
    q, k, v = distributed.qkv_projection(
        x,
        distributed.shard_qkv(whole["w"], **cut),
        distributed.shard_qkv(whole["b"], **cut) if bias else None,
        num_heads=heads,
        num_kv_heads=kv_heads,
        **options,
    )
    out = distributed.output_projection(
        local_attention(q, k, v, causal=True),
        distributed.shard(whole["wo"], dim=1, group=group),
        whole["bo"] if bias else None,
        x,
        **options,
    )
    out.backward(mine(dy))
    pairs = {"out": (out, mine(y)), "dx": (x.grad, mine(wide["x"].grad))}
    for name in ("w", "wo", "b", "bo")[: 4 if bias else 2]:
        grad = whole[name].grad.double()
        if name != "bo" or sharded:  # the other ranks' heads, or rows
            dist.all_reduce(grad, group=group)
        pairs[f"d{name}"] = (grad, wide[name].grad)
    assert rank < n and out.dtype == kind
    return {
        name: float((a.double() - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()
    }


def projections_misfit(group: Any, change: str) -> None:
    import torch
    from kernelseam import distributed

    x, w = torch.zeros(1, 6, 8), torch.zeros(12, 8)
    heads = {"num_heads": 2, "num_kv_heads": 2}
    given: dict[str, Any] = {"group": group}
    if change == "heads":
        heads["num_kv_heads"] = 1
    elif change == "weight":
        w = torch.zeros(12, 7)
    elif change == "rows":
        given["rows"] = "all"
    elif change == "odd":
        x, given["order"] = x[:, :3], "balanced"
    elif change == "chunks":
        given["chunks"] = 0
    elif change == "cut":
        distributed.shard_qkv(torch.zeros(13, 8), **heads, group=group)
    elif change == "gradients":
        given["bwd_implementation"] = "nobody"
    elif change in ("residual", "residual of integers", "bias of integers", "output gradients"):
        y, bias, residual = torch.zeros(1, 1, 6, 8), None, torch.zeros(1, 6, 8)
        if change != "residual":
            residual = residual[:, :3]
        if change == "residual of integers":
            residual = residual.to(torch.int8)
        elif change == "bias of integers":
            bias = torch.zeros(8, dtype=torch.int8)
        elif change == "output gradients":
            given["bwd_implementation"] = "nobody"
        distributed.output_projection(y, torch.zeros(8, 8), bias, residual, **given)
    elif change == "lengths":
        distributed.output_projection(torch.zeros(1, 1, 5, 8), torch.zeros(8, 8), **given)
    distributed.qkv_projection(x, w, num_heads=2, num_kv_heads=heads["num_kv_heads"], **given)


def rounded_once(group: Any, rows: str) -> tuple[float, float]:
    """(largest error of an output projection in bfloat16 beyond its one rounding, of sums that were
    rounded before they were joined)."""
    import torch
    import torch.distributed as dist
    from kernelseam import distributed

    n, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(2)
    x = torch.randn(1, n, 6 * n, 16).bfloat16()
    w, residual = torch.randn(24, n * 16).bfloat16(), torch.randn(1, 6 * n, 24).bfloat16()
    mine = residual
    if rows == "sharded":
        mine = distributed.shard(residual, dim=1, group=group)
    out = distributed.output_projection(
        x[:, rank : rank + 1],
        distributed.shard(w, dim=1, group=group),
        residual=mine,
        group=group,
        rows=rows,
    )
    by_head = [x[:, h].double() @ w[:, 16 * h : 16 * h + 16].double().T for h in range(n)]
    exact = torch.stack(by_head).sum(0) + residual.double()
    rounded = torch.stack([a.bfloat16().double() for a in by_head])
    early = (rounded.sum(0) + residual.double()).bfloat16()
    if rows == "sharded":
        exact, early = (distributed.shard(a, dim=1, group=group) for a in (exact, early))

    def beyond(a: Any) -> float:
        return float(((a.double() - exact).abs() - exact.abs() * 2.0**-8).max())

    return beyond(out), beyond(early)
