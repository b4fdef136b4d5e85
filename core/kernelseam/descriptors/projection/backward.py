"""The projections' gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.common.operands import (
    describe_all,
    dtype_of,
    pointer,
    required,
)
from kernelseam.descriptors.common.strided import StridedDescriptor
from kernelseam.descriptors.common.validation import extent, three, two
from kernelseam.descriptors.projection.arrays import output_bwd_fields, qkv_bwd_fields
from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    OutputProjectionBwdSpec,
    QkvProjectionBwdProblem,
    QkvProjectionBwdSpec,
)
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class QkvProjectionBwd(StridedDescriptor[QkvProjectionBwdProblem]):
    """What a loss takes from a QkvProjection's operands, given what it takes from q, k and v
    (before any rotation):

    d_input = [dq dk dv]·weight, d_weight = [dq dk dv]ᵀ·input, d_bias = Σ [dq dk dv] over all
    tokens, the columns of [dq dk dv] being the heads of dq, then of dk, then of dv.

    ``dq`` [batch, num_heads, S, head_dim], ``dk`` and ``dv`` [batch, kv_heads, S, head_dim], each
    with strides of its own; ``input`` and ``d_input`` [batch, S, hidden]; ``weight`` and
    ``d_weight`` [(num_heads + 2·kv_heads)·head_dim, hidden]; ``d_bias`` as long as the weight has
    rows. A gradient is computed where it is given; address 0 says that ``bind`` will give it.
    ``weight`` is read for d_input alone, ``input`` for d_weight alone.

    Strides in elements default to row-major. ``dtype`` is that of everything but d_bias, whose
    ``dtype_bias`` is its array's, else dtype. All sums are float32 (float64 of float64) in an order
    that is fixed: the same bits every time. Raises InvalidValue where no such problem exists.
    """

    batch: int
    S: int
    hidden: int
    num_heads: int
    head_dim: int
    kv_heads: int | None = None
    dq: object = field(default=None, repr=False)
    dk: object = field(default=None, repr=False)
    dv: object = field(default=None, repr=False)
    input: object = field(default=None, repr=False)
    weight: object = field(default=None, repr=False)
    d_input: object = field(default=None, repr=False)
    d_weight: object = field(default=None, repr=False)
    d_bias: object = field(default=None, repr=False)
    dtype: DType | str | None = None
    dtype_bias: DType | str | None = None
    stride_dq_batch: int | None = None
    stride_dq_head: int | None = None
    stride_dq_row: int | None = None
    stride_dk_batch: int | None = None
    stride_dk_head: int | None = None
    stride_dk_row: int | None = None
    stride_dv_batch: int | None = None
    stride_dv_head: int | None = None
    stride_dv_row: int | None = None
    stride_input_batch: int | None = None
    stride_input_row: int | None = None
    stride_weight_row: int | None = None
    stride_d_input_batch: int | None = None
    stride_d_input_row: int | None = None
    stride_d_weight_row: int | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("dq", "dk", "dv"), ("batch", "head", "row")),
        "input": ("batch", "row"),
        "weight": ("row",),
        "d_input": ("batch", "row"),
        "d_weight": ("row",),
        "d_bias": (),
    }

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        named = tuple(n for n in self.AXES if n != "d_bias")
        dtype = required(
            "dtype", dtype_of("dtype", self.dtype, infos, named), "dq, dk, dv, input and weight"
        )
        batch, S, hidden = (extent(n, getattr(self, n)) for n in ("batch", "S", "hidden"))
        heads, dim = extent("num_heads", self.num_heads, 1), extent("head_dim", self.head_dim, 1)
        kv_heads = heads if self.kv_heads is None else extent("kv_heads", self.kv_heads, 1)
        width = extent("(num_heads + 2·kv_heads)·head_dim", (heads + 2 * kv_heads) * dim)
        extent("batch·S", batch * S)
        d_bias = wanted(self, "d_input", infos)
        shapes: dict[str, tuple[int, ...]] = {
            "dq": (batch, heads, S, dim),
            **dict.fromkeys(("dk", "dv"), (batch, kv_heads, S, dim)),
            **dict.fromkeys(("input", "d_input"), (batch, S, hidden)),
            **dict.fromkeys(("weight", "d_weight"), (width, hidden)),
        }
        strides, vectors = self._walks(shapes, dtype, infos)
        problem = QkvProjectionBwdProblem(
            QkvProjectionBwdSpec(
                dtype,
                self.d_input is not None,
                self.d_weight is not None,
                self._kind("dtype_bias", ("d_bias",), dtype, infos) if d_bias else None,
                min(vectors[n] for n in ("dq", "dk", "dv")),
                vectors["input"],
                vectors["weight"],
                vectors["d_input"],
                vectors["d_weight"],
            ),
            batch,
            S,
            hidden,
            heads,
            kv_heads,
            dim,
            three(strides["dq"]),
            three(strides["dk"]),
            three(strides["dv"]),
            two(strides["input"]),
            strides["weight"][0],
            two(strides["d_input"]),
            strides["d_weight"][0],
        )
        self._keep(problem, infos)

    def _found(self) -> dict[str, object]:
        spec = self._problem.spec
        return {"dtype": spec.dtype, "dtype_bias": spec.d_bias}

    @classmethod
    def from_arrays(
        cls, dq: object, dk: object, dv: object, *, layout: str = "bhsd", **others: Any
    ) -> QkvProjectionBwd:
        """The gradients of arrays as they lie in memory: nothing is copied.

        ``layout`` "bhsd": dq [B, H, S, D], dk and dv [B, H_kv, S, D]; "bshd": the head after the
        row; without the first axis one entry. ``others``: input, weight and gradients, as far as
        they are there.
        """
        return cls(**qkv_bwd_fields({"dq": dq, "dk": dk, "dv": dv, **others}, layout))


@dataclass(frozen=True, eq=False, kw_only=True)
class OutputProjectionBwd(StridedDescriptor[OutputProjectionBwdProblem]):
    """What a loss takes from an OutputProjection's operands, given what it takes from its result:

    d_attn_out = d_output·weight, d_weight = d_outputᵀ·attn_out, d_bias = Σ d_output over all
    tokens. That by the residual is d_output itself.

    ``d_output`` [batch, S, hidden], ``attn_out`` and ``d_attn_out`` [batch, num_heads, S,
    head_dim], each with strides of its own; ``weight`` and ``d_weight`` [hidden,
    num_heads·head_dim], ``d_bias`` [hidden]. A gradient is computed where it is given; address 0
    says that ``bind`` will give it. ``weight`` is read for d_attn_out alone, ``attn_out`` for
    d_weight alone. All else as in QkvProjectionBwd.
    """

    batch: int
    S: int
    hidden: int
    head_dim: int
    num_heads: int = 1
    d_output: object = field(default=None, repr=False)
    attn_out: object = field(default=None, repr=False)
    weight: object = field(default=None, repr=False)
    d_attn_out: object = field(default=None, repr=False)
    d_weight: object = field(default=None, repr=False)
    d_bias: object = field(default=None, repr=False)
    dtype: DType | str | None = None
    dtype_bias: DType | str | None = None
    stride_d_output_batch: int | None = None
    stride_d_output_row: int | None = None
    stride_attn_out_batch: int | None = None
    stride_attn_out_head: int | None = None
    stride_attn_out_row: int | None = None
    stride_weight_row: int | None = None
    stride_d_attn_out_batch: int | None = None
    stride_d_attn_out_head: int | None = None
    stride_d_attn_out_row: int | None = None
    stride_d_weight_row: int | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "d_output": ("batch", "row"),
        **dict.fromkeys(("attn_out", "d_attn_out"), ("batch", "head", "row")),
        "weight": ("row",),
        "d_weight": ("row",),
        "d_bias": (),
    }

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        named = tuple(n for n in self.AXES if n != "d_bias")
        dtype = required(
            "dtype", dtype_of("dtype", self.dtype, infos, named), "d_output, attn_out and weight"
        )
        batch, S, hidden = (extent(n, getattr(self, n)) for n in ("batch", "S", "hidden"))
        heads, dim = extent("num_heads", self.num_heads, 1), extent("head_dim", self.head_dim)
        width = extent("num_heads·head_dim", heads * dim)
        extent("batch·S", batch * S)
        d_bias = wanted(self, "d_attn_out", infos)
        shapes: dict[str, tuple[int, ...]] = {
            "d_output": (batch, S, hidden),
            **dict.fromkeys(("attn_out", "d_attn_out"), (batch, heads, S, dim)),
            **dict.fromkeys(("weight", "d_weight"), (hidden, width)),
        }
        strides, vectors = self._walks(shapes, dtype, infos)
        apart, d_apart = (
            heads > 1 and given and strides[n][1] != dim
            for n, given in (
                ("attn_out", self.d_weight is not None),
                ("d_attn_out", self.d_attn_out is not None),
            )
        )
        if not (apart or d_apart):
            heads, dim = 1, width
        attn_out, d_attn_out = (
            (batch_stride, head if heads > 1 else width, row)
            for batch_stride, head, row in (strides["attn_out"], strides["d_attn_out"])
        )
        problem = OutputProjectionBwdProblem(
            OutputProjectionBwdSpec(
                dtype,
                self.d_attn_out is not None,
                self.d_weight is not None,
                self._kind("dtype_bias", ("d_bias",), dtype, infos) if d_bias else None,
                apart,
                d_apart,
                *(vectors[n] for n in ("d_output", "attn_out", "weight", "d_attn_out", "d_weight")),
            ),
            batch,
            S,
            hidden,
            heads,
            dim,
            two(strides["d_output"]),
            attn_out,
            strides["weight"][0],
            d_attn_out,
            strides["d_weight"][0],
        )
        self._keep(problem, infos)

    def _found(self) -> dict[str, object]:
        spec = self._problem.spec
        return {"dtype": spec.dtype, "dtype_bias": spec.d_bias}

    @classmethod
    def from_arrays(
        cls, d_output: object, *, layout: str = "bhsd", **others: Any
    ) -> OutputProjectionBwd:
        """The gradients of arrays as they lie in memory: nothing is copied.

        ``d_output`` [B, S, hidden], or [S, hidden] of one entry. ``others``: attn_out, weight and
        gradients, as far as they are there; attn_out and d_attn_out [B, S, columns], or [B, H, S,
        D] (``layout`` "bhsd"; "bshd": the head after the row).
        """
        return cls(**output_bwd_fields({"d_output": d_output, **others}, layout))


def wanted(
    bwd: QkvProjectionBwd | OutputProjectionBwd, first: str, infos: Mapping[str, ArrayInfo]
) -> bool:
    """Whether d_bias is asked for; refused where nothing is, and where what describes it stands
    alone."""
    for name in (first, "d_weight", "d_bias"):
        bwd._refuse_idle(name, *(("dtype_bias",) if name == "d_bias" else ()))
    if all(getattr(bwd, n) is None for n in (first, "d_weight", "d_bias")):
        raise InvalidValue(
            first,
            None,
            f"one of {first}, d_weight and d_bias must be asked for",
            "Give its array, or 0: it will be bound",
        )
    pointer("d_bias", bwd.d_bias, infos)
    return bwd.d_bias is not None
