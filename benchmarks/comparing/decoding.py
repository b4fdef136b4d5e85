"""Decoding with a paged cache, one query an entry, beside FlashAttention-3 and beside a copy of K
and V."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import kernelseam as ks
import numpy as np
import torch
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dtypes import DType
from kernelseam.oracle import check, formulas

from benchmarks.comparing.attention import flash_attention_3
from benchmarks.comparing.results import COPY, Record
from benchmarks.comparing.rows import (
    Contestant,
    Judged,
    Prepared,
    Session,
    compared,
    host,
    relative,
)


@dataclass(frozen=True)
class DecodeRow:
    """``keys`` of each entry; ``page``: rows of a page. Pages lie in any order."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    D: int
    page: int
    dtype: str = "bfloat16"
    suite: str = "decode"
    least: float = 1.0

    @property
    def name(self) -> str:
        return (
            f"B{self.batch} × {self.keys} H{self.heads}/{self.kv_heads} D{self.D} page {self.page}"
        )

    @property
    def operations(self) -> float:
        return 4.0 * self.batch * self.heads * self.keys * self.D

    @property
    def bytes(self) -> float:
        """Of K and V, once each."""
        return 2.0 * 2 * self.batch * self.keys * self.kv_heads * self.D

    @property
    def pages(self) -> int:
        """Of an entry."""
        return -(-self.keys // self.page)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        cache = (self.batch * self.pages, self.page, self.kv_heads, self.D)
        return {"q": (self.batch, 1, self.heads, self.D), "k": cache, "v": cache}

    def descriptor(self, arrays: Mapping[str, Any], out: Any) -> Descriptor:
        return ks.Attention.from_arrays(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            out,
            layout="bshd",
            block_table=arrays["table"],
            kv_lengths=arrays["lengths"],
            max_seqlen_k=self.keys,
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        arrays: dict[str, Any] = {
            n: session.phantom(shape, self.dtype) for n, shape in self.shapes().items()
        }
        arrays["table"] = session.phantom((self.batch, self.pages), "int32")
        arrays["lengths"] = session.phantom((self.batch,), "int32")
        yield self.descriptor(arrays, session.phantom(self.shapes()["q"], self.dtype))

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays: dict[str, Any] = {
            n: session.random(shape, self.dtype) for n, shape in self.shapes().items()
        }
        order = torch.randperm(self.batch * self.pages, device=session.device)
        arrays["table"] = order.to(torch.int32).reshape(self.batch, self.pages)
        arrays["lengths"] = torch.full(
            (self.batch,), self.keys, dtype=torch.int32, device=session.device
        )
        found = Prepared(dtype=self.dtype, judge=Judge(self, arrays))
        shape = self.shapes()["q"]
        found.ours(
            session,
            lambda out: self.descriptor(arrays, out),
            lambda: session.poisoned(shape, self.dtype),
        )
        module = flash_attention_3()
        if isinstance(module, str) or not hasattr(module, "fa3_decode"):
            found.refused["FA3"] = (
                module if isinstance(module, str) else "flash_attn_interface has no fa3_decode"
            )
        else:
            found.peer(
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
        k, v = arrays["k"], torch.empty_like(arrays["k"])
        # as much is read as written
        found.contestants.append(Contestant("copy", COPY, lambda: v.copy_(k)))
        return found


class Judge:
    """The first head of the first entry and the last of the last, in float64."""

    def __init__(self, row: DecodeRow, arrays: Mapping[str, Any]) -> None:
        self._row, self._parts = row, []
        for b, h in sorted({(0, 0), (row.batch - 1, row.heads - 1)}):
            g = h * row.kv_heads // row.heads
            pages = arrays["table"][b].long()
            k, v = (
                host(arrays[n][pages, :, g].reshape(-1, row.D)[: row.keys])[None, None]
                for n in "kv"
            )
            q = host(arrays["q"][b, :, h])[None, None]
            self._parts.append((b, h, formulas.attention(q, k, v, False, row.D**-0.5)))

    def __call__(self, result: Any) -> Judged:
        got, wanted, worst, message = [], [], 0.0, ""
        for b, h, want in self._parts:
            out = host(result[b, :, h])[None, None]
            verdict = check.attention_verdict(
                want,
                self._row.keys,
                self._row.D,
                DType.of(self._row.dtype),
                out,
                None,
                out.shape[:3],
                None,
            )
            got.append(out.reshape(-1))
            wanted.append(want.out.reshape(-1))
            if verdict.worst >= worst:
                worst, message = verdict.worst, verdict.message
        return Judged(
            relative(np.concatenate(got).astype(np.float64), np.concatenate(wanted)), worst, message
        )


def decode_rows() -> list[DecodeRow]:
    return [
        DecodeRow(batch, keys, 32, 8, 128, page)
        for batch, keys, page in ((64, 8192, 16), (64, 8192, 256), (16, 2048, 16), (1, 32768, 16))
    ]
