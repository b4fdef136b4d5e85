"""A GEMM case's operands: seeded values, and where they lie."""

from __future__ import annotations

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.oracle.formulas import Array
from kernelseam.parity.cases.gemm_case import GemmCase
from kernelseam.parity.data.memory import Place, once, place, repeated, scattered


def shapes(case: GemmCase) -> dict[str, tuple[int, int, int, int]]:
    """Of the operands, [batch, head, row, column]."""
    M, N, K, B, H = case.M, case.N, case.K, case.batch, case.num_heads
    return {
        "A": (B, H, *((K, M) if case.a_transposed else (M, K))),
        "B": (B, H // case.b_head_group, *((N, K) if case.b_transposed else (K, N))),
        "C": (*case.lead, M, N),
        **({"bias": (*case.lead, 1, N)} if case.bias else {}),
        **({"residual": (*case.lead, M, N)} if case.residual else {}),
    }


def values(case: GemmCase, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs by name, [batch, head, row, column] as they lie in memory; C too where it is read or
    planted."""

    def draw(shape: tuple[int, ...], dtype: DType, kind: str) -> Array:
        if kind == "integers":
            return rng.integers(-3, 4, shape).astype(dtype.numpy)
        if kind == "positive":
            return rng.random(shape).astype(dtype.numpy)
        factor = {"normal": 1.0, "tiny": 2.0**-12, "huge": 200.0}[kind]
        return (rng.standard_normal(shape) * factor).astype(dtype.numpy)

    lie = shapes(case)
    found = {
        name: repeated(draw(once(lie[name], walk), case.dtype, case.data), lie[name])
        for name, walk in (("A", case.a), ("B", case.b))
    }
    if case.beta != 0 or any(p.operand == "C" for p in case.plants):
        found["C"] = draw(lie["C"], case.out_dtype, case.data)
    for name, walk, dtype in (
        ("bias", case.bias_walk, case.bias),
        ("residual", case.residual_walk, case.residual),
    ):
        if dtype:
            walk = case.c if name == "residual" and case.in_place else walk
            found[name] = repeated(draw(once(lie[name], walk), dtype, case.data), lie[name])
    return found


def places(case: GemmCase) -> dict[str, Place]:
    """Where every operand lies."""
    lie = shapes(case)
    found: dict[str, Place] = {}
    walks = (
        ("A", case.a, case.dtype),
        ("B", case.b, case.dtype),
        ("C", case.c, case.out_dtype),
        ("bias", case.bias_walk, case.bias),
        ("residual", case.residual_walk, case.residual),
    )
    for i, (name, walk, dtype) in enumerate(walks):
        if dtype is None:
            continue
        if name == "residual" and case.in_place:
            found[name] = found["C"]
        elif case.scattered and not walk.broadcast:
            found[name] = scattered(name, walk, lie[name], dtype, seed=i)
        else:
            found[name] = place(name, walk, lie[name], dtype)
    return found
