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
_SUMS = {
    "column_sums": (lambda row: row.results, lambda z: z.float().sum(0)),
    "row_squares": (lambda row: row.rows, lambda z: z.float().square().sum(1)),
}
"""How many there are, and torch's words for them."""
_LT = {"relu": False, "gelu_tanh": True}
"""Whether cuBLASLt's epilogue, behind its bias, is GELU."""


@dataclass(frozen=True)
class EpilogueRow:
    """``rows`` of ``hidden`` columns times a weight [columns, hidden], of bf16; a gate leaves half
    of the columns, of halves or ``interleaved``. ``sums``: of the result, beside it."""

    suite: str
    rows: int
    columns: int
    hidden: int
    epilogue: str
    bias: bool = False
    preactivation: bool = False
    interleaved: bool = False
    sums: str = ""
    dtype: str = "bfloat16"
    least: float = 1.0

    @property
    def name(self) -> str:
        parts = [f"{self.rows}×{self.columns}×{self.hidden} bf16", self.epilogue]
        more = [n for n in ("interleaved", "bias", "preactivation") if getattr(self, n)]
        return " ".join((*parts, *more, *[self.sums] * bool(self.sums)))

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

    def expression(self) -> epilogues.One:
        """Without sums."""
        if not self.interleaved:
            return self.epilogue
        activation = getattr(epilogues, _GATES[self.epilogue])
        return epilogues.gated(
            lambda gate, up, m, n, batch: activation(gate) * up, interleaved=True
        )

    def _with_sums(self, make: Make) -> epilogues.Epilogue:
        if not self.sums:
            return self.expression()
        out = make((_SUMS[self.sums][0](self),), "float32")
        if self.sums == "column_sums":
            return [self.expression(), epilogues.column_sums(out)]
        return [self.expression(), epilogues.row_sums(out, lambda acc, m, n, batch: acc * acc)]

    def descriptor(self, c: Any, epilogue: epilogues.Epilogue | None, **arrays: Any) -> Descriptor:
        return ks.BatchedGemmStrided(
            **arrays,
            C=c,
            M=self.rows,
            N=self.columns,
            K=self.hidden,
            batch=1,
            b_transposed=True,
            epilogue=epilogue,
        )

    def _written(self, make: Make) -> dict[str, Any]:
        shape = (1, self.rows, self.columns)
        return {"preactivation": make(shape, self.dtype)} if self.preactivation else {}

    def planned(self, session: Session) -> Iterable[Descriptor]:
        make, arrays = session.phantom, self.arrays(session.phantom)
        c = make((1, self.rows, self.results), self.dtype)
        yield self.descriptor(c, self._with_sums(make), **arrays, **self._written(make))
        yield self.descriptor(make((1, self.rows, self.columns), self.dtype), None, **arrays)

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays, written = self.arrays(session.random), self._written(session.poisoned)
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))
        epilogue = self._with_sums(session.poisoned)
        prepared.keep = arrays, written, epilogue
        prepared.ours(
            session,
            lambda c: self.descriptor(c, epilogue, **arrays, **written),
            lambda: session.poisoned((1, self.rows, self.results), self.dtype),
        )
        if not session.peers:
            return prepared
        x, w = arrays["A"][0], arrays["B"][0]
        bias = arrays["bias"][0] if self.bias else None
        self._peers(prepared, session, x, w, bias)
        plain = prepared.add(
            session,
            lambda c: self.descriptor(c, None, **arrays),
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
        run = layer if session.device == "cpu" else _compiled(layer)
        prepared.peer(eager, lambda: run(x, w, bias), lambda y: y[0][None])

    def layer(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """In torch's words: the result, with ``preactivation`` what it is of, and sums."""
        gated, interleaved = self.epilogue in _GATES, self.interleaved
        preactivation = self.preactivation
        activation = _TORCH[_GATES.get(self.epilogue, self.epilogue)]
        summed = _SUMS[self.sums][1] if self.sums else None

        def linear(
            x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
        ) -> tuple[torch.Tensor, ...]:
            y = functional.linear(x, w, bias)
            gate, up = y.chunk(2, dim=-1) if gated else (y, None)
            if interleaved:
                gate, up = y[..., ::2], y[..., 1::2]
            z = activation(gate) if up is None else activation(gate) * up
            more = () if summed is None else (summed(z),)
            return (z, y, *more) if preactivation else (z, *more)

        return linear


def _compiled(layer: Callable[..., Any]) -> Callable[..., Any]:
    """For its shapes alone: all rows' layers are the same code to torch, which else would compile
    it for any, and the ninth not at all."""
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(layer, dynamic=False)
    return compiled


class Judge:
    """Some rows and columns in float64."""

    def __init__(self, row: EpilogueRow, arrays: Mapping[str, Any]) -> None:
        rng = np.random.default_rng(0)
        self._row = row
        self._rows, self._columns = (
            np.sort(rng.permutation(n)[:most])
            for n, most in zip((row.rows, row.results), JUDGED, strict=True)
        )
        one = epilogues.as_one(row.expression())
        self._epilogue = Epilogue(one.function, one.pairs)
        of_product = self._columns
        if one.pairs:
            pairs = (2, 1) if row.interleaved else (1, row.results)
            first = pairs[0] * of_product
            of_product = np.stack([first, first + pairs[1]], int(row.interleaved)).reshape(-1)
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

    def row(tokens: int, **options: Any) -> EpilogueRow:
        return EpilogueRow("gemm-epilogue", tokens, 6144, 4096, **options)

    few: list[dict[str, Any]] = [
        {"epilogue": "relu", "bias": True, "least": 1.0},
        {"epilogue": "gelu", "bias": True},
        {"epilogue": "swiglu"},
    ]
    more: list[dict[str, Any]] = [
        {"epilogue": "gelu_tanh", "bias": True, "least": 1.0},
        {"epilogue": "silu"},
        {"epilogue": "swiglu", "interleaved": True},
        {"epilogue": "gelu", "preactivation": True},
        {"epilogue": "swiglu", "preactivation": True},
        {"epilogue": "gelu", "sums": "column_sums"},
        {"epilogue": "silu", "sums": "row_squares"},
    ]
    sizes = {16384: few + more, 512: few + more, 2048: few, 64: few}
    return [row(tokens, **{"least": 1.05, **one}) for tokens, rows in sizes.items() for one in rows]
