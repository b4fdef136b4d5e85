"""Products of e4m3 beside cuBLASLt's through torch._scaled_mm: one scale of a tensor, and scales of
blocks of 1×128 and 128×128."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import kernelseam as ks
import torch
from kernelseam.descriptors.common.protocol import Descriptor

from benchmarks.comparing.grouped import GroupedRow, Judge
from benchmarks.comparing.rows import Make, Prepared, Session

SIDE = 128
"""Of a block."""


@dataclass(frozen=True)
class Fp8Row(GroupedRow):
    """C [M, N] = A [M, K]·Bᵀ, B [N, K]: a layer of one expert, ``tokens`` M, ``width`` N and
    ``hidden`` K. Without ``block`` A and B have one scale each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_rows", not self.block)

    @property
    def scaled(self) -> bool:
        return True

    @property
    def name(self) -> str:
        scales = f" by {self.block}" if self.block else ""
        return f"{self.tokens}×{self.width}×{self.hidden} e4m3{scales}"

    def arrays(self, make: Make, e4m3: str) -> dict[str, Any]:
        """Scales of A's rows lie next to each other."""
        of_a: tuple[int, ...] = (1,)
        of_b, slices = of_a, self.hidden // SIDE
        if self.block:
            of_a, of_b = (slices, self.tokens), (self.width // SIDE, slices)
        return {
            "A": make((self.tokens, self.hidden), e4m3),
            "B": make((self.width, self.hidden), e4m3),
            "a_scales": make(of_a, "float32"),
            "b_scales": make(of_b, "float32"),
        }

    def descriptor(self, arrays: Mapping[str, Any], offsets: Any, c: Any) -> Descriptor:
        steps: dict[str, Any] = {"a_scales_row": 0, "b_scales_column": 0}
        if self.block:
            steps = {"a_scales_row": 1, "a_scales_k": self.tokens, "b_scales_k": 1}
            steps["b_scales_column"] = self.hidden // SIDE
        return ks.BatchedGemmStrided(
            M=self.tokens,
            N=self.width,
            K=self.hidden,
            b_transposed=True,
            scale_block=(1, SIDE, SIDE) if self.block else None,
            **arrays,
            C=c,
            **{f"stride_{name}": step for name, step in steps.items()},
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        arrays = self.arrays(session.phantom, session.e4m3())
        yield self.descriptor(arrays, None, session.phantom(self.shape(), self.dtype))

    def prepare(self, session: Session) -> Prepared:
        arrays = self.arrays(session.random, session.e4m3())
        prepared = session.prepared(self.dtype, lambda: Judge(self, self._judged(arrays)))
        prepared.keep = arrays
        prepared.ours(
            session,
            lambda c: self.descriptor(arrays, None, c),
            lambda: session.poisoned(self.shape(), self.dtype),
        )
        factors = arrays["A"], *(arrays[n].t() for n in ("B", "a_scales", "b_scales"))
        for fast in (False,) if self.block else (False, True):
            prepared.peer(
                "cuBLASLt, fast accumulation" if fast else "cuBLASLt",
                partial(torch._scaled_mm, *factors, out_dtype=torch.bfloat16, use_fast_accum=fast),
            )
        return prepared

    def _judged(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """As of the only expert, with a scale of each row and column or block."""
        of_rows, of_columns = arrays["a_scales"].t(), arrays["b_scales"]
        if not self.block:
            of_rows, of_columns = of_rows.expand(self.tokens), of_columns.expand(self.width)
        one = {"B": arrays["B"][None], "b_scales": of_columns[None]}
        return {**arrays, "a_scales": of_rows, **one}


def fp8_rows() -> list[Fp8Row]:
    """Layers of a decoder; of the blocks the first four are DeepSeek-V3's, or nearly."""
    plain = ((512, 6144, 4096), (64, 6144, 4096), (2048, 4096, 4096), (8192, 8192, 8192))
    blocks = ((64, 7168, 2048), (512, 7168, 2048), (4096, 7168, 2048), (4096, 4096, 7168))

    def row(m: int, n: int, k: int, block: int = 0) -> Fp8Row:
        return Fp8Row("gemm-e4m3", 1, m, k, n, "equal", least=1.0, block=block)

    return [
        *(row(*shape) for shape in (*plain, (16384, 6144, 4096))),
        *(row(*shape, block=SIDE) for shape in (*blocks, (8192, 8192, 8192))),
    ]
