"""The fields that the descriptors of products share, and what is checked of them: extents, dtypes,
scales, bias and residual."""

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
"""Operands that take part where they are given; address 0 says that they will be bound."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ProductFields:
    """What every descriptor of products has, as they document it; nothing is validated here."""

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
    """The same of products of one size."""

    M: int
    N: int
    K: int
    stride_a_row: int | None = None
    stride_b_row: int | None = None
    stride_c_row: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class OperandFields(ExtentFields):
    """The same over operands, not lists: with scales."""

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
    """The same of a batch of heads, whose products may be summed, with a bias and a residual."""

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
    """(dtype, dtype_c, dtype_acc) from what is named and from the arrays. ``fp8_c``: C may be of 8
    bits."""
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
    """Whether there are scales, in the fields of these names. Raises InvalidValue for one without
    the other, and for scales of what has none, or of products that are ``summed`` into one C."""
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
    """A spec's blocks of scales, validated. Raises InvalidValue."""
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
    """Refuse the fields of a bias or a residual that is not there."""
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
    """The element type of a bias or a residual: what is named, its array's, C's, of a C of 8 bits
    float32; None where it is not there."""
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
    """A GEMM's epilogue, traced, which replaces the field. Raises InvalidValue for what is none,
    and for options that it does not go with; the names are those of its fields."""
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
    """Access widths of what an epilogue of pairs reads by halves of its rows: the second begins
    within them."""
    if not b_transposed and N // 2 * dtype.itemsize % WIDE:
        vectors["B"] = dtype.itemsize
    if "preactivation" in vectors and N // 2 * dtype_c.itemsize % WIDE:
        vectors["preactivation"] = dtype_c.itemsize


def check_factors(gemm: ProductFields) -> None:
    """Replace the flags and factors of a product by plain bools and floats, or refuse them."""
    put = object.__setattr__
    for name in ("a_transposed", "b_transposed"):
        put(gemm, name, flag(name, getattr(gemm, name)))
    for name in ("alpha", "beta"):
        put(gemm, name, number(name, getattr(gemm, name)))


def check_product(gemm: ExtentFields) -> None:
    """The same, and the extents by plain ints."""
    for name in ("M", "N", "K"):
        object.__setattr__(gemm, name, extent(name, getattr(gemm, name)))
    check_factors(gemm)


def check_batch(gemm: BatchFields) -> None:
    """The same of a batch, and how its products are summed."""
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
