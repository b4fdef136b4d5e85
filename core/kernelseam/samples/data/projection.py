"""A projection case's operands: seeded values, their memory, and the descriptor over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelseam.descriptors import (
    OutputProjection,
    OutputProjectionBwd,
    QkvProjection,
    QkvProjectionBwd,
)
from kernelseam.dtypes import DType
from kernelseam.oracle.formulas import Array, GemmResult
from kernelseam.oracle.projections import (
    output_projection,
    output_projection_bwd,
    qkv_projection,
    qkv_projection_bwd,
)
from kernelseam.samples.data import projection_places
from kernelseam.samples.data.memory import (
    Layout,
    Placement,
    drawn,
    placement,
)
from kernelseam.samples.data.projection_places import given_scales, places
from kernelseam.samples.projection_case import ProjectionCase

Shape = tuple[int, int, int, int]


def shapes(case: ProjectionCase) -> dict[str, Shape]:
    """[batch, head, row, column] of the matrix operands, inputs first."""
    B, S, D = case.batch, case.S, case.head_dim
    rows, of_q, of_kv = (B, 1, S, case.hidden), (B, case.num_heads, S, D), (B, case.kv_heads, S, D)
    if case.operation == "qkv_projection":
        return {
            "input": rows,
            "weight": (1, 1, case.width, case.hidden),
            "q": of_q,
            "k": of_kv,
            "v": of_kv,
        }
    if case.operation == "output_projection":
        added = {"residual": rows} if case.residual else {}
        return {"attn_out": of_q, "weight": (1, 1, case.hidden, case.width), **added, "out": rows}
    requested = set(case.gradients)
    if case.operation == "qkv_projection_bwd":
        weight: Shape = (1, 1, case.width, case.hidden)
        operand_shapes = {
            "dq": of_q,
            "dk": of_kv,
            "dv": of_kv,
            "input": rows,
            "weight": weight,
            "d_input": rows,
        }
    else:
        weight = (1, 1, case.hidden, case.width)
        operand_shapes = {"d_output": rows, "attn_out": of_q, "weight": weight, "d_attn_out": of_q}
    operand_shapes["d_weight"] = weight
    without = {
        "d_weight": ("d_weight", "input", "attn_out"),
        "d_input": ("d_input", "d_attn_out", "weight"),
    }
    unused = {n for gradient, names in without.items() if gradient not in requested for n in names}
    return {n: shape for n, shape in operand_shapes.items() if n not in unused}


def outputs(case: ProjectionCase) -> tuple[str, ...]:
    if case.operation == "qkv_projection":
        return ("q", "k", "v", *["k_scales", "v_scales"] * (case.scaled == "tokens"))
    if case.operation == "output_projection":
        return ("out",)
    return (
        *(n for n in shapes(case) if n.startswith("d_") and n != "d_output"),
        *["d_bias"] * bool(case.bias),
    )


def values(case: ProjectionCase, rng: np.random.Generator) -> dict[str, Array]:
    written, inputs = outputs(case), {}
    for name, shape in shapes(case).items():
        if name not in written:
            dtype = case.residual if name == "residual" and case.residual else case.dtype
            operand_layout = case.operand_layout(name)
            inputs[name] = drawn(rng, shape, dtype, case.data, operand_layout)
    if case.bias and "d_bias" not in written:
        count = case.width if case.operation == "qkv_projection" else case.hidden
        inputs["bias"] = drawn(rng, (count,), case.bias, case.data)
    if case.rotary:
        angles = np.arange(places(case).ends)[:, None] / 50.0 ** (
            np.arange(case.rotated // 2) / max(case.rotated // 2, 1)
        )
        inputs |= {
            "cos": np.cos(angles).astype(np.float32),
            "sin": np.sin(angles).astype(np.float32),
        }
    return {**inputs, **given_scales(case, rng), **places(case).integers()}


def placements(case: ProjectionCase) -> dict[str, Placement]:
    placements = {}
    written = outputs(case)
    forward = not case.operation.endswith("bwd")
    for name, shape in shapes(case).items():
        dtype = case.out_dtype if forward and name in written else case.dtype
        dtype = case.residual if name == "residual" and case.residual else dtype
        placements[name] = _rows(case, name, shape, dtype)
    if case.packed:
        row = (case.num_heads + 2 * case.kv_heads) * case.head_dim
        first = 0
        for name in ("dq", "dk", "dv") if "dq" in placements else ("q", "k", "v"):
            p = placements[name]
            strides = (case.S * row, case.head_dim, row, 1)
            placements[name] = Placement("packed", p.dtype, p.shape, strides, first)
            first += p.shape[1] * case.head_dim
    if case.in_place:
        placements["residual"] = placements["out"]
    if case.bias:
        count = case.width if case.operation.startswith("qkv") else case.hidden
        name = "bias" if forward else "d_bias"
        placements[name] = Placement(name, case.bias, (count,), (1,))
    if case.rotary:
        for name in ("cos", "sin"):
            half = case.rotated // 2
            placements[name] = Placement(
                name, DType.float32, (places(case).ends, half), (half + 3, 1)
            )
    placements |= projection_places.placements(case)
    return placements


def _rows(case: ProjectionCase, name: str, shape: Shape, dtype: DType) -> Placement:
    operand_layout = case.operand_layout(name)
    if not case.page_size or name not in ("k", "v"):
        return placement(name, operand_layout, shape, dtype)
    dtype = case.dtype_pages or dtype
    whole = (places(case).pages, shape[1], case.page_size, shape[3])
    strides = (*operand_layout.strides(whole, dtype.itemsize), 1)
    return places(case).in_pages(name, dtype, shape, strides, operand_layout.offset)


Described = QkvProjection | OutputProjection | QkvProjectionBwd | OutputProjectionBwd
KINDS: dict[str, type[Described]] = {
    "qkv_projection": QkvProjection,
    "output_projection": OutputProjection,
    "qkv_projection_bwd": QkvProjectionBwd,
    "output_projection_bwd": OutputProjectionBwd,
}
TABLES = {"cos": "cos", "sin": "cos", "block_table": "table"}
"""Operands with a row stride only → their name in the stride field."""
APPENDS = ("slot_mapping", "k_scales", "v_scales")
"""Operands that all strides of are fields."""


def describe(case: ProjectionCase, layout: Layout, addresses: Mapping[str, Any]) -> Described:
    kind = KINDS[case.operation]
    fields: dict[str, Any] = {
        n: getattr(case, n) for n in ("batch", "S", "hidden", "num_heads", "head_dim", "dtype")
    }
    fields |= addresses
    for name, p in layout.placements.items():
        steps = p.strides if len(p.strides) < 4 else p.strides[:3]
        axes = (
            ("batch", "head", "row")
            if len(steps) == 3
            else ("row",)
            if name in TABLES
            else ("batch", "row")
        )
        by_axis = {
            f"stride_{TABLES.get(name, name)}_{a}": s for a, s in zip(axes, steps, strict=False)
        }
        known = kind.stride_fields(name)
        if name in APPENDS:
            by_axis = dict(zip(known, steps, strict=False))
        fields |= {n: s for n, s in by_axis.items() if n in known}
    if case.operation.startswith("qkv"):
        fields["kv_heads"] = case.kv_heads
    if case.bias:
        fields["dtype_bias"] = case.bias
    if not case.operation.endswith("bwd"):
        fields["dtype_out"] = case.out_dtype
    if case.residual:
        fields["dtype_residual"] = case.residual
    if case.rotary:
        fields |= {
            "rotary_style": case.rotary,
            "rotary_dim": case.rotated,
            "max_position": places(case).ends,
        }
    if case.operation == "qkv_projection":
        fields["first_position"] = case.first_position
    if case.page_size:
        fields |= {"pages": places(case).pages, "page_size": case.page_size}
        if not case.slots:
            fields["table_width"] = layout.placements["block_table"].shape[1]
        if case.sequences:
            fields["sequences"] = len(case.sequences)
        if case.appended:
            fields |= {"dtype_pages": case.dtype_pages, "scales": case.scaled or None}
    return kind(**fields)


def expected(case: ProjectionCase, x: Mapping[str, Array]) -> dict[str, tuple[GemmResult, int]]:
    """The oracle's results for the case's ``values``, each with the number of products that are
    summed."""
    if case.operation == "qkv_projection":
        return qkv_projection(
            x["input"][:, 0],
            x["weight"][0, 0],
            x.get("bias"),
            case.num_heads,
            case.kv_heads,
            case.head_dim,
            x.get("cos"),
            x.get("sin"),
            case.rotary,
            places(case).positions,
        )
    if case.operation == "output_projection":
        return output_projection(x["attn_out"], x["weight"][0, 0], x.get("bias"), x.get("residual"))
    if case.operation == "qkv_projection_bwd":
        return qkv_projection_bwd(x["dq"], x["dk"], x["dv"], x.get("input"), x.get("weight"))
    return output_projection_bwd(x["d_output"], x.get("attn_out"), x.get("weight"), case.num_heads)
