"""The options that describe a problem, and the batched GEMM of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from kernelseam.cli.asked import Asked
from kernelseam.cli.output import json_alone
from kernelseam.dtypes import E4M3, FLOATING, DType
from kernelseam.epilogues import NAMED
from kernelseam.errors import InvalidValue, UnknownName
from kernelseam.plugins import plugins
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.operand_layout import OperandLayout

SHORT_DTYPES = {
    f"{prefix}{bits}": name
    for bits, name in (("16", "float16"), ("32", "float32"), ("64", "float64"))
    for prefix in ("f", "fp")
} | {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz"}
"""DType names by their short forms."""


def dtype_of(name: str, field: str, fp8: bool = False, narrow: str = "") -> DType:
    """A dtype by its name or a short one; ``fp8``: those of 8 bits too. ``narrow``: else the
    options that take them. Raises UnknownName."""
    try:
        return DType.of(SHORT_DTYPES.get(name, name), field, fp8=fp8)
    except UnknownName as e:  # there is no array to convert
        remedy = "Name one of these; short: bf16, f16, f32, f64" + ", e4m3, e4m3fnuz" * fp8
        remedy += f"; of 8 bits: {narrow}" if narrow else ""
        raise UnknownName(e.field, e.value, e.rule, remedy) from None


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


Batch = Annotated[int | None, typer.Option(min=0, help="Problems in the batch. [1]")]
Heads = Annotated[int | None, typer.Option(min=0, help="Heads (of queries). [attention 8, gemm 1]")]
SeqLen = Annotated[int | None, typer.Option(min=0, help="Queries, S_q. [512]")]
KvSeqLen = Annotated[int | None, typer.Option(min=0, help="Keys, S_k. [as --seq-len]")]
HeadDim = Annotated[int | None, typer.Option(min=1, help="Columns of queries and keys. [64]")]
KvHeads = Annotated[int | None, typer.Option(min=0, help="Heads of keys and values. [as --heads]")]
ValueDim = Annotated[int | None, typer.Option(min=0, help="Columns of values. [as --head-dim]")]
Causal = Annotated[bool, typer.Option("--causal", help="Query i sees keys up to i + S_k - S_q.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        autocompletion=names_of_dtypes,
        help="float16, bfloat16, float32 or float64; also fp16, bf16, f32. [float16]",
    ),
]
AttentionLayout = Annotated[
    str,
    typer.Option(autocompletion=_some("bhsd", "bshd"), help="bhsd or bshd: the order of the axes."),
]

Rows = Annotated[int | None, typer.Option(min=0, help="Rows of C. [512]")]
Columns = Annotated[int | None, typer.Option(min=0, help="Columns of C. [512]")]
Inner = Annotated[int | None, typer.Option(min=0, help="Columns of A, rows of B. [512]")]
ATransposed = Annotated[bool, typer.Option("--a-transposed", help="A is K x M in memory.")]
BTransposed = Annotated[bool, typer.Option("--b-transposed", help="B is N x K in memory.")]
Bias = Annotated[
    str | None, typer.Option(help="Add a bias of this dtype, N values for each matrix.")
]
Residual = Annotated[str | None, typer.Option(help="Add a residual of this dtype, of C's shape.")]
EpilogueOption = Annotated[
    str | None,
    typer.Option(
        autocompletion=_some(*NAMED),
        help="What becomes of C's elements: gelu, silu, swiglu, … or a function, FILE:NAME.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        autocompletion=_some("ieee", "tf32", "tf32x3"),
        help="Products of float32: ieee, tf32 or tf32x3. [ieee]",
    ),
]
OutDtype = Annotated[
    str | None,
    typer.Option(
        autocompletion=names_of_dtypes, help="Dtype of C; without groups also e4m3. [as --dtype]"
    ),
]
GemmLayout = Annotated[
    str,
    typer.Option(
        autocompletion=_some("strided", "pointers"),
        help="strided, or pointers: arrays of addresses.",
    ),
]
Spacing = Annotated[
    str,
    typer.Option(
        autocompletion=_some("scattered", "even"),
        help="With pointers: scattered, or even, which is run as strided.",
    ),
]

Backend = Annotated[
    str | None,
    typer.Option(
        autocompletion=names_of_backends,
        help="numpy, or that of a plugin; NAME:INDEX for one device. [the best]",
    ),
]
Implementation = Annotated[str | None, typer.Option(help="By name. [the cheapest]")]


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


def one_of(option: str, value: str, *names: str) -> str:
    """The value, if it is one of the names. Raises InvalidValue."""
    if value not in names:
        raise InvalidValue(option, value, f"must be one of {', '.join(names)}", "Name one of these")
    return value


def given(value: object) -> bool:
    """Whether an option without a default is on the command line; 0 is."""
    return value is not None and value is not False


def default(value: int | None, otherwise: int) -> int:
    """The value, or what stands for one that is left out."""
    return otherwise if value is None else value


def _dense(columns: int, dtype: DType) -> OperandLayout:
    """Rows without gaps; where they fill 16 bytes, matrices of lists begin at multiples of it."""
    return OperandLayout(aligned=columns * dtype.itemsize % 16 == 0)


def product(
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
) -> Asked:
    """A batched GEMM from options of a command (``WithOptions``); those left out take their
    defaults. Raises InvalidValue."""
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
    of_operands = dtype_of("float16" if dtype is None else dtype, "dtype", fp8=True)
    lists = one_of("layout", layout, "strided", "pointers") == "pointers"
    scattered = one_of("spacing", spacing, "scattered", "even") == "scattered"
    if not (lists or scattered):
        raise InvalidValue(
            "--spacing", spacing, "describes lists of addresses", "Give --layout pointers too"
        )
    M, N, K = (default(x, 512) for x in (m, n, k))
    plain = GemmCase(
        "",
        of_operands,
        M=M,
        N=N,
        K=K,
        batch=default(batch, 1),
        num_heads=default(heads, 1),
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        dtype_c=out,
        bias=by_column,
        residual=added,
        precision=precision,
        epilogue=epilogue or "",
        view="host" if lists else "strided",
        scattered=lists and scattered,
    )
    case = replace(
        plain,
        a=_dense(M if a_transposed else K, of_operands),
        b=_dense(K if b_transposed else N, of_operands),
        c=_dense(plain.columns, plain.out_dtype),
        bias_layout=_dense(N, by_column or of_operands),
        residual_layout=_dense(N, added or of_operands),
    )
    return Asked(case, tuple(f"--{n}" for n, x in (("m", m), ("n", n), ("k", k)) if x is not None))
