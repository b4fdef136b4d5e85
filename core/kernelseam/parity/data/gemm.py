"""A case's operands: seeded values, and where they lie."""

from __future__ import annotations

import zlib

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.parity import attention_bwd_data, attention_data, merge_data, projection_data
from kernelseam.parity.attention_data import ramp, shape_scores
from kernelseam.parity.cases import BackwardCase, Case, GemmCase, MergeCase, Plant
from kernelseam.parity.memory import Layout, Place, once, place, repeated, scattered
from kernelseam.parity.oracle import Array
from kernelseam.parity.projection_case import ProjectionCase

__all__ = ["layout", "outputs", "ramp", "shape_scores", "values"]


def values(case: Case) -> dict[str, Array]:
    """Inputs by name, [batch, head, row, column] as they lie in memory; C too where it is read or
    planted."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    if isinstance(case, MergeCase):
        return merge_data.values(case, rng)
    if isinstance(case, BackwardCase):
        found = attention_bwd_data.inputs(case, rng)
    elif isinstance(case, ProjectionCase):
        found = projection_data.values(case, rng)
    else:
        found = (
            _gemm_values(case, rng)
            if isinstance(case, GemmCase)
            else attention_data.values(case, rng)
        )
    for plant in case.plants:
        _plant(found[plant.operand], plant)
    return (
        {**found, **attention_bwd_data.results(case, found)}
        if isinstance(case, BackwardCase)
        else found
    )


def layout(case: Case, separate: bool = False) -> Layout:
    """Where every operand lies."""
    if isinstance(case, GemmCase):
        return Layout(_gemm_places(case), separate)
    if isinstance(case, BackwardCase):
        return Layout(attention_bwd_data.places(case), separate)
    if isinstance(case, ProjectionCase):
        return Layout(projection_data.places(case), separate)
    places = merge_data.places(case) if isinstance(case, MergeCase) else attention_data.places(case)
    return Layout(places, separate)


def outputs(case: Case) -> tuple[str, ...]:
    """Names of what is written."""
    if isinstance(case, BackwardCase):
        return attention_bwd_data.outputs(case)
    if isinstance(case, ProjectionCase):
        return projection_data.outputs(case)
    return ("C",) if isinstance(case, GemmCase) else ("out", "lse") if case.lse else ("out",)


def _plant(x: Array, plant: Plant) -> None:
    x[tuple(slice(None) if i is None else i for i in plant.index)] = plant.value


def _gemm_shapes(case: GemmCase) -> dict[str, tuple[int, int, int, int]]:
    M, N, K, B, H = case.M, case.N, case.K, case.batch, case.num_heads
    return {
        "A": (B, H, *((K, M) if case.a_transposed else (M, K))),
        "B": (B, H // case.b_head_group, *((N, K) if case.b_transposed else (K, N))),
        "C": (*case.lead, M, N),
        **({"bias": (*case.lead, 1, N)} if case.bias else {}),
        **({"residual": (*case.lead, M, N)} if case.residual else {}),
    }


def _gemm_values(case: GemmCase, rng: np.random.Generator) -> dict[str, Array]:
    def draw(shape: tuple[int, ...], dtype: DType, kind: str) -> Array:
        if kind == "integers":
            return rng.integers(-3, 4, shape).astype(dtype.numpy)
        if kind == "positive":
            return rng.random(shape).astype(dtype.numpy)
        factor = {"normal": 1.0, "tiny": 2.0**-12, "huge": 200.0}[kind]
        return (rng.standard_normal(shape) * factor).astype(dtype.numpy)

    shapes = _gemm_shapes(case)
    found = {
        name: repeated(draw(once(shapes[name], walk), case.dtype, case.data), shapes[name])
        for name, walk in (("A", case.a), ("B", case.b))
    }
    if case.beta != 0 or any(p.operand == "C" for p in case.plants):
        found["C"] = draw(shapes["C"], case.out_dtype, case.data)
    for name, walk, dtype in (
        ("bias", case.bias_walk, case.bias),
        ("residual", case.residual_walk, case.residual),
    ):
        if dtype:
            walk = case.c if name == "residual" and case.in_place else walk
            found[name] = repeated(draw(once(shapes[name], walk), dtype, case.data), shapes[name])
    return found


def _gemm_places(case: GemmCase) -> dict[str, Place]:
    shapes = _gemm_shapes(case)
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
            found[name] = scattered(name, walk, shapes[name], dtype, seed=i)
        else:
            found[name] = place(name, walk, shapes[name], dtype)
    return found
