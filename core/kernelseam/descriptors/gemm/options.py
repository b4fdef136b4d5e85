"""Options of matrix products on arrays: names, types, defaults, rules and words, in groups."""

from __future__ import annotations

from kernelseam.descriptors.common.options import scalar
from kernelseam.descriptors.common.precision import precision_name
from kernelseam.descriptors.common.validation import flag, number
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class SumOptions:
    """alpha·(product) + beta·out."""

    alpha: float = scalar(1.0, number, "What the product is multiplied by.")
    beta: float = scalar(0.0, number, "What the array for the result is multiplied by.")
    out_dtype: DType | str | None = scalar(
        None, lambda name, value: DType.of(value, name), "The result's dtype. [a's]"
    )


@dataclass(frozen=True, kw_only=True)
class NumericOptions:
    """How numbers are multiplied."""

    precision: str | None = scalar(
        None, precision_name, "How float32 is multiplied: ieee, tf32 or tf32x3."
    )
    scale_block: tuple[int, int, int] | None = scalar(
        None, None, "Rows of a, columns of b and values of k that share a scale."
    )


@dataclass(frozen=True, kw_only=True)
class FactorOptions(SumOptions):
    """The factors, as ``bmm`` and ``matmul2d`` have them."""

    batched: bool = scalar(False, None, "Arrays have an axis of the batch.")
    a_transposed: bool = scalar(False, flag, "a holds matrices [K, M].")
    b_transposed: bool = scalar(False, flag, "b holds matrices [N, K].")


@dataclass(frozen=True, kw_only=True)
class ProductOptions(NumericOptions, FactorOptions):
    """All that ``bmm`` and ``matmul2d`` take beside operands and where to run."""

    out_dtype: DType | str | None = scalar(
        None, lambda name, value: DType.of(value, name, fp8=True), "The result's dtype. [a's]"
    )


@dataclass(frozen=True, kw_only=True)
class GroupedOptions(NumericOptions, SumOptions):
    """All that ``grouped_mm`` takes beside operands and where to run."""


@dataclass(frozen=True, kw_only=True)
class ListOptions(SumOptions):
    """All that ``grouped_mm_list`` takes beside operands and where to run."""

    precision: str | None = scalar(
        None, precision_name, "How float32 is multiplied: ieee, tf32 or tf32x3."
    )
    products: int = scalar(0, None, "How many there are.")


@dataclass(frozen=True, kw_only=True)
class ProductGradientOptions(FactorOptions):
    """All that ``bmm_bwd`` and ``matmul2d_bwd`` take beside operands and where to run."""

    a_gradient: bool = scalar(True, flag, "Compute a's gradient.")
    b_gradient: bool = scalar(True, flag, "Compute b's gradient.")
    sum_repeats: bool = scalar(True, flag, "Sum along axes of stride 0.")
