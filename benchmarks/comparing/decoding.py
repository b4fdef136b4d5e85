"""Decoding with a paged cache, one query an entry, beside FlashAttention-3 and FlashInfer, a copy
of K and V, and a kernel that only reads them; of latent attention, whose V is the first columns of
K, beside those of K alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import kernelseam as ks
import ml_dtypes
import numpy as np
import torch
from kernelseam.descriptors.attention.problem import scaled_row
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.oracle import formulas
from kernelseam.oracle.scaled_rows import scaled_rows

from benchmarks.comparing import flashinfer_peer
from benchmarks.comparing.attention import flash_attention_3
from benchmarks.comparing.reading import reading
from benchmarks.comparing.results import COPY, Record
from benchmarks.comparing.rows import (
    Contestant,
    Judged,
    Part,
    Prepared,
    Session,
    compared,
    host,
    judged,
)

E4M3 = ml_dtypes.float8_e4m3fn
LATENT = (
    ((128, 8192), 16),
    ((64, 4096), 16),
    ((64, 4096), 64),
    ((64, 4096), 128),
    ((128, 8192), 128),
    ((16, 2048), 128),
    ((1, 32768), 128),
)
"""Of latent attention: (batch, keys), heads."""


@dataclass(frozen=True)
class DecodeRow:
    """``keys`` of each entry, or where ``mixed`` 1 to so many, log-uniform; ``page``: rows of a
    page. Pages lie in any order. ``latent``: the columns of K that are V, 0 where V is its own."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    D: int
    page: int
    dtype: str = "bfloat16"
    suite: str = "decode"
    least: float = 1.0
    mixed: bool = False
    latent: int = 0
    scale_block: int = 0
    """Of latent rows of 8 bits, columns that share a scale in the row; 0: K is of ``dtype``."""

    @property
    def name(self) -> str:
        keys = f"1 to {self.keys}" if self.mixed else f"{self.keys}"
        dims = f"D{self.D}" + f"/{self.latent} latent" * bool(self.latent)
        dims += " scaled rows" * bool(self.scale_block)
        return f"B{self.batch} × {keys} H{self.heads}/{self.kv_heads} {dims} page {self.page}"

    @property
    def value_dim(self) -> int:
        return self.latent or self.D

    @property
    def lengths(self) -> list[int]:
        """Keys of each entry, the same in every run."""
        if not self.mixed:
            return [self.keys] * self.batch
        exponents = np.random.default_rng(5).uniform(0, np.log(self.keys), self.batch)
        return [int(x) for x in np.exp(exponents)]

    @property
    def operations(self) -> float:
        return 2.0 * sum(self.lengths) * self.heads * (self.D + self.value_dim)

    @property
    def bytes(self) -> float:
        """Of K and V, once each; where V is a part of K, of K."""
        if self.scale_block:
            return float(sum(self.lengths) * self.kv_heads * self.key_width)
        columns = self.D if self.latent else 2 * self.D
        return 2.0 * sum(self.lengths) * self.kv_heads * columns

    @property
    def key_width(self) -> int:
        """Elements of a row of K in memory."""
        return scaled_row(self.D, self.latent, self.scale_block) if self.scale_block else self.D

    @property
    def key_dtype(self) -> str:
        return "float8_e4m3fn" if self.scale_block else self.dtype

    @property
    def pages(self) -> list[int]:
        """Of each entry."""
        return [-(-n // self.page) for n in self.lengths]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        cache = (sum(self.pages), self.page, self.kv_heads, self.key_width)
        apart = {} if self.latent else {"v": cache}
        return {"q": (self.batch, 1, self.heads, self.D), "k": cache, **apart}

    @property
    def result(self) -> tuple[int, ...]:
        """Its shape."""
        return (self.batch, 1, self.heads, self.value_dim)

    def descriptor(self, arrays: Mapping[str, Any], out: Any) -> Descriptor:
        return ks.Attention.from_arrays(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            out,
            latent=bool(self.latent),
            row_scale_block=self.scale_block or None,
            layout="bshd",
            block_table=arrays["table"],
            kv_lengths=arrays["lengths"],
            max_seqlen_k=max(self.lengths),
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        arrays: dict[str, Any] = {
            n: session.phantom(shape, self.dtype if n == "q" else self.key_dtype)
            for n, shape in self.shapes().items()
        }
        arrays["table"] = session.phantom((self.batch, max(self.pages)), "int32")
        arrays["lengths"] = session.phantom((self.batch,), "int32")
        if self.latent:
            k = arrays["k"]
            arrays["v"] = replace(k, shape=(*k.shape[:-1], self.latent))
        yield self.descriptor(arrays, session.phantom(self.result, self.dtype))

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays: dict[str, Any] = {
            n: session.random(shape, self.dtype if n == "q" else self.key_dtype)
            for n, shape in self.shapes().items()
        }
        if self.scale_block:
            _put_scales(arrays["k"], self)
        if self.latent:
            arrays["v"] = arrays["k"][..., : self.latent]
        order = torch.randperm(sum(self.pages), device=session.device).to(torch.int32)
        table = torch.zeros(self.batch, max(self.pages), dtype=torch.int32, device=session.device)
        for entry, own in zip(table, order.split(self.pages), strict=True):
            entry[: len(own)] = own
        arrays["table"] = table
        arrays["lengths"] = torch.tensor(self.lengths, dtype=torch.int32, device=session.device)
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))
        shape = self.result
        prepared.ours(
            session,
            lambda out: self.descriptor(arrays, out),
            lambda: session.poisoned(shape, self.dtype),
        )
        module = "it has no head dims 576/512" if self.latent else flash_attention_3()
        if isinstance(module, str) or not hasattr(module, "fa3_decode"):
            prepared.refused["FA3"] = (
                module if isinstance(module, str) else "flash_attn_interface has no fa3_decode"
            )
        else:
            prepared.peer(
                "FA3",
                lambda: module.fa3_decode(
                    arrays["q"],
                    arrays["k"],
                    arrays["v"],
                    arrays["lengths"],
                    page_table=arrays["table"],
                    causal=False,
                ),
            )
        self._flashinfer(prepared, arrays)
        # as much is read as written
        k = arrays["k"].reshape(-1)[: int(self.bytes) // (2 * arrays["k"].element_size())]
        v = torch.empty_like(k)
        prepared.contestants.append(Contestant("copy", COPY, lambda: v.copy_(k)))
        if session.device != "cpu":
            apart = () if self.latent else (arrays["v"].reshape(-1),)
            memory = torch.cat([arrays["k"].reshape(-1), *apart])
            try:
                run = reading(memory[: int(self.bytes) // memory.element_size()])
            except Exception as e:  # no cupy, or of another vendor
                prepared.refused["read"] = f"{type(e).__name__}: {e}"[:200]
            else:
                prepared.contestants.append(Contestant("read", COPY, run))
        return prepared

    def _flashinfer(self, prepared: Prepared, arrays: Mapping[str, Any]) -> None:
        """Both of its ways."""
        q, pages, table = (
            arrays["q"][:, 0].contiguous(),
            (arrays["k"], arrays["v"]),
            arrays["table"],
        )
        if self.scale_block:
            prepared.refused["FlashInfer"] = "it has no rows that hold their scales"
            return
        if self.latent:
            ones = [1] * self.batch
            plan = partial(
                flashinfer_peer.latent, q, pages[0], table, ones, self.lengths, self.latent
            )
            flashinfer_peer.add(prepared, "FlashInfer", plan, lambda x: x[:, None])
            return
        for name, tensor_cores in (("FlashInfer", True), ("FlashInfer, plain units", False)):
            plan = partial(flashinfer_peer.decode, q, pages, table, self.lengths, tensor_cores)
            flashinfer_peer.add(prepared, name, plan, lambda x: x[:, None])


def _put_scales(rows: torch.Tensor, row: DecodeRow) -> None:
    """Scales of 1/2 to 2 and N(0, 1) in bfloat16 behind the numbers of rows of 8 bits."""
    behind, count = rows.view(torch.uint8)[..., row.latent :], 4 * row.latent // row.scale_block
    scales = 2 ** (2 * torch.rand(*rows.shape[:-1], count // 4, device=rows.device) - 1)
    others = torch.randn(*rows.shape[:-1], row.D - row.latent, device=rows.device)
    behind[..., :count] = scales.view(torch.uint8)
    behind[..., count:] = others.to(torch.bfloat16).view(torch.uint8)


class Judge:
    """The first head of the first entry and the last of the last, in float64."""

    def __init__(self, row: DecodeRow, arrays: Mapping[str, Any]) -> None:
        self._row, self._parts = row, []
        kind = torch.uint8 if row.scale_block else getattr(torch, row.dtype)
        for b, h in sorted({(0, 0), (row.batch - 1, row.heads - 1)}):
            g = h * row.kv_heads // row.heads
            pages = arrays["table"][b].long()
            k, v = (
                host(arrays[n].view(kind)[pages, :, g].flatten(0, 1)[: row.lengths[b]])[None, None]
                for n in "kv"
            )
            if row.scale_block:
                k, v = scaled_rows(k.view(E4M3), row.latent, row.scale_block)
            q = host(arrays["q"][b, :, h])[None, None]
            want = formulas.attention(q, k, v, False, row.D**-0.5)
            self._parts.append(Part((b, slice(None), h), row.keys, want))

    def __call__(self, result: Any) -> Judged:
        return judged(result, self._parts, self._row.D, self._row.dtype)


def decode_rows() -> list[DecodeRow]:
    return [
        DecodeRow(batch, keys, 32, 8, 128, page)
        for batch, keys, page in ((64, 8192, 16), (64, 8192, 256), (16, 2048, 16), (1, 32768, 16))
    ] + [
        DecodeRow(64, 32768, 32, 8, 128, 16, mixed=True),
        *(DecodeRow(*entries, heads, 1, 576, 64, latent=512) for entries, heads in LATENT),
        *(
            DecodeRow(*entries, heads, 1, 576, 64, latent=512, scale_block=128)
            for entries, heads in LATENT
        ),
        DecodeRow(64, 4096, 128, 1, 576, 1, latent=512),
        DecodeRow(64, 32768, 128, 1, 576, 64, mixed=True, latent=512),
    ]
