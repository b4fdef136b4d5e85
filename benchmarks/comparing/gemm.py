"""Batched GEMM and linear layers beside cuBLAS, as torch calls it (hipBLAS on AMD's GPUs, under the
same name), and beside a copy of the bytes that they move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kernelseam as ks
import numpy as np
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dtypes import DType
from kernelseam.errors import KernelSeamError
from kernelseam.oracle import check, formulas

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

RIDGE = {"float16": 190.0, "bfloat16": 190.0, "float32": 14.0, "float64": 14.0}
"""Operations a byte, below which an H200's memory bounds a product: its rates by cuBLAS over those
of a copy."""
JUDGED = 64, 256
"""Rows and columns of three matrices that are held against float64."""


@dataclass(frozen=True)
class GemmRow:
    """C = A·op(B) over ``count`` matrices, B's rows N×K where ``b_transposed``, as a linear layer's
    weight has them. ``lists``: by lists of addresses, one of LISTS, for the library's
    product by lists too; beside them both by strides."""

    suite: str
    count: int
    M: int
    N: int
    K: int
    dtype: str
    b_transposed: bool = False
    bias: bool = False
    residual: bool = False
    lists: str = ""
    least: float = 1.0

    @property
    def name(self) -> str:
        kind = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}[
            self.dtype
        ]
        parts = [
            f"{self.count} × {self.M}×{self.N}×{self.K} {kind}",
            "NT" if self.b_transposed else "NN",
        ]
        parts += ["bias"] * self.bias + ["residual"] * self.residual
        parts += [f"lists {self.lists}"] * bool(self.lists)
        return " ".join(parts)

    @property
    def operations(self) -> float:
        return 2.0 * self.count * self.M * self.N * self.K

    @property
    def bytes(self) -> float:
        a, b, c = self.M * self.K, self.N * self.K, self.M * self.N
        whole = self.count * (a + b + c * (1 + self.residual) + self.N * self.bias)
        return float(whole * DType.of(self.dtype).itemsize)

    @property
    def moves(self) -> bool:
        """Whether memory bounds it."""
        return self.operations / self.bytes < RIDGE[self.dtype]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        b = (self.N, self.K) if self.b_transposed else (self.K, self.N)
        by_name: dict[str, tuple[int, ...]] = {
            "A": (self.count, self.M, self.K),
            "B": (self.count, *b),
            "C": (self.count, self.M, self.N),
        }
        if self.bias:
            by_name["bias"] = (self.count, self.N)
        if self.residual:
            by_name["residual"] = by_name["C"]
        return by_name

    def arrays(self, make: Make) -> dict[str, Any]:
        """Operands but for C."""
        return {n: make(shape, self.dtype) for n, shape in self.shapes().items() if n != "C"}

    def descriptor(self, arrays: Mapping[str, Any], c: Any) -> Descriptor:
        return ks.BatchedGemmStrided(
            **arrays,
            C=c,
            M=self.M,
            N=self.N,
            K=self.K,
            batch=self.count,
            b_transposed=self.b_transposed,
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        arrays = self.arrays(session.phantom)
        yield self.descriptor(arrays, session.phantom(self.shapes()["C"], self.dtype))
        if self.lists:
            lists: dict[str, Any] = {f"{n}_ptrs": 0 for n in "ABC"}
            yield self._of_lists(lists)

    def _of_lists(self, lists: Mapping[str, Any]) -> Descriptor:
        return ks.BatchedGemmPointers(
            **lists,
            M=self.M,
            N=self.N,
            K=self.K,
            batch=self.count,
            b_transposed=self.b_transposed,
            dtype=self.dtype,
            alignment=16,
        )

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays, shape = self.arrays(session.random), self.shapes()["C"]
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))
        if self.lists:
            self._by_lists(prepared, arrays, session)
        else:
            prepared.ours(
                session,
                lambda c: self.descriptor(arrays, c),
                lambda: session.poisoned(shape, self.dtype),
            )
        self._cublas(prepared, arrays, session)
        if self.moves:
            x = torch.randint(
                0, 255, (int(self.bytes) // 2,), dtype=torch.uint8, device=session.device
            )
            y = torch.empty_like(x)
            prepared.contestants.append(Contestant("copy", COPY, lambda: y.copy_(x)))
        return prepared

    def _by_lists(self, prepared: Prepared, arrays: Mapping[str, Any], session: Session) -> None:
        """Beside them ours by strides."""
        make = LISTS[self.lists]
        scattered = {
            n: make(session, x.shape[1:], self.dtype, len(x), i)
            for i, (n, x) in enumerate(arrays.items())
        }
        for n, memory in scattered.items():
            memory.write(arrays[n])
        prepared.keep = scattered

        def lists(c: Scattered) -> Descriptor:
            whole = {**scattered, "C": c}
            return self._of_lists({f"{n}_ptrs": m.addresses for n, m in whole.items()})

        shape = self.shapes()["C"]

        def result() -> Scattered:
            return make(session, shape[1:], self.dtype, self.count, 2)

        prepared.ours(session, lists, result, Scattered.read)
        prepared.add(
            session,
            lambda c: self.descriptor(arrays, c),
            lambda: session.poisoned(shape, self.dtype),
            lambda c: c,
            "ours by strides",
            WITHOUT,
        )
        library = "hipblas-batched" if session.target().backend == "rocm" else "cublas-batched"
        try:
            prepared.add(session, lists, result, Scattered.read, "cuBLAS", PEER, library)
        except KernelSeamError as e:
            prepared.refused["cuBLAS"] = str(e)

    def _cublas(self, prepared: Prepared, arrays: Mapping[str, Any], session: Session) -> None:
        a, b = arrays["A"], arrays["B"]
        right = b.transpose(1, 2) if self.b_transposed else b
        c = session.poisoned(self.shapes()["C"], self.dtype)
        if self.count > 1:
            name, role = ("cuBLAS by strides", WITHOUT) if self.lists else ("cuBLAS", PEER)
            prepared.peer(name, lambda: torch.bmm(a, right, out=c), role=role)
            return
        x, w, out = a[0], right[0], c[0]
        bias = arrays["bias"][0] if self.bias else None
        residual = arrays["residual"][0] if self.residual else None
        if residual is not None and bias is not None:
            prepared.peer(
                "cuBLAS",
                lambda: torch.add(functional.linear(x, w.T, bias), residual, out=out)[None],
            )
        elif bias is not None or residual is not None:
            added = residual if bias is None else bias
            prepared.peer("cuBLAS", lambda: torch.addmm(added, x, w, out=out)[None])
        else:
            prepared.peer("cuBLAS", lambda: torch.mm(x, w, out=out)[None])


class Scattered:
    """Matrices whose places are listed."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self.addresses = [int(v.data_ptr()) for v in views]

    def write(self, matrices: torch.Tensor) -> None:
        for view, matrix in zip(self._views, matrices, strict=True):
            view.copy_(matrix)

    def read(self) -> torch.Tensor:
        return torch.stack(list(self._views))


