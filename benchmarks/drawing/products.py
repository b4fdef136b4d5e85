"""Random products: batched GEMMs, and the projections that are made of them."""

from __future__ import annotations

from collections import Counter

from benchmarks.drawing import gemm, projection
from benchmarks.drawing.common import Kind, Random
from benchmarks.drawing.projection import OUT, OUT_BWD, QKV, QKV_BWD

ORDER = ("gemm", QKV, "gemm", OUT, "gemm", QKV_BWD, "gemm", QKV, "gemm", OUT_BWD)


def kinds(rng: Random, count: int) -> list[Kind]:
    """So many different ones: of ten, five are GEMMs, two project to q, k and v."""
    distinct: dict[Kind, None] = {}
    turns = Counter[str]()
    while len(distinct) < count:
        operation = ORDER[turns.total() % len(ORDER)]
        turn = turns[operation]
        distinct[
            gemm.kind(rng, turn) if operation == "gemm" else projection.kind(rng, operation, turn)
        ] = None
        turns[operation] += 1
    return list(distinct)
