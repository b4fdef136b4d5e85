"""Problems and specs of the projections' gradients."""

from __future__ import annotations

from collections.abc import Iterator

from kernelseam.contract import OperandRule
from kernelseam.descriptors.projection.problem import ProjectionProblem, matrix
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class QkvProjectionBwdSpec:
    """What shapes the binaries: which gradients there are, and how wide rows may be accessed (of
    dq, dk and dv alike)."""

    dtype: DType
    d_input: bool = True
    d_weight: bool = True
    d_bias: DType | None = None
    vector_dqkv: int = 16
    vector_input: int = 16
    vector_weight: int = 16
    vector_d_input: int = 16
    vector_d_weight: int = 16

    operation = "qkv_projection_bwd"

    def __str__(self) -> str:
        return " ".join(
            (self.operation, str(self.dtype), *(n for n in GRADIENTS[:3] if getattr(self, n)))
        )


@dataclass(frozen=True)
class OutputProjectionBwdSpec:
    """What shapes the binaries: which gradients there are, how heads lie, and how wide rows may be
    accessed."""

    dtype: DType
    d_attn_out: bool = True
    d_weight: bool = True
    d_bias: DType | None = None
    apart: bool = False
    """Whether the heads of a token of attn_out lie apart from each other; else they are one row."""
    d_apart: bool = False
    """So for d_attn_out."""
    vector_d_output: int = 16
    vector_attn_out: int = 16
    vector_weight: int = 16
    vector_d_attn_out: int = 16
    vector_d_weight: int = 16

    operation = "output_projection_bwd"

    def __str__(self) -> str:
        options = [n for n in GRADIENTS[1:] if getattr(self, n)] + ["heads apart"] * (
            self.apart or self.d_apart
        )
        return " ".join((self.operation, str(self.dtype), *options))


def _sums(
    s: QkvProjectionBwdSpec | OutputProjectionBwdSpec, weight: tuple[int, int], stride: int
) -> Iterator[OperandRule]:
    """The gradients that are sums over all tokens: by the weight, and by a bias as long as it has
    rows."""
    if s.d_weight:
        yield matrix("d_weight", s.dtype, (1, *weight), (0, stride), s.vector_d_weight, True)
    if s.d_bias:
        yield OperandRule("d_bias", s.d_bias, weight[:1], (1,), s.d_bias.itemsize, True)


GRADIENTS = ("d_input", "d_weight", "d_bias", "d_attn_out")


@dataclass(frozen=True)
class QkvProjectionBwdProblem(ProjectionProblem):
    """d_input = [dq dk dv]·weight, d_weight = [dq dk dv]ᵀ·input, d_bias = Σ [dq dk dv] over the
    tokens, as far as the spec has them. Strides in elements."""

    spec: QkvProjectionBwdSpec
    batch: int
    S: int
    hidden: int
    """Columns of the input."""
    num_heads: int
    kv_heads: int
    head_dim: int
    dq_strides: tuple[int, int, int]
    """(batch, head, row); so for dk and dv."""
    dk_strides: tuple[int, int, int]
    dv_strides: tuple[int, int, int]
    input_strides: tuple[int, int]
    """(batch, row); so for d_input."""
    weight_stride: int
    d_input_strides: tuple[int, int]
    d_weight_stride: int

    operation = "qkv_projection_bwd"

    @property
    def width(self) -> int:
        """Columns of dq, dk and dv together."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim

    def _operands(self) -> Iterator[OperandRule]:
        s, b = self.spec, self.batch
        rows, weight = (self.S, self.hidden), (self.width, self.hidden)
        read = int(b > 0 and self.S > 0)
        align = max(s.vector_dqkv, s.dtype.itemsize)
        for name, heads, strides in (
            ("dq", self.num_heads, self.dq_strides),
            ("dk", self.kv_heads, self.dk_strides),
            ("dv", self.kv_heads, self.dv_strides),
        ):
            yield OperandRule(
                name, s.dtype, (b, heads, self.S, self.head_dim), (*strides, 1), align
            )
        yield matrix("input", s.dtype, (b * s.d_weight, *rows), self.input_strides, s.vector_input)
        yield matrix(
            "weight", s.dtype, (read * s.d_input, *weight), (0, self.weight_stride), s.vector_weight
        )
        if s.d_input:
            yield matrix(
                "d_input", s.dtype, (b, *rows), self.d_input_strides, s.vector_d_input, True
            )
        yield from _sums(s, weight, self.d_weight_stride)

    @property
    def operations(self) -> int:
        products = self.spec.d_input + self.spec.d_weight
        return 2 * self.batch * self.S * self.width * self.hidden * products

    @property
    def bytes_moved(self) -> int:
        s, rows = self.spec, self.batch * self.S
        products = (rows + self.width) * self.hidden * (s.d_input + s.d_weight)
        return (rows * self.width + products) * s.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{self.spec} batch={self.batch} S={self.S} hidden={self.hidden} "
            f"heads={self.num_heads}/{self.kv_heads} "
            f"dim={self.head_dim}"
        )


@dataclass(frozen=True)
class OutputProjectionBwdProblem(ProjectionProblem):
    """d_attn_out = d_output·weight, d_weight = d_outputᵀ·attn_out, d_bias = Σ d_output over the
    tokens, as far as the spec has them. Strides in elements. ``num_heads`` is 1 where the spec says
    that neither's heads lie apart."""

    spec: OutputProjectionBwdSpec
    batch: int
    S: int
    hidden: int
    """Columns of d_output."""
    num_heads: int
    head_dim: int
    d_output_strides: tuple[int, int]
    """(batch, row)."""
    attn_out_strides: tuple[int, int, int]
    """(batch, head, row); so for d_attn_out."""
    weight_stride: int
    d_attn_out_strides: tuple[int, int, int]
    d_weight_stride: int

    operation = "output_projection_bwd"

    @property
    def width(self) -> int:
        """Columns of attn_out: all heads'."""
        return self.num_heads * self.head_dim

    def _operands(self) -> Iterator[OperandRule]:
        s, b = self.spec, self.batch
        weight = (self.hidden, self.width)
        read = int(b > 0 and self.S > 0)

        def heads(
            name: str, used: int, strides: tuple[int, int, int], vector: int, written: bool
        ) -> OperandRule:
            shape = (b * used, self.num_heads, self.S, self.head_dim)
            return OperandRule(
                name, s.dtype, shape, (*strides, 1), max(vector, s.dtype.itemsize), written
            )

        yield matrix(
            "d_output", s.dtype, (b, self.S, self.hidden), self.d_output_strides, s.vector_d_output
        )
        yield heads("attn_out", int(s.d_weight), self.attn_out_strides, s.vector_attn_out, False)
        yield matrix(
            "weight",
            s.dtype,
            (read * s.d_attn_out, *weight),
            (0, self.weight_stride),
            s.vector_weight,
        )
        if s.d_attn_out:
            yield heads("d_attn_out", 1, self.d_attn_out_strides, s.vector_d_attn_out, True)
        yield from _sums(s, weight, self.d_weight_stride)

    @property
    def operations(self) -> int:
        products = self.spec.d_attn_out + self.spec.d_weight
        return 2 * self.batch * self.S * self.width * self.hidden * products

    @property
    def bytes_moved(self) -> int:
        s, rows = self.spec, self.batch * self.S
        products = (rows + self.hidden) * self.width * (s.d_attn_out + s.d_weight)
        return (rows * self.hidden + products) * s.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{self.spec} batch={self.batch} S={self.S} heads={self.num_heads} "
            f"dim={self.head_dim} hidden={self.hidden}"
        )
