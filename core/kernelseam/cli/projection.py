"""The options that describe a projection, which is a sample's case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from kernelseam.cli import shapes
from kernelseam.cli.attention_options import PAGE_SIZE
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.descriptors.projection.fields import rotation_style
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.samples.data.projection import describe
from kernelseam.samples.operand_layout import OperandLayout
from kernelseam.samples.operations.operands import layout
from kernelseam.samples.projection_case import ProjectionCase

Kind = Annotated[str, typer.Option("--kind", help="qkv: before an attention; output: after it.")]
Hidden = Annotated[
    int | None, typer.Option("--hidden", min=0, help="Hidden size of the model. [heads x head-dim]")
]
Tokens = Annotated[int | None, typer.Option("--seq-len", min=0, help="Tokens per sequence. [512]")]
Bias = Annotated[bool, typer.Option("--bias", help="Add a bias of --dtype.")]
Residual = Annotated[
    bool, typer.Option("--residual", help="With --kind output: add a residual of --dtype.")
]
Rotary = Annotated[
    str | None, typer.Option("--rotary", help="With --kind qkv, rotary embedding: halves or pairs.")
]
Paged = Annotated[
    bool, typer.Option("--paged", help="With --kind qkv: keys and values go to shuffled pages.")
]
PageSize = Annotated[
    int | None, typer.Option("--page-size", min=1, help=f"Keys per page. [{PAGE_SIZE}]")
]
KvDtype = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="Of pages in 8 bits: float8_e4m3fn or float8_e4m3fnuz."),
]
Varlen = Annotated[
    bool,
    typer.Option(
        "--varlen", help="Packed sequences of random lengths, up to --seq-len, at a cache's end."
    ),
]
_TIGHT = OperandLayout(aligned=False)
_OPERANDS = ("input", "attn_out", "weight", "residual", "q", "k", "v", "out")


@dataclass(frozen=True)
class ProjectionShape:
    """Extents and options of a projection."""

    kind: str
    batch: int
    seq_len: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: DType
    bias: bool
    residual: bool
    rotary: str | None
    page_size: int
    """0: k and v are not paged."""
    kv_dtype: DType | None
    varlen: bool

    @classmethod
    def of(
        cls,
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
    ) -> ProjectionShape:
        """From options of a command (``WithOptions``); those left out take their defaults. Raises
        InvalidValue."""
        shapes.one_of("kind", kind, "qkv", "output")
        for option, value, only in (
            ("--residual", residual, "output"),
            ("--rotary", rotary, "qkv"),
            ("--kv-heads", kv_heads, "qkv"),
            ("--paged", paged, "qkv"),
        ):
            if value not in (None, False) and kind != only:
                raise InvalidValue(option, value, f"is for --kind {only}", "Leave it out")
        for option, value in (
            ("--page-size", page_size),
            ("--kv-dtype", kv_dtype),
            ("--varlen", varlen),
        ):
            if value not in (None, False) and not paged:
                raise InvalidValue(option, value, "is of pages", "Give --paged too")
        heads, head_dim = 8 if heads is None else heads, 64 if head_dim is None else head_dim
        return cls(
            kind,
            1 if batch is None else batch,
            512 if seq_len is None else seq_len,
            heads * head_dim if hidden is None else hidden,
            heads,
            heads if kv_heads is None else kv_heads,
            head_dim,
            shapes.dtype_of("float16" if dtype is None else dtype, "dtype"),
            bias,
            residual,
            rotary,
            (page_size or PAGE_SIZE) if paged else 0,
            shapes.stored_dtype(kv_dtype, "--kv-dtype"),
            varlen,
        )

    def case(self) -> ProjectionCase:
        """As data: pages, tables, lengths and offsets too."""
        drawn = np.random.default_rng(0).integers(1, max(self.seq_len, 1) + 1, self.batch)
        sequences = tuple(drawn.tolist()) if self.varlen and self.seq_len else ()
        if self.rotary is not None:
            rotation_style("rotary_style", self.rotary)
        return ProjectionCase(
            "",
            f"{self.kind}_projection",
            self.dtype,
            1 if sequences else self.batch,
            sum(sequences) if sequences else self.seq_len,
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            bias=self.dtype if self.bias else None,
            residual=self.dtype if self.residual else None,
            rotary=self.rotary or "",
            rotary_dim=self.head_dim // 2 * 2,
            operand_layouts=() if self.page_size else tuple((n, _TIGHT) for n in _OPERANDS),
            page_size=self.page_size,
            sequences=sequences,
            cached=self.varlen,
            dtype_pages=self.kv_dtype,
            scaled="heads" if self.kv_dtype else "",
        )

    def descriptor(self) -> Descriptor:
        """The descriptor, over placeholder addresses. Raises InvalidValue."""
        case = self.case()
        at = layout(case)
        return describe(case, at, dict.fromkeys(at.placements, 0))
