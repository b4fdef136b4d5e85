"""Fields that the descriptors of products share, and their validation: extents, dtypes, scales,
bias and residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.common.operands import dtype_of, required
from kernelseam.descriptors.common.validation import (
    MAX_EXTENT,
    WIDE,
    extent,
    flag,
    integer,
    multiple,
    number,
)
from kernelseam.dtypes import DType
from kernelseam.epilogues import epilogue_expression
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import EpilogueExpression
from kernelseam.frozen import dataclass

SCALES = ("a_scales", "b_scales")
_PREACTIVATION_STRIDES = tuple(f"stride_preactivation_{axis}" for axis in ("batch", "head", "row"))
ADDED = ("bias", "residual")
"""Optional operands; address 0 announces one that ``bind`` will give."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ProductFields:
    """Fields of every descriptor of products, which documents and validates them."""

    a_transposed: bool = False
    b_transposed: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    dtype: DType | str | None = None
    dtype_c: DType | str | None = None
    dtype_acc: DType | str | None = None
    precision: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ExtentFields(ProductFields):
    """Fields of products that all have one size."""

    M: int
    N: int
    K: int
    stride_a_row: int | None = None
    stride_b_row: int | None = None
    stride_c_row: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class OperandFields(ExtentFields):
    """Fields of products over arrays, not lists of addresses, which may have scales."""

    A: object = field(default=None, repr=False)
    B: object = field(default=None, repr=False)
    C: object = field(default=None, repr=False)
    a_scales: object = field(default=None, repr=False)
    b_scales: object = field(default=None, repr=False)
    stride_a_scales_row: int | None = None
    stride_a_scales_k: int | None = None
    stride_b_scales_column: int | None = None
    stride_b_scales_k: int | None = None
    scale_block: tuple[int, int, int] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchFields(ExtentFields):
    """Fields of a batch of heads, whose products may be summed, with a bias and a residual."""

    batch: int = 1
    num_heads: int = 1
    c_batch_group: int = 1
    c_head_group: int = 1
    stride_residual_row: int | None = None
    dtype_bias: DType | str | None = None
    dtype_residual: DType | str | None = None


def gemm_dtypes(
    dtype: object,
    dtype_c: object,
    dtype_acc: object,
    infos: Mapping[str, ArrayInfo],
    inputs: tuple[str, str],
    output: str,
    fp8_c: bool = False,
) -> tuple[DType, DType, DType]:
    """(dtype, dtype_c, dtype_acc) from the descriptor's fields, else from the arrays. ``fp8_c``:
    whether C may have 8 bits."""
    kind = required(
        "dtype",
        dtype_of("dtype", dtype, infos, inputs, fp8=True),
        f"{inputs[0]} and {inputs[1]}",
    )
    kind_c = dtype_of("dtype_c", dtype_c, infos, (output,), fp8=fp8_c) or (
        kind.accumulator if kind.is_fp8 else kind
    )
    acc = kind.accumulator if dtype_acc is None else DType.of(dtype_acc, "dtype_acc")
    if acc is not kind.accumulator:
        raise InvalidValue(
            "dtype_acc",
            acc,
            f"products of {kind} are summed in {kind.accumulator}",
            "Leave dtype_acc out",
        )
    return kind, kind_c, acc


def are_scaled(gemm: Any, dtype: DType, names: tuple[str, str], summed: bool) -> bool:
    """Whether the two scale fields ``names`` are given. Raises InvalidValue for one without the
    other, for factors that are not of 8 bits, and for products that are ``summed`` into one C."""
    there = [n for n in names if getattr(gemm, n) is not None]
    if not there:
        return False
    if not dtype.is_fp8:
        raise InvalidValue(
            there[0],
            "given",
            f"scales are for A and B of 8 bits, and these are {dtype}",
            "Leave it out: alpha scales a product",
        )
    if len(there) == 1:
        (missing,) = set(names) - {*there}
        raise InvalidValue(
            missing, None, f"must be given where {there[0]} is", "Give it: ones change nothing"
        )
    if summed:
        raise InvalidValue(
            there[0],
            "given",
            "scales are of one product, and products are summed into one C",
            "Leave it out, or sum after products of their own",
        )
    return True


def scale_block_of(value: object, scaled: bool) -> tuple[int, int, int] | None:
    """The spec's ``scale_block``, validated. Raises InvalidValue."""
    if value is None:
        return None
    if not scaled:
        raise InvalidValue(
            "scale_block", value, "is about scales", "Give a_scales and b_scales too"
        )
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise InvalidValue(
            "scale_block",
            value,
            "must be (rows of A, columns of B, values of k) that share a scale",
            "For example (1, 128, 128)",
        )
    m, n, k = (extent(f"scale_block[{i}]", x, 1) for i, x in enumerate(value))
    return m, n, k


