"""The projection of an attention's result back to hidden states, with what is added to it, in one
product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from kernelseam.descriptors.common.operands import (
    describe_all,
    dtype_of,
    pointer,
    required,
)
from kernelseam.descriptors.common.strided import StridedDescriptor
from kernelseam.descriptors.common.validation import extent, three, two
from kernelseam.descriptors.projection.arrays import output_fields
from kernelseam.descriptors.projection.problem import OutputProjectionProblem, OutputProjectionSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class OutputProjection(StridedDescriptor[OutputProjectionProblem]):
    """out = attn_out·weightᵀ + bias + residual, where a row of attn_out is the heads of a token one
    after the other.

    ``attn_out`` [batch, num_heads, S, head_dim] with any strides: head-major as an attention leaves
    it, token-major, or with ``num_heads`` 1 rows [batch, S, head_dim]. ``weight`` [hidden,
    num_heads·head_dim] as torch.nn.Linear has it, ``bias`` [hidden], ``residual`` and out [batch,
    S, hidden]. The residual may be out itself (the same memory and strides) or be broadcast by
    strides of 0.

    Operands are arrays, addresses (ints), or None until ``bind``; bias and residual that ``bind``
    will give are announced by address 0. Strides count elements; one left out packs row-major
    around the others.

    ``dtype`` (of attn_out and weight) defaults to the arrays'; ``dtype_out``, ``dtype_bias`` and
    ``dtype_residual`` to theirs, else to dtype. Products are summed in float32 (float64 of
    float64), and rounded once, after the residual was added. Raises InvalidValue (naming field,
    value, rule and remedy) where no such problem exists.
    """

    batch: int
    S: int
    hidden: int
    head_dim: int
    num_heads: int = 1
    attn_out: object = field(default=None, repr=False)
    weight: object = field(default=None, repr=False)
    bias: object = field(default=None, repr=False)
    residual: object = field(default=None, repr=False)
    out: object = field(default=None, repr=False)
    dtype: DType | str | None = None
    dtype_out: DType | str | None = None
    dtype_bias: DType | str | None = None
    dtype_residual: DType | str | None = None
    stride_attn_out_batch: int | None = None
    stride_attn_out_head: int | None = None
    stride_attn_out_row: int | None = None
    stride_weight_row: int | None = None
    stride_residual_batch: int | None = None
    stride_residual_row: int | None = None
    stride_out_batch: int | None = None
    stride_out_row: int | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attn_out": ("batch", "head", "row"),
        "weight": ("row",),
        "bias": (),
        "residual": ("batch", "row"),
        "out": ("batch", "row"),
    }

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        dtype = required(
            "dtype",
            dtype_of("dtype", self.dtype, infos, ("attn_out", "weight")),
            "attn_out and weight",
        )
        out = self._kind("dtype_out", ("out",), dtype, infos)
        self._refuse_idle("bias", "dtype_bias")
        self._refuse_idle("residual", "dtype_residual")
        batch, S, hidden = (extent(n, getattr(self, n)) for n in ("batch", "S", "hidden"))
        heads, dim = extent("num_heads", self.num_heads, 1), extent("head_dim", self.head_dim)
        width = extent("num_heads·head_dim", heads * dim)
        extent("batch·S", batch * S)
        bias, residual = (
            None if getattr(self, n) is None else self._kind(f"dtype_{n}", (n,), dtype, infos)
            for n in ("bias", "residual")
        )
        pointer("bias", self.bias, infos)
        rows = (batch, S, hidden)
        of_attn_out = three(self._strides_of("attn_out", (batch, heads, S, dim), dtype))
        (of_weight,) = self._strides_of("weight", (hidden, width), dtype)
        of_out, of_residual = (
            two(self._strides_of("out", rows, out)),
            two(self._strides_of("residual", rows, residual or out)),
        )
        apart = heads > 1 and of_attn_out[1] != dim
        if not apart:
            heads, dim, of_attn_out = 1, width, (of_attn_out[0], width, of_attn_out[2])
        problem = OutputProjectionProblem(
            OutputProjectionSpec(
                dtype,
                out,
                bias,
                residual,
                apart,
                self._vector("attn_out", (batch, heads, S, dim), of_attn_out, dtype, infos),
                self._vector("weight", (hidden, width), (of_weight,), dtype, infos),
                self._vector("out", rows, of_out, out, infos),
                self._vector("residual", rows, of_residual, residual, infos) if residual else 16,
            ),
            batch,
            S,
            hidden,
            heads,
            dim,
            of_attn_out,
            of_weight,
            of_out,
            of_residual if residual else (0, 0),
        )
        self._keep(problem, infos)

    def _found(self) -> dict[str, object]:
        s = self._problem.spec
        kinds = {"dtype": s.dtype, "dtype_out": s.dtype_out}
        return {**kinds, "dtype_bias": s.bias, "dtype_residual": s.residual}

    @classmethod
    def from_arrays(
        cls, attn_out: object, weight: object, out: object, *, layout: str = "bhsd", **options: Any
    ) -> OutputProjection:
        """The projection of arrays as they lie in memory: nothing is copied.

        ``attn_out`` [B, S, columns], or [B, H, S, D] (``layout`` "bhsd"; "bshd": the head after the
        row); out and ``residual`` [B, S, hidden]. Without the first axis [S, columns] and [S,
        hidden]. Any strides with a contiguous last axis. ``options``: bias, residual and the
        descriptor's other fields.
        """
        return cls(
            **output_fields({"attn_out": attn_out, "weight": weight, "out": out}, layout, options)
        )
