"""The options that describe a problem, and descriptors over placeholder addresses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from kernelseam.cli.output import json_alone
from kernelseam.cli.running import epilogue_on, normal
from kernelseam.contract import Device
from kernelseam.descriptors import BatchedGemmPointers, BatchedGemmStrided
from kernelseam.descriptors.common.operands import describe
from kernelseam.dtypes import E4M3, FLOATING, DType
from kernelseam.epilogues import NAMED, Gated, as_one
from kernelseam.errors import InvalidValue, UnknownName
from kernelseam.expressions.epilogues import traced_epilogue
from kernelseam.plugins import plugins
from kernelseam.samples.epilogues import PAIRS, Extents, epilogue_named

SHORT_DTYPES = {
    f"{prefix}{bits}": name
    for bits, name in (("16", "float16"), ("32", "float32"), ("64", "float64"))
    for prefix in ("f", "fp")
} | {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz"}
"""DType names by their short forms."""


def dtype_of(name: str, field: str, fp8: bool = False) -> DType:
    """A dtype by its name or a short one; ``fp8``: those of 8 bits too. Raises UnknownName."""
    try:
        return DType.of(SHORT_DTYPES.get(name, name), field, fp8=fp8)
    except UnknownName as e:  # there is no array to convert
        short = "bf16, f16, f32, f64" + ", e4m3, e4m3fnuz" * fp8
        raise UnknownName(e.field, e.value, e.rule, f"Name one of these; short: {short}") from None


def stored_dtype(name: str | None, option: str) -> DType | None:
    """A dtype of 8 bits; None where none is named. Raises UnknownName."""
    if name is None:
        return None
    result = DType.of(SHORT_DTYPES.get(name, name), option, floating=False, fp8=True)
    if not result.is_fp8:
        kinds = ", ".join(map(str, E4M3))
        raise UnknownName(option, name, f"must be one of {kinds}", "Name one of these")
    return result


def _some(*values: str) -> Callable[[], list[str]]:
    """For the shell's completion."""
    return lambda: list(values)


def names_of_dtypes() -> list[str]:
    """For the shell's completion."""
    return [d.value for d in FLOATING]


def names_of_backends() -> list[str]:
    """For the shell's completion."""
    return list(plugins().registry.backends)


Batch = Annotated[int | None, typer.Option("--batch", min=0, help="Problems in the batch. [1]")]
Heads = Annotated[
    int | None, typer.Option("--heads", min=0, help="Heads (of queries). [attention 8, gemm 1]")
]
SeqLen = Annotated[int | None, typer.Option("--seq-len", min=0, help="Queries, S_q. [512]")]
KvSeqLen = Annotated[
    int | None, typer.Option("--kv-seq-len", min=0, help="Keys, S_k. [as --seq-len]")
]
HeadDim = Annotated[
    int | None, typer.Option("--head-dim", min=1, help="Columns of queries and keys. [64]")
]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", min=0, help="Heads of keys and values. [as --heads]")
]
ValueDim = Annotated[
    int | None, typer.Option("--value-dim", min=0, help="Columns of values. [as --head-dim]")
]
Causal = Annotated[bool, typer.Option("--causal", help="Query i sees keys up to i + S_k - S_q.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        autocompletion=names_of_dtypes,
        help="float16, bfloat16, float32 or float64; also fp16, bf16, f32. [float16]",
    ),
]
AttentionLayout = Annotated[
    str,
    typer.Option(
        "--layout",
        autocompletion=_some("bhsd", "bshd"),
        help="bhsd or bshd: the order of the axes.",
    ),
]

