"""Lists of products of sizes of their own beside torch's products one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import kernelseam as ks
import numpy as np
import torch
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dtypes import DType
from kernelseam.oracle import check, formulas

from benchmarks.comparing.gemm import JUDGED, RIDGE
from benchmarks.comparing.results import COPY, Record
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

Sizes = tuple[tuple[int, int, int], ...]
_APART = 1 << 36
"""Bytes between the places of matrices that are planned for."""


@dataclass(frozen=True)
class ListedRow:
    """``sizes``: M, N and K of each product; all of them multiples of 8."""

    suite: str
    called: str
    sizes: Sizes
    b_transposed: bool = False
    dtype: str = "bfloat16"
    least: float = 1.05

    @property
    def name(self) -> str:
        kind = {"bfloat16": "bf16", "float16": "f16"}[self.dtype]
        return f"list of {len(self.sizes)}, {self.called} {kind}" + " NT" * self.b_transposed

    @property
    def operations(self) -> float:
        return 2.0 * sum(m * n * k for m, n, k in self.sizes)

    @property
    def bytes(self) -> float:
        elements = sum(m * k + k * n + m * n for m, n, k in self.sizes)
        return float(elements * DType.of(self.dtype).itemsize)

    def descriptor(self, a: list[int], b: list[int], c: list[int]) -> Descriptor:
        """Over addresses."""
        m, n, k = zip(*self.sizes, strict=True)
        return ks.GroupedGemmPointers(
            M=m,
            N=n,
            K=k,
            dtype=self.dtype,
            b_transposed=self.b_transposed,
            alignment=16,
            A_ptrs=a,
            B_ptrs=b,
            C_ptrs=c,
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        count = len(self.sizes)
        places = [_APART * (i + 1) for i in range(3 * count)]
        yield self.descriptor(places[::3], places[1::3], places[2::3])

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def results(self, whole: Any) -> list[Any]:
        """Each product's place in one array."""
        ends = [0, *accumulate(m * n for m, n, _ in self.sizes)]
        places = zip(ends[:-1], self.sizes, strict=True)
        return [whole[at : at + m * n].view(m, n) for at, (m, n, _) in places]

    def factors(self, make: Make) -> tuple[list[Any], list[Any]]:
        """As they are multiplied."""
        a = [make((m, k), self.dtype) for m, _, k in self.sizes]
        if self.b_transposed:
            return a, [make((n, k), self.dtype).t() for _, n, k in self.sizes]
        return a, [make((k, n), self.dtype) for _, n, k in self.sizes]

    def prepare(self, session: Session) -> Prepared:
        a, b = self.factors(session.random)
        whole = (sum(m * n for m, n, _ in self.sizes),)
        prepared = session.prepared(self.dtype, lambda: Judge(self, a, b))
        prepared.keep = a, b

        def descriptor(c: Any) -> Descriptor:
            lists = ([x.data_ptr() for x in xs] for xs in (a, b, self.results(c)))
            return self.descriptor(*lists)

        prepared.ours(session, descriptor, lambda: session.poisoned(whole, self.dtype))
        theirs = session.poisoned(whole, self.dtype)

        def one_by_one() -> Any:
            for x, y, z in zip(a, b, self.results(theirs), strict=True):
                torch.mm(x, y, out=z)
            return theirs

        prepared.peer("torch.mm one by one", one_by_one)
        if self.operations / self.bytes < RIDGE[self.dtype]:
            size = int(self.bytes) // 2
            x = torch.randint(0, 255, (size,), dtype=torch.uint8, device=session.device)
            y = torch.empty_like(x)
            prepared.contestants.append(Contestant("copy", COPY, lambda: y.copy_(x)))
        return prepared


class Judge:
    """Some rows and columns of the largest product, the smallest and the last, in float64."""

    def __init__(self, row: ListedRow, a: list[Any], b: list[Any]) -> None:
        rng, work = np.random.default_rng(0), [m * n * k for m, n, k in row.sizes]
        self._row, self._parts = row, list[tuple[int, Any, Any]]()
        for g in sorted({int(np.argmax(work)), int(np.argmin(work)), len(work) - 1}):
            m, n, _ = row.sizes[g]
            rows, columns = (
                np.sort(rng.permutation(extent)[:most])
                for extent, most in zip((m, n), JUDGED, strict=True)
            )
            left, right = host(a[g][rows]), host(b[g][:, columns])
            want = formulas.gemm(left[None, None], right[None, None])
            self._parts.append((g, (rows[:, None], columns[None]), want))

    def __call__(self, result: Any) -> Judged:
        dtype, products = DType.of(self._row.dtype), self._row.results(result)
        worst, message, found, wanted = 0.0, "", [], []
        for g, index, want in self._parts:
            c = host(products[g][index])
            terms = self._row.sizes[g][2]
            verdict = check.gemm_verdict(want, terms, dtype, c[None, None], (1, 1, len(c)), None)
            found.append(c.astype(np.float64).ravel())
            wanted.append(want.out.ravel())
            if verdict.worst >= worst:
                worst, message = verdict.worst, verdict.message
        return Judged(relative(np.concatenate(found), np.concatenate(wanted)), worst, message)


def listed_rows() -> list[ListedRow]:
    """Experts' layers whose sizes the host knows, equal and skewed, and a list of any sizes."""
    skewed = (600, 200, 2400, 1024, 96, 1800, 1496, 576)
    ragged = [(4096, 512, 64), (8, 24, 8), (1304, 1000, 328), (704, 8, 4096)]
    ragged += [
        (128 + 8 * (97 * i % 50), 8 + 8 * (61 * i % 99), 8 + 8 * (i % 37)) for i in range(60)
    ]
    lists: dict[str, Sizes] = {
        "1024×14336×4096": ((1024, 14336, 4096),) * 8,
        "96 to 2400 rows ×14336×4096": tuple((m, 14336, 4096) for m in skewed),
        "128×1408×2048": ((128, 1408, 2048),) * 64,
        "ragged": tuple(ragged),
    }
    return [
        ListedRow("grouped", n, x, turned) for n, x in lists.items() for turned in (False, True)
    ]
