"""A case's operands: seeded values, and where they lie."""

from __future__ import annotations

import math
import zlib

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.parity.cases import AttentionCase, Case, GemmCase, Plant
from kernelseam.parity.memory import Layout, Place, Walk, place, scattered
from kernelseam.parity.oracle import Array


def values(case: Case) -> dict[str, Array]:
    """Inputs by name, [batch, head, row, column] as they lie in memory; C too where it is read or planted."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    found = _gemm_values(case, rng) if isinstance(case, GemmCase) else _attention_values(case, rng)
    for plant in case.plants:
        _plant(found[plant.operand], plant)
    return found


def layout(case: Case, separate: bool = False) -> Layout:
    """Where every operand lies."""
    return Layout(_gemm_places(case) if isinstance(case, GemmCase) else _attention_places(case), separate)


def outputs(case: Case) -> tuple[str, ...]:
    """Names of what is written."""
    return ("C",) if isinstance(case, GemmCase) else ("out", "lse") if case.lse else ("out",)


def _plant(x: Array, plant: Plant) -> None:
    x[tuple(slice(None) if i is None else i for i in plant.index)] = plant.value


def _gemm_shapes(case: GemmCase) -> dict[str, tuple[int, int, int, int]]:
    M, N, K, B, H = case.M, case.N, case.K, case.batch, case.num_heads
    return {
        "A": (B, H, *((K, M) if case.a_transposed else (M, K))),
        "B": (B, H // case.b_head_group, *((N, K) if case.b_transposed else (K, N))),
        "C": (B, H, M, N),
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
        name: _repeated(draw(_once(shapes[name], walk), case.dtype, case.data), shapes[name])
        for name, walk in (("A", case.a), ("B", case.b))
    }
    if case.beta != 0 or any(p.operand == "C" for p in case.plants):
        found["C"] = draw(shapes["C"], case.out_dtype, case.data)
    return found


def _once(shape: tuple[int, ...], walk: Walk) -> tuple[int, ...]:
    """The shape of what differs: 1 along an axis of stride 0."""
    return tuple(min(n, 1) if i < 3 and "bhr"[i] in walk.broadcast else n for i, n in enumerate(shape))


def _repeated(x: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(x, shape).copy()


def _gemm_places(case: GemmCase) -> dict[str, Place]:
    shapes, found = _gemm_shapes(case), {}
    for i, (name, walk) in enumerate((("A", case.a), ("B", case.b), ("C", case.c))):
        dtype = case.out_dtype if name == "C" else case.dtype
        if case.scattered and not walk.broadcast:
            found[name] = scattered(name, walk, shapes[name], dtype, seed=i)
        else:
            found[name] = place(name, walk, shapes[name], dtype)
    return found


def _attention_shapes(case: AttentionCase) -> dict[str, tuple[int, int, int, int]]:
    B, H, G = case.batch, case.num_heads, case.kv_heads
    return {
        "q": (B, H, case.S_q, case.head_dim), "k": (B, G, case.S_k, case.head_dim),
        "v": (B, G, case.S_k, case.value_dim), "out": (B, H, case.S_q, case.value_dim),
    }


def _attention_values(case: AttentionCase, rng: np.random.Generator) -> dict[str, Array]:
    shapes, walks = _attention_shapes(case), {"q": case.q, "k": case.k, "v": case.v}
    q, k, v = (rng.standard_normal(_once(shapes[name], walk)) for name, walk in walks.items())
    shape_scores(q, k, case.data)
    if case.ramp:
        ramp(q, k)
    return {
        name: _repeated(x.astype(case.dtype.numpy), shapes[name]) for name, x in zip(walks, (q, k, v), strict=True)
    }


def shape_scores(q: Array, k: Array, kind: str) -> None:
    """Make the scores what AttentionCase.data says, in place, through column 1 of q and k."""
    if kind == "extreme":
        q *= 16
        k *= 16
    elif kind == "falling":
        q[..., 1], k[..., 1] = 8, -64
    elif kind == "climbing":
        q[..., 1], k[..., 1] = math.sqrt(q.shape[-1]), 4 * np.arange(k.shape[-2])
    elif kind in ("holes", "voids"):
        q[..., 1] = 1 + np.abs(q[..., 1])
        k[..., :: 3 if kind == "holes" else 1, 1] = -np.inf
    elif kind != "normal":
        raise ValueError(kind)


def ramp(q: Array, k: Array) -> None:
    """q[…,0] = √D and k[j,0] = j/16, in place: with the default scale key j's score gains j/16."""
    q[..., 0] = math.sqrt(q.shape[-1])
    k[..., 0] = np.arange(k.shape[-2]) / 16


def _attention_places(case: AttentionCase) -> dict[str, Place]:
    shapes, found = _attention_shapes(case), {}
    walks = {"q": case.q, "k": case.k, "v": case.v, "out": case.out}
    for name, shape in shapes.items():
        found[name] = place(name, walks[name], shape, case.dtype)
    if case.packed:
        H, G, D = case.num_heads, case.kv_heads, case.head_dim
        row = (H + 2 * G) * D
        for name, first in (("q", 0), ("k", H * D), ("v", (H + G) * D)):
            found[name] = Place("qkv", case.dtype, shapes[name], (case.S_q * row, D, row, 1), first)
    if case.lse:
        head = case.S_q + case.lse_gap
        strides = (case.num_heads * head, head, 1)
        found["lse"] = Place("lse", DType.float32, shapes["q"][:3], strides)
    return found
