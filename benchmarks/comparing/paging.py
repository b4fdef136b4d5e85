"""Keys and values in pages, of prefills, chunks, few queries and batches of all of them, beside
FlashAttention-3, FlashInfer and our kernel over the same rows packed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import kernelseam as ks
import torch
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.oracle import formulas

from benchmarks.comparing import flashinfer_peer
from benchmarks.comparing.attention import flash_attention_3, visible_pairs
from benchmarks.comparing.results import Record
from benchmarks.comparing.rows import Judged, Part, Prepared, Session, compared, host, judged

JUDGED = 16
"""Queries at the end of a sequence that are held against float64."""


@dataclass(frozen=True)
class PagedRow:
    """``parts``: (sequences, queries, keys of each), queries packed and causal; keys 0: as many as
    the sequence's number times 32, less 31. Pages lie in any order. ``latent``: the columns of K
    that are V, 0 where V is its own."""

    parts: tuple[tuple[int, int, int], ...]
    heads: int
    kv_heads: int
    D: int
    page: int
    window: tuple[int, int] | None = None
    dtype: str = "bfloat16"
    suite: str = "attention-paged"
    least: float = 1.0
    latent: int = 0

    @property
    def value_dim(self) -> int:
        return self.latent or self.D

    @property
    def name(self) -> str:
        parts = " + ".join(f"{n} × {q} of {k or '1, 33, …'}" for n, q, k in self.parts)
        window = f" window {self.window[0]},{self.window[1]}" if self.window else ""
        dims = f"D{self.D}" + f"/{self.latent} latent" * bool(self.latent)
        return f"{parts} H{self.heads}/{self.kv_heads} {dims} page {self.page}{window}"

    @property
    def queries(self) -> list[int]:
        return [q for n, q, _ in self.parts for _ in range(n)]

    @property
    def lengths(self) -> list[int]:
        return [k or 1 + 32 * i for n, _, k in self.parts for i in range(n)]

    @property
    def pages(self) -> list[int]:
        """Of each sequence."""
        return [-(-n // self.page) for n in self.lengths]

    @property
    def operations(self) -> float:
        each = zip(self.queries, self.lengths, strict=True)
        pairs = sum(visible_pairs(q, k, True, self.window) for q, k in each)
        return 2.0 * pairs * self.heads * (self.D + self.value_dim)

    @property
    def bytes(self) -> float:
        """Of q, k, v and the result, once each; where V is a part of K, of K."""
        queries = sum(self.queries) * self.heads * (self.D + self.value_dim)
        keys = self.D if self.latent else 2 * self.D
        return 2.0 * (queries + sum(self.lengths) * self.kv_heads * keys)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        cache = (sum(self.pages), self.page, self.kv_heads, self.D)
        apart = {} if self.latent else {"v": cache}
        return {"q": (*self.result[:2], self.D), "k": cache, **apart}

    @property
    def result(self) -> tuple[int, ...]:
        """Its shape."""
        return (sum(self.queries), self.heads, self.value_dim)

    def descriptor(self, arrays: Mapping[str, Any], out: Any) -> Descriptor:
        options = {n: x for n, x in arrays.items() if n not in ("q", "k", "v")}
        return ks.Attention.from_arrays(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            out,
            latent=bool(self.latent),
            layout="bshd",
            causal=True,
            window=self.window,
            max_seqlen_q=max(self.queries),
            max_seqlen_k=max(self.lengths),
            **options,
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        arrays: dict[str, Any] = {
            n: session.phantom(shape, self.dtype) for n, shape in self.shapes().items()
        }
        batch = len(self.queries)
        arrays["cu_seqlens_q"] = session.phantom((batch + 1,), "int32")
        arrays["block_table"] = session.phantom((batch, max(self.pages)), "int32")
        arrays["kv_lengths"] = session.phantom((batch,), "int32")
        if self.latent:
            k = arrays["k"]
            arrays["v"] = replace(k, shape=(*k.shape[:-1], self.latent))
        yield self.descriptor(arrays, session.phantom(self.result, self.dtype))

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays: dict[str, Any] = {
            n: session.random(shape, self.dtype) for n, shape in self.shapes().items()
        }

        if self.latent:
            arrays["v"] = arrays["k"][..., : self.latent]

        def counts(numbers: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(numbers), dtype=torch.int32, device=session.device)

        order = torch.randperm(sum(self.pages), device=session.device).to(torch.int32)
        table = torch.zeros(
            len(self.pages), max(self.pages), dtype=torch.int32, device=session.device
        )
        for entry, own in zip(table, order.split(self.pages), strict=True):
            entry[: len(own)] = own
        arrays["block_table"], arrays["kv_lengths"] = table, counts(self.lengths)
        arrays["cu_seqlens_q"] = counts(itertools.accumulate(self.queries, initial=0))
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))

        def result() -> torch.Tensor:
            return session.poisoned(self.result, self.dtype)

        prepared.ours(session, lambda out: self.descriptor(arrays, out), result)
        if not session.peers:
            return prepared
        if self.latent:
            prepared.refused["FA3"] = "it has no head dims 576/512"
            self._flashinfer(prepared, arrays)
            return prepared
        packed = self.packed(arrays, counts(itertools.accumulate(self.lengths, initial=0)))
        called = "packed rows"
        prepared.add(
            session, lambda out: self.descriptor(packed, out), result, lambda x: x, called, called
        )
        self._flashinfer(prepared, arrays)
        self._flash_attention_3(prepared, arrays, result())
        return prepared

    def _flashinfer(self, prepared: Prepared, arrays: Mapping[str, Any]) -> None:
        left = -1 if self.window is None else self.window[0]
        q, table, pages = arrays["q"], arrays["block_table"], (arrays["k"], arrays["v"])
        counts = self.queries, self.lengths
        if self.latent:
            plan = partial(flashinfer_peer.latent, q, pages[0], table, *counts, self.latent)
        else:
            plan = partial(flashinfer_peer.prefill, q, pages, table, *counts, left)
        flashinfer_peer.add(prepared, "FlashInfer", plan, lambda x: x)

    def _flash_attention_3(
        self, prepared: Prepared, arrays: Mapping[str, Any], out: torch.Tensor
    ) -> None:
        module = flash_attention_3()
        if isinstance(module, str):
            prepared.refused["FA3"] = module
            return
        options: dict[str, Any] = {
            "cu_seqlens_q": arrays["cu_seqlens_q"],
            "seqused_k": arrays["kv_lengths"],
            "page_table": arrays["block_table"],
            "max_seqlen_q": max(self.queries),
            "causal": True,
            "num_splits": 0,  # by a heuristic of its own
            "out": out,
        }
        if self.window is not None:
            options["window"] = self.window
        q, k, v = (arrays[n] for n in "qkv")
        prepared.peer("FA3", lambda: module.fa3_fwd(q, k, v, **options), lambda x: x[0])

    def packed(self, arrays: Mapping[str, Any], starts: torch.Tensor) -> dict[str, Any]:
        """The same rows, one sequence after the other."""

        def rows(cache: torch.Tensor) -> torch.Tensor:
            each = zip(arrays["block_table"].long(), self.pages, self.lengths, strict=True)
            return torch.cat([cache[own[:n]].flatten(0, 1)[:keys] for own, n, keys in each])

        return {
            "q": arrays["q"],
            "k": rows(arrays["k"]),
            "v": rows(arrays["v"]),
            "cu_seqlens_q": arrays["cu_seqlens_q"],
            "cu_seqlens_k": starts,
        }


class Judge:
    """The last queries of the first sequence's first head and of the last one's last, in
    float64."""

    def __init__(self, row: PagedRow, arrays: Mapping[str, Any]) -> None:
        self._row, self._parts = row, []
        ends = list(itertools.accumulate(row.queries))
        for b, h in sorted({(0, 0), (len(ends) - 1, row.heads - 1)}):
            g = h * row.kv_heads // row.heads
            own = arrays["block_table"][b, : row.pages[b]].long()
            k, v = (
                host(arrays[n][own, :, g].flatten(0, 1)[: row.lengths[b]])[None, None] for n in "kv"
            )
            place = slice(ends[b] - min(row.queries[b], JUDGED), ends[b])
            q = host(arrays["q"][place, h])[None, None]
            variant = formulas.Variant(window=row.window or (None, None))
            want = formulas.attention(q, k, v, True, row.D**-0.5, None, variant)
            self._parts.append(Part((place, h), row.lengths[b], want))

    def __call__(self, result: Any) -> Judged:
        return judged(result, self._parts, self._row.D, self._row.dtype)


def paged_rows() -> list[PagedRow]:
    """Prefills of every page size, chunks, other head dims, a window; mixed batches; few
    queries."""
    llama = (32, 8, 128)
    prefill = ((8, 2048, 2048),)
    return [
        *(PagedRow(prefill, *llama, page) for page in (16, 32, 48, 64, 128, 256)),
        *(PagedRow(prefill, *llama, page) for page in (8, 1)),
        PagedRow(((8, 512, 2048),), *llama, 1),
        PagedRow(((1, 2048, 16384),), *llama, 16),
        PagedRow(((1, 2048, 16384),), *llama, 64),
        PagedRow(((1, 512, 32768),), *llama, 16),
        PagedRow(prefill, 16, 16, 64, 16),
        PagedRow(((16, 1024, 1024),), 8, 1, 256, 16),
        PagedRow(((4, 4096, 4096),), *llama, 16, (1023, 0)),
        *(PagedRow(((1, 2048, 8192), (63, 1, 4096)), *llama, page) for page in (16, 64)),
        PagedRow(((4, 512, 2048), (128, 1, 0)), *llama, 16),
        PagedRow(((2, 1024, 4096), (62, 5, 4096)), *llama, 16),
        PagedRow(((1, 512, 2048), (7, 1, 2048)), *llama, 16),
        *(PagedRow(((64, n, 4096),), *llama, 16) for n in (2, 5, 16)),
        PagedRow(((8, 5, 4096),), *llama, 16),
    ]