def refuse_idle(gemm: Any, name: str, operand: str, strides: Sequence[str]) -> None:
    """Raise InvalidValue for a dtype or stride of an operand that is not given."""
    for field_name in (*strides, *([f"dtype_{name}"] if name in ADDED else ())):
        if getattr(gemm, operand) is None and (value := getattr(gemm, field_name)) is not None:
            raise InvalidValue(
                field_name,
                value,
                f"describes {operand}",
                f"Give {operand} too (0: it will be bound)",
            )


def added_dtype(
    gemm: Any, name: str, operand: str, infos: Mapping[str, ArrayInfo], dtype_c: DType, acc: DType
) -> DType | None:
    """The dtype of a bias or a residual: the field's, else its array's, else C's (float32 where C
    has 8 bits). None for an operand that is not given."""
    if getattr(gemm, operand) is None:
        return None
    kind = dtype_of(f"dtype_{name}", getattr(gemm, f"dtype_{name}"), infos, (operand,))
    kind = kind or (acc if dtype_c.is_fp8 else dtype_c)
    if kind.itemsize > acc.itemsize:
        field_name, value = (
            (operand, f"an array of {kind}") if operand in infos else (f"dtype_{name}", kind)
        )
        raise InvalidValue(
            field_name, value, f"must be no wider than {acc}, in which it is added", "Convert it"
        )
    return kind


def traced_epilogue_of(gemm: Any, residual: str, preactivation: str) -> EpilogueExpression | None:
    """The descriptor's epilogue, traced; the field is replaced by it. Raises InvalidValue for a
    value that is no epilogue, and for options that exclude it. ``residual``, ``preactivation``:
    names of the descriptor's fields."""
    for field_name in (preactivation, *_PREACTIVATION_STRIDES):
        given = getattr(gemm, field_name, None)
        if gemm.epilogue is None and given is not None:
            raise InvalidValue(
                field_name, "given", "is what an epilogue is of", "Give epilogue too, or use C"
            )
    if gemm.epilogue is None:
        return None
    expression = gemm.epilogue
    if not isinstance(expression, EpilogueExpression):
        expression = epilogue_expression(expression)
        object.__setattr__(gemm, "epilogue", expression)
    if not expression.structure.pairs:
        return expression
    if gemm.N % 2:
        raise InvalidValue(
            "N",
            gemm.N,
            "must be even: the epilogue is of pairs of columns",
            "Give B the columns of both halves, or an epilogue of single columns",
        )
    for field_name, given in (("beta", gemm.beta != 0), (residual, True)):
        if given and (value := getattr(gemm, field_name, None)) is not None:
            raise InvalidValue(
                field_name,
                value if field_name == "beta" else "given",
                "has the result's columns, and an epilogue of pairs is of twice as many",
                "Leave it out, and add in the epilogue: [gated(…), epilogues.residual(x)]",
            )
    return expression


def narrow_halves(
    vectors: dict[str, int], N: int, b_transposed: bool, dtype: DType, dtype_c: DType
) -> None:
    """Narrow the access widths of operands of which an epilogue of pairs reads the second half of
    each row, where that half is not aligned."""
    if not b_transposed and N // 2 * dtype.itemsize % WIDE:
        vectors["B"] = dtype.itemsize
    if "preactivation" in vectors and N // 2 * dtype_c.itemsize % WIDE:
        vectors["preactivation"] = dtype_c.itemsize


def check_factors(gemm: ProductFields) -> None:
    """Convert the flags and factors of a product to bools and floats. Raises InvalidValue."""
    put = object.__setattr__
    for name in ("a_transposed", "b_transposed"):
        put(gemm, name, flag(name, getattr(gemm, name)))
    for name in ("alpha", "beta"):
        put(gemm, name, number(name, getattr(gemm, name)))


def check_product(gemm: ExtentFields) -> None:
    """As ``check_factors``, and convert the extents to ints."""
    for name in ("M", "N", "K"):
        object.__setattr__(gemm, name, extent(name, getattr(gemm, name)))
    check_factors(gemm)


def check_batch(gemm: BatchFields) -> None:
    """As ``check_product``, and validate the batch, the heads and the groups that are summed."""
    put = object.__setattr__
    check_product(gemm)
    for name in ("batch", "num_heads"):
        put(gemm, name, extent(name, getattr(gemm, name)))
    for name, of in (("c_batch_group", "batch"), ("c_head_group", "num_heads")):
        put(gemm, name, extent(name, getattr(gemm, name), 1))
        multiple(of, getattr(gemm, of), name, getattr(gemm, name))
    integer(
        "batch·num_heads",
        gemm.batch * gemm.num_heads,
        0,
        MAX_EXTENT,
        "Split the batch over several calls",
    )
