"""Linear layers with an epilogue: beside cuBLASLt's, where it has that epilogue, beside what
torch.compile makes of the same, and beside our own product without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import kernelseam as ks
import numpy as np
import torch
import torch.nn.functional as functional
from kernelseam import epilogues
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dtypes import DType
from kernelseam.oracle import check, formulas
from kernelseam.oracle.epilogues import Epilogue

from benchmarks.comparing.gemm import JUDGED
from benchmarks.comparing.results import WITHOUT, Record
from benchmarks.comparing.rows import Judged, Make, Prepared, Session, compared, host, relative

_TORCH: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
_GATES = {"swiglu": "silu", "geglu": "gelu"}
_LT = {"relu": False, "gelu_tanh": True}
"""Whether cuBLASLt's epilogue, behind its bias, is GELU."""


@dataclass(frozen=True)
class EpilogueRow:
    """``rows`` of ``hidden`` columns times a weight [columns, hidden], of bf16; a gate leaves half
    of the columns."""

    suite: str
    rows: int
    columns: int
    hidden: int
    epilogue: str
    bias: bool = False
    preactivation: bool = False
    dtype: str = "bfloat16"
    least: float = 1.0

    @property
    def name(self) -> str:
        parts = [f"{self.rows}×{self.columns}×{self.hidden} bf16", self.epilogue]
        return " ".join((*parts, *["bias"] * self.bias, *["preactivation"] * self.preactivation))

    @property
    def results(self) -> int:
        """Columns of the result."""
        return self.columns // 2 if self.epilogue in _GATES else self.columns

    @property
    def operations(self) -> float:
        return 2.0 * self.rows * self.columns * self.hidden

    @property
    def bytes(self) -> float:
        written = self.results + self.preactivation * self.columns
        read = (self.rows + self.columns) * self.hidden + self.bias * self.columns
        return float((read + self.rows * written) * DType.of(self.dtype).itemsize)

    def arrays(self, make: Make) -> dict[str, Any]:
        """Operands but for C and the second result."""
        given = {
            "A": make((1, self.rows, self.hidden), self.dtype),
            "B": make((1, self.columns, self.hidden), self.dtype),
        }
        return given | ({"bias": make((1, self.columns), self.dtype)} if self.bias else {})

    def descriptor(self, c: Any, plain: bool = False, **arrays: Any) -> Descriptor:
        return ks.BatchedGemmStrided(
            **arrays,
            C=c,
            M=self.rows,
            N=self.columns,
            K=self.hidden,
            batch=1,
            b_transposed=True,
            epilogue=None if plain else self.epilogue,
        )

    def _written(self, make: Make) -> dict[str, Any]:
        shape = (1, self.rows, self.columns)
        return {"preactivation": make(shape, self.dtype)} if self.preactivation else {}

    def planned(self, session: Session) -> Iterable[Descriptor]:
        make, arrays = session.phantom, self.arrays(session.phantom)
        c = make((1, self.rows, self.results), self.dtype)
        yield self.descriptor(c, **arrays, **self._written(make))
        yield self.descriptor(make((1, self.rows, self.columns), self.dtype), True, **arrays)

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays, written = self.arrays(session.random), self._written(session.poisoned)
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))
        prepared.keep = arrays, written
        prepared.ours(
            session,
            lambda c: self.descriptor(c, **arrays, **written),
            lambda: session.poisoned((1, self.rows, self.results), self.dtype),
        )
        x, w = arrays["A"][0], arrays["B"][0]
        bias = arrays["bias"][0] if self.bias else None
        self._peers(prepared, session, x, w, bias)
        plain = prepared.add(
            session,
            lambda c: self.descriptor(c, True, **arrays),
            lambda: session.poisoned((1, self.rows, self.columns), self.dtype),
            lambda c: c,
            "ours, no epilogue",
            WITHOUT,
        )
        plain.result = None  # another result, which other rows judge
        return prepared

    def _peers(
        self, prepared: Prepared, session: Session, x: Any, w: Any, bias: torch.Tensor | None
    ) -> None:
        if bias is not None and self.epilogue in _LT and not self.preactivation:
            use_gelu = _LT[self.epilogue]
            prepared.peer(
                "cuBLASLt",
                lambda: torch._addmm_activation(bias, x, w.T, use_gelu=use_gelu)[None],
            )
        layer = self.layer()
        eager = "torch" if session.device == "cpu" else "torch.compile"
        run = layer if session.device == "cpu" else torch.compile(layer)
        prepared.peer(eager, lambda: run(x, w, bias), lambda y: y[0][None])

    def layer(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """In torch's words: the result, and with ``preactivation`` what it is of."""
        gated, preactivation = self.epilogue in _GATES, self.preactivation
        activation = _TORCH[_GATES.get(self.epilogue, self.epilogue)]

        def linear(
            x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
        ) -> tuple[torch.Tensor, ...]:
            y = functional.linear(x, w, bias)
            gate, up = y.chunk(2, dim=-1) if gated else (y, None)
            z = activation(gate) if up is None else activation(gate) * up
            return (z, y) if preactivation else (z,)

        return linear


class Judge:
    """Some rows and columns in float64."""

    def __init__(self, row: EpilogueRow, arrays: Mapping[str, Any]) -> None:
        rng = np.random.default_rng(0)
        self._row = row
        self._rows, self._columns = (
            np.sort(rng.permutation(n)[:most])
            for n, most in zip((row.rows, row.results), JUDGED, strict=True)
        )
        one = epilogues.as_one(row.epilogue)
        self._epilogue = Epilogue(one.function, one.pairs)
        of_product = self._columns
        if one.pairs:
            of_product = np.concatenate([of_product, of_product + row.results])
        bias = host(arrays["bias"])[:, None, of_product] if row.bias else None
        self._want = formulas.gemm(
            host(arrays["A"][:, self._rows])[:, None],
            host(arrays["B"][:, of_product])[:, None],
            b_transposed=True,
            bias=bias,
        )

    def __call__(self, result: Any) -> Judged:
        c = host(result[:, self._rows][:, :, self._columns])[:, None]
        dtype = DType.of(self._row.dtype)
        verdict = check.gemm_verdict(
            self._want, self._row.hidden, dtype, c, c.shape[:-1], None, epilogue=self._epilogue
        )
        expected = self._expected()
        error = relative(c.astype(np.float64).reshape(expected.shape), expected)
        return Judged(error, verdict.worst, verdict.message)

    def _expected(self) -> Any:
        sums = self._want.out.reshape(len(self._rows), -1)
        at = np.arange(len(self._rows)), np.zeros(len(self._rows), np.int64)
        dtype = DType.of(self._row.dtype)
        return self._epilogue.applied(sums, np.zeros_like(sums), at, dtype, False)[0]


def epilogue_rows() -> list[EpilogueRow]:
    """Many tokens, few, and fewer than a tile has rows."""

    def row(tokens: int, epilogue: str, **options: Any) -> EpilogueRow:
        return EpilogueRow("gemm-epilogue", tokens, 6144, 4096, epilogue, **options)

    return [
        made
        for tokens in (16384, 512, 64)
        for made in (
            row(tokens, "relu", bias=True),
            row(tokens, "gelu_tanh", bias=True),
            row(tokens, "gelu", bias=True, least=1.05),
            row(tokens, "silu", least=1.05),
            row(tokens, "swiglu", least=1.05),
            row(tokens, "silu", preactivation=True, least=1.05),
            row(tokens, "swiglu", preactivation=True, least=1.05),
        )
    ]