Rows = Annotated[int | None, typer.Option("--m", min=0, help="Rows of C. [512]")]
Columns = Annotated[int | None, typer.Option("--n", min=0, help="Columns of C. [512]")]
Inner = Annotated[int | None, typer.Option("--k", min=0, help="Columns of A, rows of B. [512]")]
ATransposed = Annotated[bool, typer.Option("--a-transposed", help="A is K x M in memory.")]
BTransposed = Annotated[bool, typer.Option("--b-transposed", help="B is N x K in memory.")]
Bias = Annotated[
    str | None, typer.Option("--bias", help="Add a bias of this dtype, N values for each matrix.")
]
Residual = Annotated[
    str | None, typer.Option("--residual", help="Add a residual of this dtype, of C's shape.")
]
EpilogueOption = Annotated[
    str | None,
    typer.Option(
        "--epilogue",
        autocompletion=_some(*NAMED),
        help="What becomes of C's elements: gelu, silu, swiglu, … or a function, FILE:NAME.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        autocompletion=_some("ieee", "tf32", "tf32x3"),
        help="Products of float32: ieee, tf32 or tf32x3. [ieee]",
    ),
]
OutDtype = Annotated[
    str | None,
    typer.Option(
        "--out-dtype",
        autocompletion=names_of_dtypes,
        help="Dtype of C; without groups also e4m3. [as --dtype]",
    ),
]
GemmLayout = Annotated[
    str,
    typer.Option(
        "--layout",
        autocompletion=_some("strided", "pointers"),
        help="strided, or pointers: arrays of addresses.",
    ),
]
Spacing = Annotated[
    str,
    typer.Option(
        "--spacing",
        autocompletion=_some("scattered", "even"),
        help="With pointers: scattered, or even, which is run as strided.",
    ),
]

Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        autocompletion=names_of_backends,
        help="numpy, or that of a plugin; NAME:INDEX for one device. [the best]",
    ),
]
Implementation = Annotated[
    str | None, typer.Option("--implementation", help="By name. [the cheapest]")
]


def _alone(context: typer.Context, wanted: bool) -> bool:
    if wanted:
        context.obj.enter_context(json_alone())
    return wanted


Json = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_alone,
        is_eager=True,
        help="Print one JSON object, and nothing else, on standard output.",
    ),
]

PLACEHOLDER_ADDRESSES = {
    "A": 1 << 40,
    "B": 1 << 50,
    "C": 1 << 60,
    "bias": 1 << 45,
    "residual": 1 << 55,
}
"""Addresses of matrices of plans that never run: far apart, multiples of every alignment."""


def one_of(option: str, value: str, *names: str) -> str:
    """The value, if it is one of the names. Raises InvalidValue."""
    if value not in names:
        raise InvalidValue(option, value, f"must be one of {', '.join(names)}", "Name one of these")
    return value


def default(value: int | None, otherwise: int) -> int:
    """The value, or what stands for one that is left out."""
    return otherwise if value is None else value