def in_one_allocation(
    session: Session, shape: Sequence[int], dtype: str, count: int, seed: int
) -> Scattered:
    """In any order with uneven gaps, each at a multiple of 16 bytes."""
    rng = np.random.default_rng(seed)
    size, unit = int(np.prod(shape)), 16 // DType.of(dtype).itemsize
    room = -(-size // unit) * unit
    gaps = rng.integers(1, 64, count) * unit
    starts = (np.cumsum(gaps + room) - room)[rng.permutation(count)]
    memory = session.poisoned((int(gaps.sum()) + room * count,), dtype)
    return Scattered([memory[s : s + size].view(tuple(shape)) for s in starts])


def one_by_one(
    session: Session, shape: Sequence[int], dtype: str, count: int, seed: int
) -> Scattered:
    """Each in an allocation of its own, in any order. They lie on more pages than the device
    translates addresses of at once, which slows every kernel."""
    outputs = [session.poisoned(shape, dtype) for _ in range(count)]
    return Scattered([outputs[i] for i in np.random.default_rng(seed).permutation(count)])


LISTS = {
    "in one allocation, shuffled": in_one_allocation,
    "allocated one by one, shuffled": one_by_one,
}


class Judge:
    """Some rows and columns of three matrices, in float64."""

    def __init__(self, row: GemmRow, arrays: Mapping[str, Any]) -> None:
        rng = np.random.default_rng(0)
        self._row = row
        self._matrices = sorted({0, row.count // 2, row.count - 1})
        self._rows, self._columns = (
            np.sort(rng.permutation(n)[:most])
            for n, most in zip((row.M, row.N), JUDGED, strict=True)
        )
        a = self._cut(arrays["A"], self._rows, None)
        b = (
            self._cut(arrays["B"], self._columns, None)
            if row.b_transposed
            else self._cut(arrays["B"], None, self._columns)
        )
        bias = (
            self._cut(arrays["bias"][:, None], None, self._columns)[:, :, 0] if row.bias else None
        )
        residual = (
            self._cut(arrays["residual"], self._rows, self._columns) if row.residual else None
        )
        self._want = formulas.gemm(
            a, b, None, 1.0, 0.0, False, row.b_transposed, bias=bias, residual=residual
        )

    def _cut(self, x: torch.Tensor, rows: Any, columns: Any) -> Any:
        selected = x[self._matrices]
        if rows is not None:
            selected = selected[:, torch.from_numpy(rows).to(x.device)]
        if columns is not None:
            selected = selected[:, :, torch.from_numpy(columns).to(x.device)]
        return host(selected)[:, None]

    def __call__(self, result: Any) -> Judged:
        c = self._cut(result, self._rows, self._columns)
        verdict = check.gemm_verdict(
            self._want,
            self._row.K,
            DType.of(self._row.dtype),
            c,
            c.shape[:-1],
            None,
            zero_mean=True,
        )
        return Judged(
            relative(c.astype(np.float64), self._want.out), verdict.worst, verdict.message
        )


def half_rows() -> list[GemmRow]:
    def row(*problem: Any, **options: Any) -> GemmRow:
        return GemmRow("gemm", *problem, **options)

    f16, bf16 = "float16", "bfloat16"
    one, many = LISTS
    large = row(64, 1024, 1024, 1024, f16)
    batched = [
        row(384, 512, 512, 64, f16, True),
        row(384, 512, 64, 512, f16),
        row(256, 2048, 2048, 128, f16, True),
        row(256, 2048, 128, 2048, f16),
        row(8192, 32, 32, 32, f16, True),
        row(4096, 64, 64, 64, f16, True),
    ]
    return [
        *batched,
        row(65536, 16, 16, 16, f16),
        large,
        row(1, 8192, 8192, 8192, bf16),
        row(1, 16384, 6144, 4096, bf16, True),
        row(1, 16384, 6144, 4096, bf16, True, bias=True),
        row(1, 512, 6144, 4096, bf16, True, bias=True),
        row(1, 16384, 4096, 4096, bf16, True, residual=True),
        row(1, 16384, 4096, 4096, bf16, True, bias=True, residual=True),
        row(384, 1, 512, 64, f16, True),
        row(384, 1, 64, 512, f16),
        row(1, 1, 8192, 8192, bf16, True),
        row(1, 1, 6144, 4096, bf16, True),
        row(384, 500, 500, 72, f16, True),
        row(64, 1000, 1000, 1000, f16),
        row(100, 333, 777, 129, f16),
        row(100, 333, 777, 129, bf16, True),
        row(65536, 8, 8, 8, f16),
        row(1, 512, 6144, 4096, bf16, True),
        *(replace(r, lists=one) for r in (*batched, large)),
        *(replace(r, lists=many) for r in (*batched[:4], large)),
    ]


def wide_rows() -> list[GemmRow]:
    """float32 as IEEE has it, and a few of float64."""
    f32, f64 = "float32", "float64"
    problems: list[tuple[Any, ...]] = [
        (384, 512, 512, 64, f32, True),
        (384, 512, 64, 512, f32),
        (256, 2048, 2048, 128, f32, True),
        (256, 2048, 128, 2048, f32),
        (8192, 32, 32, 32, f32, True),
        (4096, 64, 64, 64, f32, True),
        (64, 1024, 1024, 1024, f32),
        (384, 512, 512, 64, f64, True),
        (384, 512, 64, 512, f64),
        (4096, 64, 64, 64, f64, True),
        (16, 1024, 1024, 1024, f64),
    ]
    return [GemmRow("gemm-f32", *p) for p in problems]
