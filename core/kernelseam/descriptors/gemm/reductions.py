"""The arrays that a product's sums and maxima are written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kernelseam.contract import ArrayInfo, OperandRule
from kernelseam.descriptors.common.validation import shared_axis
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.errors import InvalidValue
from kernelseam.expressions.reductions import reduction


def with_reductions(problem: GemmProblem, infos: Mapping[str, ArrayInfo]) -> GemmProblem:
    """The problem with the strides of these arrays. Raises InvalidValue for one of another shape or
    dtype than what is written to it."""
    strides = []
    for i, (one, shape) in enumerate(
        zip(problem.spec.reductions, problem.reduction_shapes, strict=True)
    ):
        info, acc = infos[reduction(i)], problem.spec.dtype_acc
        if info.shape != shape:
            raise InvalidValue(
                "epilogue",
                f"{one.operation} into an array of shape {list(info.shape)}",
                f"must be [{one.axes}], {list(shape)}",
                "Give an array of that shape",
            )
        if info.dtype is not acc:
            raise InvalidValue(
                "epilogue",
                f"{one.operation} into an array of {info.dtype}",
                f"must be {acc}, in which it is computed",
                f"Give an array of {acc}, and convert it",
            )
        rule = OperandRule(reduction(i), acc, shape, info.strides, acc.itemsize, True)
        if rule.span and shared_axis(rule) is not None:
            raise InvalidValue(
                "epilogue",
                f"{one.operation} into an array of strides {list(info.strides)}",
                "must have memory of its own for each element",
                "Give an array that is not broadcast and does not overlap itself",
            )
        strides.append(info.strides)
    return replace(problem, reduction_strides=tuple(strides)) if strides else problem
