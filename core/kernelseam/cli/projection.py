"""The options that describe a projection, which is a sample's case."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer

from kernelseam.cli import shapes
from kernelseam.cli.asked import Asked
from kernelseam.cli.attention_options import PAGE_SIZE
from kernelseam.descriptors.projection.fields import rotation_style
from kernelseam.errors import InvalidValue
from kernelseam.samples.operand_layout import OperandLayout
from kernelseam.samples.projection_case import ProjectionCase

Kind = Annotated[str, typer.Option(help="qkv: before an attention; output: after it.")]
Hidden = Annotated[
    int | None, typer.Option(min=0, help="Hidden size of the model. [heads x head-dim]")
]
Tokens = Annotated[int | None, typer.Option(min=0, help="Tokens per sequence. [512]")]
Bias = Annotated[bool, typer.Option("--bias", help="Add a bias of --dtype.")]
Residual = Annotated[
    bool, typer.Option("--residual", help="With --kind output: add a residual of --dtype.")
]
Rotary = Annotated[
    str | None, typer.Option(help="With --kind qkv, rotary embedding: halves or pairs.")
]
Paged = Annotated[
    bool, typer.Option("--paged", help="With --kind qkv: keys and values go to shuffled pages.")
]
PageSize = Annotated[int | None, typer.Option(min=1, help=f"Keys per page. [{PAGE_SIZE}]")]
KvDtype = Annotated[
    str | None, typer.Option(help="Of pages in 8 bits: float8_e4m3fn or float8_e4m3fnuz.")
]
Varlen = Annotated[
    bool,
    typer.Option(
        "--varlen", help="Packed sequences of random lengths, up to --seq-len, at a cache's end."
    ),
]
_TIGHT = OperandLayout(aligned=False)
_OPERANDS = ("input", "attn_out", "weight", "residual", "q", "k", "v", "out")


def projection(
    *,
    kind: Kind = "qkv",
    batch: shapes.Batch = None,
    seq_len: Tokens = None,
    hidden: Hidden = None,
    heads: shapes.Heads = None,
    kv_heads: shapes.KvHeads = None,
    head_dim: shapes.HeadDim = None,
    dtype: shapes.Dtype = None,
    bias: Bias = False,
    residual: Residual = False,
    rotary: Rotary = None,
    paged: Paged = False,
    page_size: PageSize = None,
    kv_dtype: KvDtype = None,
    varlen: Varlen = False,
) -> Asked:
    """From options of a command (``WithOptions``); those left out take their defaults. Raises
    InvalidValue."""
    shapes.one_of("kind", kind, "qkv", "output")
    for option, value, only in (
        ("--residual", residual, "output"),
        ("--rotary", rotary, "qkv"),
        ("--kv-heads", kv_heads, "qkv"),
        ("--paged", paged, "qkv"),
    ):
        if shapes.given(value) and kind != only:
            raise InvalidValue(option, value, f"is for --kind {only}", "Leave it out")
    for option, value in (
        ("--page-size", page_size),
        ("--kv-dtype", kv_dtype),
        ("--varlen", varlen),
    ):
        if shapes.given(value) and not paged:
            raise InvalidValue(option, value, "is of pages", "Give --paged too")
    heads, head_dim = shapes.default(heads, 8), shapes.default(head_dim, 64)
    of_operands = shapes.dtype_of("float16" if dtype is None else dtype, "dtype")
    of_pages = shapes.stored_dtype(kv_dtype, "--kv-dtype")
    batch, seq_len = shapes.default(batch, 1), shapes.default(seq_len, 512)
    drawn = np.random.default_rng(0).integers(1, max(seq_len, 1) + 1, batch)
    sequences = tuple(drawn.tolist()) if varlen and seq_len else ()
    if rotary is not None:
        rotation_style("rotary_style", rotary)
    case = ProjectionCase(
        "",
        f"{kind}_projection",
        of_operands,
        1 if sequences else batch,
        sum(sequences) if sequences else seq_len,
        shapes.default(hidden, heads * head_dim),
        heads,
        shapes.default(kv_heads, heads),
        head_dim,
        bias=of_operands if bias else None,
        residual=of_operands if residual else None,
        rotary=rotary or "",
        rotary_dim=head_dim // 2 * 2,
        operand_layouts=() if paged else tuple((n, _TIGHT) for n in _OPERANDS),
        page_size=(page_size or PAGE_SIZE) if paged else 0,
        sequences=sequences,
        cached=varlen,
        dtype_pages=of_pages,
        scaled="heads" if of_pages else "",
    )
    return Asked(case)
