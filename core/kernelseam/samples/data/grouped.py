"""A grouped GEMM case's operands: seeded values and their memory. Axes are [group, row, column]; of
an operand that offsets divide there is one group."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelseam.descriptors.gemm.grouped_problem import STACKED
from kernelseam.dtypes import DType
from kernelseam.epilogues import Epilogue, epilogue_expression
from kernelseam.expressions.epilogues import EpilogueExpression
from kernelseam.oracle.formulas import Array
from kernelseam.samples.data import captured
from kernelseam.samples.data.memory import Placement, drawn
from kernelseam.samples.epilogues import Extents, epilogue_named
from kernelseam.samples.grouped_case import GroupedCase


def shapes(case: GroupedCase, capacity: bool = True) -> dict[str, tuple[int, int, int]]:
    """[group, row, column] of A, B, C and the preactivation in memory; with the whole
    ``capacity``, or the groups'
    part of it."""
    extents = case.extents if capacity else {**case.extents, case.along: case.end}
    m, n, k = extents.values()
    a_rows = case.a_rows if "a_indices" in case.indices else m
    c_rows = case.end if "c_indices" in case.indices else m
    groups = {x: len(case.sizes) if x in STACKED[case.along] else 1 for x in "ABC"}
    return {
        "A": (groups["A"], *((k, m) if case.a_transposed else (a_rows, k))),
        "B": (groups["B"], *((n, k) if case.b_transposed else (k, n))),
        "C": (groups["C"], c_rows, case.columns(n)),
        **({"preactivation": (1, c_rows, n)} if case.preactivation else {}),
    }


def epilogue(case: GroupedCase) -> Epilogue:
    """That of a case which has one."""
    extents = Extents(len(case.sizes), case.extents["m"], case.columns(case.N))
    return epilogue_named(case.epilogue, extents)


def expression(case: GroupedCase) -> EpilogueExpression | None:
    """A case's epilogue, traced over its arrays on the host."""
    return epilogue_expression(epilogue(case)) if case.epilogue else None


def _captured(case: GroupedCase) -> tuple[Any, ...]:
    traced = expression(case)
    return () if traced is None else traced.arrays


def scale_shapes(case: GroupedCase) -> dict[str, tuple[int, ...]]:
    """[group, row of op(A) or column of op(B)], of blocks also blocks of k; none without scales."""
    if not case.scales:
        return {}
    m, n, k = case.extents.values()
    m = case.a_rows if "a_indices" in case.indices else m
    of_a, of_b = (1 if case.along == axis else len(case.sizes) for axis in "mn")
    if case.scale_block is None:
        return {"a_scales": (of_a, m), "b_scales": (of_b, n)}
    _, columns, depth = case.scale_block
    blocks = -(-k // depth)
    return {"a_scales": (of_a, m, blocks), "b_scales": (of_b, -(-n // columns), blocks)}


def values(case: GroupedCase, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs by name; the part of A, B and C behind the last group keeps its canaries, NaN."""
    inputs = {
        name: drawn(rng, shape, case.out_dtype if name == "C" else case.dtype, case.data)
        for name, shape in shapes(case, capacity=False).items()
        if name in ("A", "B") or (name == "C" and case.beta)
    }
    inputs["offsets"] = np.array(case.offsets, np.int32)
    inputs |= {n: indices(case, n, rng) for n in case.indices}
    for name, shape in scale_shapes(case).items():
        extents = (1,) * len(shape) if case.scales == "tensor" else shape
        powers = (
            rng.integers(-3, 4, extents) if case.data == "integers" else rng.uniform(-3, 3, extents)
        )
        inputs[name] = np.broadcast_to((2.0**powers).astype(np.float32), shape).copy()
    return inputs | captured.inputs(_captured(case))


def indices(case: GroupedCase, name: str, rng: np.random.Generator) -> Array:
    """Rows of A, any of them any number of times; rows of C, each once; factors."""
    if name == "c_factors":
        if case.data == "integers":
            return (2.0 ** rng.integers(-2, 3, case.end)).astype(np.float32)
        return rng.uniform(-2, 2, case.end).astype(np.float32)
    if name == "c_indices":
        return rng.permutation(case.end).astype(np.int32)
    return rng.integers(0, case.a_rows, case.end).astype(np.int32)


def placements(case: GroupedCase) -> dict[str, Placement]:
    """Every operand's placement: groups' parts, in memory for the whole capacity."""
    result: dict[str, Placement] = {}
    parts = shapes(case, capacity=False)
    for name, (_, rows, columns) in shapes(case).items():
        dtype = case.dtype if name in ("A", "B") else case.out_dtype
        unit = 1 if case.tight else max(16 // dtype.itemsize, 1)
        row = -(-(columns + case.gap) // unit) * unit
        group = max(rows, 1) * row + case.gap
        result[name] = Placement(
            name, dtype, parts[name], (group, row, 1), min_elements=parts[name][0] * group
        )
    result["offsets"] = Placement("offsets", DType.int32, (len(case.sizes),), (1,))
    for name in case.indices:
        dtype = DType.float32 if name == "c_factors" else DType.int32
        capacity = case.extents["m"]
        result[name] = Placement(name, dtype, (case.end,), (1,), min_elements=capacity)
    for name, shape in scale_shapes(case).items():
        steps: tuple[int, ...] = (shape[1] + 3, 1)
        if len(shape) == 3:  # a row's are not next to each other
            steps = ((shape[1] + 1) * shape[2], 1, shape[1] + 1)
        if case.scales == "tensor":
            steps = (0,) * len(shape)
        result[name] = Placement(name, DType.float32, shape, steps)
    return result | captured.placements(_captured(case))