@dataclass(frozen=True)
class GemmShape:
    """Extents and options of a batched GEMM, and the layout of its matrices."""

    batch: int
    heads: int
    M: int
    N: int
    K: int
    a_transposed: bool
    b_transposed: bool
    dtype: DType
    layout: str
    spacing: str
    out: DType | None = None
    bias: DType | None = None
    residual: DType | None = None
    precision: str | None = None
    epilogue: str | None = None
    named: tuple[str, ...] = ()
    """Options of extents that were given."""

    operation = "gemm"

    @classmethod
    def of(
        cls,
        *,
        batch: Batch = None,
        heads: Heads = None,
        m: Rows = None,
        n: Columns = None,
        k: Inner = None,
        a_transposed: ATransposed = False,
        b_transposed: BTransposed = False,
        dtype: Dtype = None,
        out_dtype: OutDtype = None,
        bias: Bias = None,
        residual: Residual = None,
        precision: Precision = None,
        epilogue: EpilogueOption = None,
        layout: GemmLayout = "strided",
        spacing: Spacing = "scattered",
    ) -> GemmShape:
        """From options of a command (``WithOptions``); those left out take their defaults. Raises
        InvalidValue."""
        if epilogue is not None and layout != "strided":
            raise InvalidValue("--epilogue", epilogue, "is of strided memory", "Leave --layout out")
        out, by_column, added = (
            None if kind is None else dtype_of(kind, option, fp8=option == "--out-dtype")
            for option, kind in (
                ("--out-dtype", out_dtype),
                ("--bias", bias),
                ("--residual", residual),
            )
        )
        return cls(
            default(batch, 1),
            default(heads, 1),
            default(m, 512),
            default(n, 512),
            default(k, 512),
            a_transposed,
            b_transposed,
            dtype_of("float16" if dtype is None else dtype, "dtype", fp8=True),
            one_of("layout", layout, "strided", "pointers"),
            one_of("spacing", spacing, "scattered", "even"),
            out,
            by_column,
            added,
            precision,
            epilogue,
            tuple(f"--{n}" for n, x in (("m", m), ("n", n), ("k", k)) if x is not None),
        )

    @property
    def matrices(self) -> int:
        """batch·heads."""
        return self.batch * self.heads

    @property
    def elements(self) -> int:
        """Of the results."""
        return math.prod(self.shapes()["C"])

    @property
    def product(self) -> dict[str, Any]:
        """The descriptors' fields that are those of every product."""
        return {
            "a_transposed": self.a_transposed,
            "b_transposed": self.b_transposed,
            "dtype": self.dtype,
            "dtype_c": self.dtypes()["C"],
            "precision": self.precision,
        }

    def function(self, results: int | None = None) -> Gated | None:
        """The epilogue of so many results, over arrays on the host. Raises InvalidValue."""
        if self.epilogue is None:
            return None
        count = self.matrices if results is None else results
        columns = self.N // 2 if self.epilogue in PAIRS else self.N
        return as_one(epilogue_named(self.epilogue, Extents(count, self.M, columns)))

    def dtypes(self) -> dict[str, DType]:
        """Dtypes of the given operands."""
        added = (("bias", self.bias), ("residual", self.residual))
        return {
            "A": self.dtype,
            "B": self.dtype,
            "C": self.out or (self.dtype.accumulator if self.dtype.is_fp8 else self.dtype),
            **{n: d for n, d in added if d},
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the given operands in memory."""
        function = self.function()
        pairs = function is not None and bool(function.pairs)
        c = (self.M, self.N // 2 if pairs else self.N)
        matrices = {
            "A": (self.K, self.M) if self.a_transposed else (self.M, self.K),
            "B": (self.N, self.K) if self.b_transposed else (self.K, self.N),
            "C": c,
            "bias": (self.N,),
            "residual": (self.M, self.N),
        }
        return {n: (self.batch, self.heads, *matrices[n]) for n in self.dtypes()}

    def orders(self) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """With pointers: by operand, the matrix of its allocation that each entry points to."""
        count, names = self.matrices, self.dtypes()
        if self.spacing == "even":
            return dict.fromkeys(names, np.arange(count))
        rng = np.random.default_rng(0)
        return {name: rng.permutation(count) for name in names}

    def descriptor(self, **operands: Any) -> BatchedGemmStrided | BatchedGemmPointers:
        """The descriptor over operands by name, which lists of addresses point into; those left out
        have no memory, or placeholder addresses. Raises InvalidValue."""
        dtypes = self.dtypes()
        extents: dict[str, Any] = {
            "M": self.M,
            "N": self.N,
            "K": self.K,
            "batch": self.batch,
            "num_heads": self.heads,
            "dtype_bias": self.bias,
            "dtype_residual": self.residual,
            **self.product,
        }
        if (function := self.function()) is not None:
            extents["epilogue"] = traced_epilogue(function.function, function.pairs)
        bound: dict[str, Any] = {n: 0 for n in ("bias", "residual") if n in dtypes}
        if self.layout == "strided":
            return BatchedGemmStrided(**{**extents, **bound, **operands})
        # checks extents before pointer arrays of that length are built
        BatchedGemmStrided(**extents, **bound)
        lists: dict[str, Any] = {}
        for name, order in self.orders().items():
            first = PLACEHOLDER_ADDRESSES[name]
            if name in operands:
                first = describe(name, operands[name]).pointer
            lists[f"{name}_ptrs"] = first + order * (
                math.prod(self.shapes()[name][2:]) * dtypes[name].itemsize
            )
        return BatchedGemmPointers(**extents, **lists)

    def operands(self, device: Device, seed: int) -> dict[str, Any]:
        """Random arrays on a device, and the epilogue over what it captured there."""
        runtime = plugins().backend(device.backend).runtime
        rng, dtypes = np.random.default_rng(seed), self.dtypes()
        arrays: dict[str, Any] = {}
        for name, shape in self.shapes().items():
            if name == "C":
                arrays[name] = runtime.empty(shape, dtypes[name], device)
            else:
                arrays[name] = runtime.from_host(normal(rng, shape, dtypes[name]), device)
        if (function := self.function()) is not None:
            arrays["epilogue"] = epilogue_on(device, function)
        return arrays
