"""A projection case's operands: seeded values, where they lie, and its descriptor over them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

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
from kernelseam.parity.cases.projection_case import ProjectionCase
from kernelseam.parity.data.attention import NOWHERE, SPARE_PAGES
from kernelseam.parity.data.memory import Layout, Piece, Place, once, repeated

Shape = tuple[int, int, int, int]
SPREAD = 3
"""Positions in memory are that many times as far apart as tokens, on average."""


def shapes(case: ProjectionCase) -> dict[str, Shape]:
    """Of the operands with rows, [batch, head, row, column]: those that are read, then those that
    are written."""
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
    asked = set(case.gradients)
    if case.operation == "qkv_projection_bwd":
        weight: Shape = (1, 1, case.width, case.hidden)
        found = {
            "dq": of_q,
            "dk": of_kv,
            "dv": of_kv,
            "input": rows,
            "weight": weight,
            "d_input": rows,
        }
    else:
        weight = (1, 1, case.hidden, case.width)
        found = {"d_output": rows, "attn_out": of_q, "weight": weight, "d_attn_out": of_q}
    found["d_weight"] = weight
    without = {
        "d_weight": ("d_weight", "input", "attn_out"),
        "d_input": ("d_input", "d_attn_out", "weight"),
    }
    idle = {n for gradient, names in without.items() if gradient not in asked for n in names}
    return {n: shape for n, shape in found.items() if n not in idle}


def outputs(case: ProjectionCase) -> tuple[str, ...]:
    """Names of what is written."""
    if case.operation == "qkv_projection":
        return ("q", "k", "v")
    if case.operation == "output_projection":
        return ("out",)
    return (
        *(n for n in shapes(case) if n.startswith("d_") and n != "d_output"),
        *["d_bias"] * bool(case.bias),
    )


def values(case: ProjectionCase, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs by name."""
    written, found = outputs(case), {}
    for name, shape in shapes(case).items():
        if name not in written:
            dtype = case.residual if name == "residual" and case.residual else case.dtype
            walk = case.walk(name)
            found[name] = repeated(
                _draw(rng, once(shape, walk), case.data).astype(dtype.numpy), shape
            )
    if case.bias and "d_bias" not in written:
        count = case.width if case.operation == "qkv_projection" else case.hidden
        found["bias"] = _draw(rng, (count,), case.data).astype(case.bias.numpy)
    if case.rotary:
        angles = np.arange(ends(case))[:, None] / 50.0 ** (
            np.arange(case.turned // 2) / max(case.turned // 2, 1)
        )
        found |= {
            "cos": np.cos(angles).astype(np.float32),
            "sin": np.sin(angles).astype(np.float32),
        }
    if case.positions:
        found["positions"] = positions(case).astype(np.int32)
    if case.page_size:
        found["block_table"] = block_table(case).copy()
    return found


def _draw(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    if kind == "integers":
        return rng.integers(-3, 4, shape)
    return rng.random(shape) if kind == "positive" else rng.standard_normal(shape)


def ends(case: ProjectionCase) -> int:
    """One beyond the largest position that there may be."""
    return SPREAD * case.S + 5 if case.positions else case.first_position + case.S


def positions(case: ProjectionCase) -> npt.NDArray[np.int64]:
    """Of every token, [batch, S]."""
    if not case.positions:
        return np.broadcast_to(case.first_position + np.arange(case.S), (case.batch, case.S))
    rng = np.random.default_rng(zlib.crc32(case.name.encode()) + 2)
    found = [rng.permutation(ends(case))[: case.S] for _ in range(case.batch)]
    return np.array(found, np.int64).reshape(case.batch, case.S)


@lru_cache(maxsize=8)
def block_table(case: ProjectionCase) -> npt.NDArray[np.int32]:
    """[batch, pages that the positions need and two more]: shuffled pages where a token goes, else
    NOWHERE."""
    needed = -(-ends(case) // case.page_size)
    table = np.resize(np.array(NOWHERE, np.int32), (case.batch, needed + 2))
    order = list(np.random.default_rng(zlib.crc32(case.name.encode()) + 1).permutation(pages(case)))
    for b, row in enumerate(positions(case)):
        for page in np.unique(row // case.page_size):
            table[b, page] = order.pop()
    return table


def pages(case: ProjectionCase) -> int:
    """How many there are."""
    return case.batch * -(-ends(case) // case.page_size) + SPARE_PAGES


def places(case: ProjectionCase) -> dict[str, Place]:
    """Where every operand lies."""
    found = {}
    written = outputs(case)
    forward = not case.operation.endswith("bwd")
    for name, shape in shapes(case).items():
        dtype = case.out_dtype if forward and name in written else case.dtype
        dtype = case.residual if name == "residual" and case.residual else dtype
        found[name] = _rows(case, name, shape, dtype)
    if case.packed:
        row = (case.num_heads + 2 * case.kv_heads) * case.head_dim
        first = 0
        for name in ("dq", "dk", "dv") if "dq" in found else ("q", "k", "v"):
            p = found[name]
            strides = (case.S * row, case.head_dim, row, 1)
            found[name] = Place("packed", p.dtype, p.shape, strides, first)
            first += p.shape[1] * case.head_dim
    if case.in_place:
        found["residual"] = found["out"]
    if case.bias:
        count = case.width if case.operation.startswith("qkv") else case.hidden
        name = "bias" if forward else "d_bias"
        found[name] = Place(name, case.bias, (count,), (1,))
    if case.rotary:
        for name in ("cos", "sin"):
            half = case.turned // 2
            found[name] = Place(name, DType.float32, (ends(case), half), (half + 3, 1))
    if case.positions:
        found["positions"] = Place("positions", DType.int32, (case.batch, case.S), (case.S + 2, 1))
    if case.page_size:
        width = block_table(case).shape[1]
        found["block_table"] = Place(
            "block_table", DType.int32, (case.batch, width), (width + 3, 1)
        )
    return found


def _rows(case: ProjectionCase, name: str, shape: Shape, dtype: DType) -> Place:
    walk = case.walk(name)
    if not case.page_size or name not in ("k", "v"):
        return Place(name, dtype, shape, (*walk.strides(shape, dtype.itemsize), 1), walk.offset)
    whole = (pages(case), shape[1], case.page_size, shape[3])
    strides = (*walk.strides(whole, dtype.itemsize), 1)
    table = block_table(case)
    pieces = tuple(
        Piece(
            b,
            s,
            1,
            int(table[b, at // case.page_size]) * strides[0]
            + int(at % case.page_size) * strides[2],
        )
        for (b, s), at in np.ndenumerate(positions(case))
    )
    room = 1 + sum((n - 1) * step for n, step in zip(whole, strides, strict=True))
    return Place(name, dtype, shape, strides, walk.offset, None, pieces, room)


Described = QkvProjection | OutputProjection | QkvProjectionBwd | OutputProjectionBwd
KINDS: dict[str, type[Described]] = {
    "qkv_projection": QkvProjection,
    "output_projection": OutputProjection,
    "qkv_projection_bwd": QkvProjectionBwd,
    "output_projection_bwd": OutputProjectionBwd,
}
TABLES = {"cos": "cos", "sin": "cos", "block_table": "table"}
"""Operands that have a stride from row to row alone, and what the field calls them."""


def describe(case: ProjectionCase, layout: Layout, addresses: Mapping[str, Any]) -> Described:
    """The descriptor over addresses."""
    kind = KINDS[case.operation]
    fields: dict[str, Any] = {
        n: getattr(case, n) for n in ("batch", "S", "hidden", "num_heads", "head_dim", "dtype")
    }
    fields |= addresses
    for name, p in layout.places.items():
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
            "rotary_dim": case.turned,
            "max_position": ends(case),
        }
    if case.operation == "qkv_projection":
        fields["first_position"] = case.first_position
    if case.page_size:
        fields |= {
            "pages": pages(case),
            "page_size": case.page_size,
            "table_width": layout.places["block_table"].shape[1],
        }
    return kind(**fields)


def wanted(case: ProjectionCase, x: Mapping[str, Array]) -> dict[str, tuple[GemmResult, int]]:
    """The oracle's results of the case's ``values``, each with how many products it is the sum
    of."""
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
            positions(case),
        )
    if case.operation == "output_projection":
        return output_projection(x["attn_out"], x["weight"][0, 0], x.get("bias"), x.get("residual"))
    if case.operation == "qkv_projection_bwd":
        return qkv_projection_bwd(x["dq"], x["dk"], x["dv"], x.get("input"), x.get("weight"))
    return output_projection_bwd(x["d_output"], x.get("attn_out"), x.get("weight"), case.num_heads)
