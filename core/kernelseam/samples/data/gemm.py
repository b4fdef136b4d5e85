"""A GEMM case's operands: seeded values and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.epilogues import Epilogue, epilogue_expression
from kernelseam.expressions.epilogues import EpilogueExpression
from kernelseam.oracle.formulas import Array
from kernelseam.samples.data import captured
from kernelseam.samples.data.memory import (
    Placement,
    drawn,
    placement,
    repeated_copy,
    scattered,
)
from kernelseam.samples.epilogues import REDUCTIONS, Extents, epilogue_named
from kernelseam.samples.gemm_case import GemmCase


def shapes(case: GemmCase) -> dict[str, tuple[int, int, int, int]]:
    """[batch, head, row, column] of every operand."""
    M, N, K, B, H = case.M, case.N, case.K, case.batch, case.num_heads
    return {
        "A": (B, H, *((K, M) if case.a_transposed else (M, K))),
        "B": (B, H // case.b_head_group, *((N, K) if case.b_transposed else (K, N))),
        "C": (*case.lead, M, case.columns),
        **({"bias": (*case.lead, 1, N)} if case.bias else {}),
        **({"residual": (*case.lead, M, N)} if case.residual else {}),
        **({"preactivation": (*case.lead, M, N)} if case.preactivation else {}),
    }


def epilogue(case: GemmCase) -> Epilogue | None:
    """A case's epilogue, over arrays on the host."""
    extents = Extents(math.prod(case.lead), case.M, case.columns)
    named = epilogue_named(case.epilogue, extents) if case.epilogue else []
    if not case.reductions:
        return named or None
    parts: list[Any] = [*named] if isinstance(named, list | tuple) else [named]
    made = (REDUCTIONS[n](extents) for n in case.reductions)
    acc = case.dtype.accumulator.numpy
    return [*parts[:1], *(x.into(np.zeros(x.shape, acc)) for x in made), *parts[1:]]


def expression(case: GemmCase) -> EpilogueExpression | None:
    """A case's epilogue, traced over its arrays on the host."""
    given = epilogue(case)
    return None if given is None else epilogue_expression(given)


def _captured(case: GemmCase) -> tuple[Any, ...]:
    traced = expression(case)
    return () if traced is None else traced.arrays


def scale_shapes(case: GemmCase) -> dict[str, tuple[int, ...]]:
    """[batch, head, row of op(A) or column of op(B)], where the case has scales; those of blocks
    [batch, head, block of rows or columns, block of k]."""
    if not case.scales:
        return {}
    B, H = case.batch, case.num_heads
    lead, lead_b = (B, H), (B, H // case.b_head_group)
    if case.scale_block is None:
        return {"a_scales": (*lead, case.M), "b_scales": (*lead_b, case.N)}
    m, n, k = (
        -(-x // of) for x, of in zip((case.M, case.N, case.K), case.scale_block, strict=True)
    )
    return {"a_scales": (*lead, m, k), "b_scales": (*lead_b, n, k)}


def element_scales(case: GemmCase, inputs: Mapping[str, Array]) -> dict[str, Array | None]:
    """Scales as the oracle takes them: those of blocks of every element of op(A), and of op(B)
    transposed."""
    given = {n: inputs.get(n) for n in ("a_scales", "b_scales")}
    if case.scale_block is None:
        return given
    result: dict[str, Array | None] = {}
    m, n, k = case.scale_block
    for (name, x), of, most in zip(given.items(), (m, n), (case.M, case.N), strict=True):
        assert x is not None
        result[name] = x.repeat(of, axis=2)[:, :, :most].repeat(k, axis=3)[..., : case.K]
    return result


def values(case: GemmCase, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs by name, [batch, head, row, column] as stored; C too where it is read or gets injected
    values."""
    operand_shapes = shapes(case)
    inputs = {
        name: drawn(rng, operand_shapes[name], case.dtype, case.data, operand_layout)
        for name, operand_layout in (("A", case.a), ("B", case.b))
    }
    if case.beta != 0 or any(p.operand == "C" for p in case.injected):
        inputs["C"] = drawn(rng, operand_shapes["C"], case.out_dtype, case.data)
    for name, operand_layout, dtype in (
        ("bias", case.bias_layout, case.bias),
        ("residual", case.residual_layout, case.residual),
    ):
        if dtype:
            operand_layout = case.c if name == "residual" and case.in_place else operand_layout
            inputs[name] = drawn(rng, operand_shapes[name], dtype, case.data, operand_layout)
    for name, shape in scale_shapes(case).items():
        extents = {"tensor": (1, 1, 1), "matrices": (*shape[:2], 1)}.get(case.scales, shape)
        powers = rng.integers(-3, 4, extents) if case.exact else rng.uniform(-3, 3, extents)
        inputs[name] = repeated_copy((2.0**powers).astype(np.float32), shape)
    return inputs | captured.inputs(_captured(case))


def placements(case: GemmCase) -> dict[str, Placement]:
    operand_shapes = shapes(case)
    placements: dict[str, Placement] = {}
    operand_layouts = (
        ("A", case.a, case.dtype),
        ("B", case.b, case.dtype),
        ("C", case.c, case.out_dtype),
        ("bias", case.bias_layout, case.bias),
        ("residual", case.residual_layout, case.residual),
        (
            "preactivation",
            case.preactivation_layout,
            case.out_dtype if case.preactivation else None,
        ),
    )
    for i, (name, operand_layout, dtype) in enumerate(operand_layouts):
        if dtype is None:
            continue
        if name == "residual" and case.in_place:
            placements[name] = placements["C"]
        elif case.scattered and not operand_layout.broadcast:
            placements[name] = scattered(name, operand_layout, operand_shapes[name], dtype, seed=i)
        else:
            placements[name] = placement(name, operand_layout, operand_shapes[name], dtype)
    for name, of_scales in scale_shapes(case).items():
        _, heads, n, *blocks = of_scales
        steps: tuple[int, ...] = (heads * (n + 3) + 1, n + 3, 1)
        if blocks:  # a row's are not next to each other
            steps = (heads * (n + 1) * blocks[0], (n + 1) * blocks[0], 1, n + 1)
        steps = {"tensor": (0, 0, 0), "matrices": (heads + 1, 1, 0)}.get(case.scales, steps)
        placements[name] = Placement(name, DType.float32, of_scales, steps)
    traced = expression(case)
    results = () if traced is None else traced.results
    return placements | captured.placements(_captured(case)) | captured.result_placements(results)
