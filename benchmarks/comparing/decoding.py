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
    """``keys`` of each entry, or where ``mixed`` 1 to so many, log-uniform; ``page``: rows of a
    page. Pages lie in any order."""

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

    @property
    def name(self) -> str:
        keys = f"1 to {self.keys}" if self.mixed else f"{self.keys}"
        return f"B{self.batch} × {keys} H{self.heads}/{self.kv_heads} D{self.D} page {self.page}"

    @property
    def lengths(self) -> list[int]:
        """Keys of each entry, the same in every run."""
        if not self.mixed:
            return [self.keys] * self.batch
        exponents = np.random.default_rng(5).uniform(0, np.log(self.keys), self.batch)
        return [int(x) for x in np.exp(exponents)]

    @property
    def operations(self) -> float:
        return 4.0 * sum(self.lengths) * self.heads * self.D

    @property
    def bytes(self) -> float:
        """Of K and V, once each."""
        return 2.0 * 2 * sum(self.lengths) * self.kv_heads * self.D

    @property
    def pages(self) -> list[int]:
        """Of each entry."""
        return [-(-n // self.page) for n in self.lengths]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        cache = (sum(self.pages), self.page, self.kv_heads, self.D)
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
            max_seqlen_k=max(self.lengths),
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        arrays: dict[str, Any] = {
            n: session.phantom(shape, self.dtype) for n, shape in self.shapes().items()
        }
        arrays["table"] = session.phantom((self.batch, max(self.pages)), "int32")
        arrays["lengths"] = session.phantom((self.batch,), "int32")
        yield self.descriptor(arrays, session.phantom(self.shapes()["q"], self.dtype))

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays: dict[str, Any] = {
            n: session.random(shape, self.dtype) for n, shape in self.shapes().items()
        }
        order = torch.randperm(sum(self.pages), device=session.device).to(torch.int32)
        table = torch.zeros(self.batch, max(self.pages), dtype=torch.int32, device=session.device)
        for entry, own in zip(table, order.split(self.pages), strict=True):
            entry[: len(own)] = own
        arrays["table"] = table
        arrays["lengths"] = torch.tensor(self.lengths, dtype=torch.int32, device=session.device)
        prepared = Prepared(dtype=self.dtype, judge=Judge(self, arrays))
        shape = self.shapes()["q"]
        prepared.ours(
            session,
            lambda out: self.descriptor(arrays, out),
            lambda: session.poisoned(shape, self.dtype),
        )
        module = flash_attention_3()
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
        # as much is read as written
        k = arrays["k"].reshape(-1)[: int(self.bytes) // (2 * arrays["k"].element_size())]
        v = torch.empty_like(k)
        prepared.contestants.append(Contestant("copy", COPY, lambda: v.copy_(k)))
        return prepared


class Judge:
    """The first head of the first entry and the last of the last, in float64."""

    def __init__(self, row: DecodeRow, arrays: Mapping[str, Any]) -> None:
        self._row, self._parts = row, []
        for b, h in sorted({(0, 0), (row.batch - 1, row.heads - 1)}):
            g = h * row.kv_heads // row.heads
            pages = arrays["table"][b].long()
            k, v = (
                host(arrays[n][pages, :, g].reshape(-1, row.D)[: row.lengths[b]])[None, None]
                for n in "kv"
            )
            q = host(arrays["q"][b, :, h])[None, None]
            self._parts.append((b, h, formulas.attention(q, k, v, False, row.D**-0.5)))

    def __call__(self, result: Any) -> Judged:
        actual, expected, worst, message = [], [], 0.0, ""
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
            actual.append(out.reshape(-1))
            expected.append(want.out.reshape(-1))
            if verdict.worst >= worst:
                worst, message = verdict.worst, verdict.message
        return Judged(
            relative(np.concatenate(actual).astype(np.float64), np.concatenate(expected)),
            worst,
            message,
        )


def decode_rows() -> list[DecodeRow]:
    return [
        DecodeRow(batch, keys, 32, 8, 128, page)
        for batch, keys, page in ((64, 8192, 16), (64, 8192, 256), (16, 2048, 16), (1, 32768, 16))
    ] + [DecodeRow(64, 32768, 32, 8, 128, 16, mixed=True)]
