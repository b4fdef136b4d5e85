"""The options that describe a projection, and its descriptor over placeholder addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kernelseam.cli import shapes
from kernelseam.descriptors import OutputProjection, QkvProjection
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

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
    ) -> ProjectionShape:
        """From options of a command (``with_options``); those left out take their defaults. Raises
        InvalidValue."""
        shapes.one_of("kind", kind, "qkv", "output")
        for option, value, only in (
            ("--residual", residual, "output"),
            ("--rotary", rotary, "qkv"),
            ("--kv-heads", kv_heads, "qkv"),
        ):
            if value not in (None, False) and kind != only:
                raise InvalidValue(option, value, f"is for --kind {only}", "Leave it out")
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
        )

    def descriptor(self) -> QkvProjection | OutputProjection:
        """The descriptor, over placeholder addresses. Raises InvalidValue."""
        common: dict[str, Any] = {
            "batch": self.batch,
            "S": self.seq_len,
            "hidden": self.hidden,
            "num_heads": self.heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }
        if self.bias:
            common["bias"] = 0
        if self.kind == "output":
            if self.residual:
                common["residual"] = 0
            return OutputProjection(**common)
        rotary: dict[str, Any] = {
            "rotary_style": self.rotary,
            "max_position": self.seq_len,
            "cos": 0,
            "sin": 0,
        }
        rotary["rotary_dim"] = self.head_dim // 2 * 2
        return QkvProjection(**common, kv_heads=self.kv_heads, **(rotary if self.rotary else {}))
