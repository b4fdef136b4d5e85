"""FlashInfer as a peer: its wrappers planned over our pages. What it plans on the host, from
lengths that it reads there, is not in any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch

from benchmarks.comparing.rows import Prepared

_WORKSPACE_BYTES = 128 << 20
"""As its documentation has it; more where a batch's parts need more."""

Run = Callable[[], Any]


@cache
def flashinfer() -> Any:
    """Raises what its import raises, which may be anything."""
    return import_module("flashinfer")


def add(
    prepared: Prepared, name: str, plan: Callable[[], Run], result: Callable[[Any], Any]
) -> None:
    """A peer that ``plan`` makes, or its refusal: it compiles at first use, which may fail in many
    ways."""
    if not prepared.peers:
        return
    try:
        run = plan()
    except Exception as e:
        prepared.refused[name] = f"{type(e).__name__}: {e}".strip().splitlines()[0][:200]
    else:
        prepared.peer(name, run, result)


def _workspace(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=like.device)


def _indices(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=like.device)


def _pages_of(lengths: Sequence[int], page: int) -> tuple[list[int], list[int], list[int]]:
    """Pages of each sequence, where each one's begin, and the rows of its last."""
    counts = [-(-n // page) for n in lengths]
    return counts, [0, *accumulate(counts)], [(n - 1) % page + 1 for n in lengths]


def _own_pages(table: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return torch.cat([row[:n] for row, n in zip(table, counts, strict=True)])


def _planned(
    wrapper: Any,
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    lengths: Sequence[int],
    *rows: torch.Tensor,
    **options: Any,
) -> Run:
    """A wrapper of one level, planned. ``rows``: where each sequence's queries begin, unless each
    has one."""
    k = pages[0]
    counts, begins, last = _pages_of(lengths, k.shape[1])
    places = *rows, _indices(begins, q), _own_pages(table, counts), _indices(last, q)
    sizes = q.shape[1], k.shape[2], q.shape[2], k.shape[1]
    wrapper.plan(*places, *sizes, q_data_type=q.dtype, kv_data_type=k.dtype, **options)
    return lambda: wrapper.run(q, pages)


def decode(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    lengths: Sequence[int],
    tensor_cores: bool,
) -> Run:
    """One query a sequence, ``q``: [batch, heads, D]; pages [pages, page, heads, D]."""
    wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        _workspace(q), "NHD", use_tensor_cores=tensor_cores
    )
    return _planned(wrapper, q, pages, table, lengths)


def prefill(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    queries: Sequence[int],
    lengths: Sequence[int],
    window_left: int = -1,
) -> Run:
    """Causal, packed queries of any counts, ``q``: [rows, heads, D]."""
    wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "NHD")
    begins = _indices([0, *accumulate(queries)], q)
    options = {"causal": True, "window_left": window_left}
    return _planned(wrapper, q, pages, table, lengths, begins, **options)


def latent(
    q: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    queries: Sequence[int],
    lengths: Sequence[int],
    rank: int,
) -> Run:
    """Causal, packed queries of any counts, ``q``: [rows, heads, D]; pages [pages, page, 1, D],
    whose first ``rank`` columns are the values."""
    wrapper = flashinfer().mla.BatchMLAPagedAttentionWrapper(_workspace(q))
    counts, begins, _ = _pages_of(lengths, pages.shape[1])
    heads, dim = q.shape[1:]
    wrapper.plan(
        *(_indices([0, *accumulate(queries)], q), _indices(begins, q), _own_pages(table, counts)),
        *(_indices(lengths, q), heads, rank, dim - rank, pages.shape[1]),
        *(max(queries) > 1, dim**-0.5, q.dtype, pages.dtype),
    )
    parts = *q.split([rank, dim - rank], -1), *pages[:, :, 0].split([rank, dim - rank], -1)
    return lambda: wrapper.run(*parts)


def cascade(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    shared: int,
    lengths: Sequence[int],
    groups: int,
) -> Run:
    """Two levels: the first ``shared`` pages of each of ``groups`` runs of equally many sequences,
    then each sequence's own. ``q``: [batch, queries, heads, D]."""
    module = flashinfer()
    k, (batch, queries) = pages[0], q.shape[:2]
    page, each = k.shape[1], batch // groups
    counts, begins, last = _pages_of([n - shared * page for n in lengths], page)
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, _workspace(q), "NHD")
    wrapper.plan(
        [
            _indices([each * queries * i for i in range(groups + 1)], q),
            _indices([queries * i for i in range(batch + 1)], q),
        ],
        [_indices([shared * i for i in range(groups + 1)], q), _indices(begins, q)],
        [table[::each, :shared].flatten(), _own_pages(table[:, shared:], counts)],
        [_indices([page] * groups, q), _indices(last, q)],
        q.shape[2],
        k.shape[2],
        q.shape[3],
        page,
        causal=queries > 1,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    rows = q.flatten(0, 1)
    return lambda: wrapper.run(rows, pages).reshape(q.shape)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
) -> Run:
    """Packed rows, the last of each sequence of ``lengths``, into its pages. Where each row goes is
    computed before, by a launch of FlashInfer's own that it does once for all layers."""
    module = flashinfer()
    counts, begins, last = _pages_of(lengths.tolist(), pages[0].shape[1])
    entries, positions = module.get_batch_indices_positions(starts, lengths, len(k))
    own, first, rest = _own_pages(table, counts), _indices(begins, k), _indices(last, k)
    return lambda: module.append_paged_kv_cache(
        k, v, entries, positions, pages, own, first, rest, "NHD"
    )
