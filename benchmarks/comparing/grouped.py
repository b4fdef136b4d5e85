"""Grouped products beside torch's: experts' layers, the gradients of their inputs and of their
weights, by groups of one size, of drawn and of Zipf's sizes, and few tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import kernelseam as ks
import numpy as np
import torch
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dtypes import DType
from kernelseam.kernels.elements import divide_up
from kernelseam.oracle import check, formulas

from benchmarks.comparing.gemm import JUDGED, RIDGE
from benchmarks.comparing.results import COPY, PEER, WITHOUT, Record
from benchmarks.comparing.rows import (
    Contestant,
    Judged,
    Make,
    Prepared,
    Session,
    compared,
    host,
    relative,
)

FORMS = ("forward", "input gradient", "weight gradient")
_DENSE_ROWS = 1024
"""Of equal groups, from which on they are timed as a batch, too."""


@dataclass(frozen=True)
class GroupedRow:
    """``tokens`` rows of ``hidden`` columns, sorted by expert, times weights [experts, hidden,
    width]: "forward"; its gradients take [tokens, width] in place of the rows' or the weights'."""

    suite: str
    experts: int
    tokens: int
    hidden: int
    width: int
    sizes: str
    """"equal", "skewed" (weights from 0.2 to 1.2), "zipf", or "drawn" (each token's expert)."""
    form: str = "forward"
    dtype: str = "bfloat16"
    least: float = 1.05
    block: int = 0
    """Side of a block of e4m3 values that have one scale, of rows and weights ("forward" alone);
    the weights then lie as [experts, width, hidden], and ``dtype`` is the result's."""
    by_rows: bool = False
    """The same with one scale for each row of A and of the weights."""

    @property
    def scaled(self) -> bool:
        """Whether the factors are of 8 bits."""
        return self.by_rows or self.block > 0

    @property
    def name(self) -> str:
        kind = {"bfloat16": "bf16", "float16": "f16"}[self.dtype]
        shape = f"E{self.experts} {self.tokens}×{self.hidden}→{self.width}"
        if self.scaled:
            kind = "e4m3 by rows" if self.by_rows else f"e4m3 by {self.block}"
        return f"{shape} {kind} {self.sizes} {self.form}"

    @cached_property
    def counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows of each expert."""
        rng = np.random.default_rng(0)
        if self.sizes == "drawn":
            drawn = rng.multinomial(self.tokens, [1 / self.experts] * self.experts)
            return drawn.astype(np.int64)
        weights = {
            "equal": np.ones(self.experts),
            "skewed": rng.uniform(0.2, 1.2, self.experts),
            "zipf": rng.permutation(1 / np.arange(1, self.experts + 1)),
        }[self.sizes]
        counts: np.ndarray[Any, np.dtype[np.int64]] = np.floor(
            weights / weights.sum() * self.tokens
        ).astype(np.int64)
        counts[counts.argmax()] += self.tokens - counts.sum()
        return counts

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.hidden * self.width

    @property
    def bytes(self) -> float:
        """Of an expert without tokens only its gradient is written."""
        used = self.experts if self.form == "weight gradient" else int((self.counts > 0).sum())
        factors = self.tokens * self.hidden + used * self.hidden * self.width
        size = DType.of(self.dtype).itemsize
        return float(factors * (1 if self.scaled else size) + self.tokens * self.width * size)

    @property
    def moves(self) -> bool:
        """Whether memory bounds it."""
        return self.operations / self.bytes < RIDGE[self.dtype]

    def arrays(self, make: Make, e4m3: str) -> dict[str, Any]:
        """As they lie in memory; C left out. ``e4m3``: the dtype of factors of 8 bits."""
        if self.scaled:
            return self._of_8_bits(make, e4m3)
        tokens, weights = (self.tokens, self.hidden), (self.experts, self.hidden, self.width)
        results = (self.tokens, self.width)
        a, b = {
            "forward": (tokens, weights),
            "input gradient": (results, weights),
            "weight gradient": (tokens, results),
        }[self.form]
        return {"A": make(a, self.dtype), "B": make(b, self.dtype)}

    def _of_8_bits(self, make: Make, e4m3: str) -> dict[str, Any]:
        across, along = self.width, tuple[int, ...]()
        if self.block:
            across, along = divide_up(self.width, self.block), (divide_up(self.hidden, self.block),)
        return {
            "A": make((self.tokens, self.hidden), e4m3),
            "B": make((self.experts, self.width, self.hidden), e4m3),
            "a_scales": make((self.tokens, *along), "float32"),
            "b_scales": make((self.experts, across, *along), "float32"),
        }

    def factors(self, arrays: Mapping[str, Any], group: int, rows: Any, columns: Any) -> Any:
        """Of "forward": some rows of A and some columns of a group's weights, as [hidden, …]."""
        a, b = arrays["A"][rows], arrays["B"][group]
        if not self.scaled:
            return a, b[:, columns]
        if self.by_rows:
            of_columns = arrays["b_scales"][group][columns]
            of_rows = arrays["a_scales"][rows]
            return a.double() * of_rows[:, None], b[columns].double().t() * of_columns
        a_scales = arrays["a_scales"][rows].repeat_interleave(self.block, 1)
        b_scales = arrays["b_scales"][group][columns // self.block]
        b_scales = b_scales.repeat_interleave(self.block, 1)
        a = a.double() * a_scales[:, : self.hidden]
        return a, (b[columns].double() * b_scales[:, : self.hidden]).t()

    def shape(self) -> tuple[int, ...]:
        """Of C."""
        return {
            "forward": (self.tokens, self.width),
            "input gradient": (self.tokens, self.hidden),
            "weight gradient": (self.experts, self.hidden, self.width),
        }[self.form]

    def descriptor(self, arrays: Mapping[str, Any], offsets: Any, c: Any) -> Descriptor:
        summed = self.form == "weight gradient"
        *_, rows, columns = self.shape()
        terms = {"forward": self.hidden, "input gradient": self.width}.get(self.form, self.tokens)
        return ks.GroupedGemm(
            groups=self.experts,
            M=rows,
            N=columns,
            K=terms,
            along="k" if summed else "m",
            a_transposed=summed,
            b_transposed=self.scaled or self.form == "input gradient",
            scale_block=(1, self.block, self.block) if self.block else None,
            **arrays,
            C=c,
            offsets=offsets,
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        arrays = self.arrays(session.phantom, session.e4m3())
        offsets = session.phantom((self.experts,), "int32")
        yield self.descriptor(arrays, offsets, session.phantom(self.shape(), self.dtype))

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays = self.arrays(session.random, session.e4m3())
        ends = np.cumsum(self.counts).astype(np.int32)
        offsets = torch.from_numpy(ends).to(session.device)
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))
        prepared.keep = offsets
        prepared.ours(
            session,
            lambda c: self.descriptor(arrays, offsets, c),
            lambda: session.poisoned(self.shape(), self.dtype),
        )
        if not session.peers:
            return prepared
        a, b = arrays["A"], arrays["B"]
        peer = "torch._grouped_mm"
        if self.by_rows:
            eight, scales = arrays["B"].transpose(1, 2), (arrays["a_scales"], arrays["b_scales"])
            prepared.peer(
                "torch._scaled_grouped_mm",
                lambda: torch._scaled_grouped_mm(
                    arrays["A"], eight, *scales, offs=offsets, out_dtype=torch.bfloat16
                ),
            )
        if self.scaled:
            a, b, peer = *self._in_bfloat16(arrays), f"{peer} in bfloat16"
        if self.form == "input gradient":
            b = b.transpose(1, 2)
        if self.form == "weight gradient":
            a = a.t()
        prepared.peer(peer, lambda: torch._grouped_mm(a, b, offs=offsets))
        even = self.sizes == "equal" and self.tokens % self.experts == 0
        if even and self.tokens >= _DENSE_ROWS * self.experts:
            if self.scaled:
                self._scaled_as_a_batch(prepared, arrays)
            else:
                self._as_a_batch(prepared, a, b)
        if self.moves:
            x = torch.randint(
                0, 255, (int(self.bytes) // 2,), dtype=torch.uint8, device=session.device
            )
            y = torch.empty_like(x)
            prepared.contestants.append(Contestant("copy", COPY, lambda: y.copy_(x)))
        return prepared

    def _in_bfloat16(self, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        """What stored values stand for: of the rows, and of the weights as [experts, hidden,
        width]."""
        rows, columns = (
            torch.arange(n, device=arrays["A"].device) for n in (self.tokens, self.width)
        )
        a = self.factors(arrays, 0, rows, columns[:0])[0].bfloat16()
        b = torch.empty(arrays["B"].shape, dtype=torch.bfloat16, device=a.device)
        for g in range(self.experts):
            b[g] = self.factors(arrays, g, rows[:0], columns)[1].t()
        return a, b.transpose(1, 2)

    def _scaled_as_a_batch(self, prepared: Prepared, arrays: Mapping[str, Any]) -> None:
        """The same of 8 bits, which is what blocks of scales have to keep up with."""
        a, of_a = (arrays[n].unflatten(0, (self.experts, -1)) for n in ("A", "a_scales"))
        scales = {"a_scales": of_a, "b_scales": arrays["b_scales"]}
        sizes = (1, self.block, self.block) if self.block else None
        b, shape = arrays["B"].transpose(1, 2), self.shape()
        prepared.peer(
            "ours, a batch",
            lambda: ks.bmm(a, b, **scales, scale_block=sizes, out_dtype=self.dtype).reshape(shape),
            role=PEER if self.block else WITHOUT,
        )

    def _as_a_batch(self, prepared: Prepared, a: Any, b: Any) -> None:
        """Groups of one size by our batched product."""
        each = self.tokens // self.experts
        if self.form == "weight gradient":
            left = a.unflatten(1, (self.experts, each)).transpose(0, 1)
            right = b.unflatten(0, (self.experts, each))
        else:
            left, right = a.unflatten(0, (self.experts, each)), b
        shape = self.shape()
        prepared.peer("ours, a batch", lambda: ks.bmm(left, right).reshape(shape), role=WITHOUT)


class Judge:
    """Some rows and columns of the largest group, the smallest and the last, in float64."""

    def __init__(self, row: GroupedRow, arrays: Mapping[str, Any]) -> None:
        rng, counts = np.random.default_rng(0), row.counts
        there = np.flatnonzero(counts)
        groups = {int(there[counts[there].argmax()]), int(there[counts[there].argmin()])}
        self._row, ends = row, np.cumsum(counts)
        self._dtype = DType(str(arrays["A"].dtype).removeprefix("torch."))
        *_, rows, columns = row.shape()
        some = np.sort(rng.permutation(columns)[: JUDGED[1]])
        self._parts: list[tuple[Any, Any, int]] = []
        for g in sorted(groups | {int(there[-1])}):
            part = slice(int(ends[g] - counts[g]), int(ends[g]))
            if row.form == "weight gradient":
                picked = np.sort(rng.permutation(rows)[: JUDGED[0]])
                a, b = arrays["A"][part][:, picked].t(), arrays["B"][part][:, some]
                index: Any = (g, picked[:, None], some[None])
            else:
                picked = part.start + np.sort(rng.permutation(int(counts[g]))[: JUDGED[0]])
                if row.form == "forward":
                    a, b = row.factors(arrays, g, picked, some)
                else:
                    a, b = arrays["A"][picked], arrays["B"][g][some].t()
                index = (picked[:, None], some[None])
            want = formulas.gemm(host(a)[None, None], host(b)[None, None])
            self._parts.append((index, want, a.shape[1]))

    def __call__(self, result: Any) -> Judged:
        worst, message, found, wanted = 0.0, "", [], []
        for index, want, terms in self._parts:
            c = host(result[index])
            verdict = check.gemm_verdict(
                want, terms, self._dtype, c[None, None], (1, 1, len(c)), None
            )
            found.append(c.astype(np.float64).ravel())
            wanted.append(want.out.ravel())
            if verdict.worst >= worst:
                worst, message = verdict.worst, verdict.message
        return Judged(relative(np.concatenate(found), np.concatenate(wanted)), worst, message)


def grouped_rows() -> list[GroupedRow]:
    """Mixtral's, DeepSeek-V2-Lite's and DeepSeek-V3's experts, or nearly."""
    layers = ((8, 8192, 4096, 14336), (64, 8192, 2048, 1408), (256, 4096, 7168, 2048))
    return [
        *(
            GroupedRow("grouped", *layer, sizes, form)
            for layer in layers
            for sizes in ("equal", "skewed", "zipf")
            for form in FORMS
        ),
        *(
            GroupedRow("grouped", experts, tokens, hidden, width, "drawn")
            for experts, _, hidden, width in layers
            for tokens in (64, 512)
        ),
        *(
            GroupedRow("grouped", *layer, sizes, by_rows=True)
            for layer in layers[:2]
            for sizes in ("equal", "skewed")
        ),
        GroupedRow("grouped", *layers[0], "equal", block=128, least=0.95),
    ]
