"""Where the tokens of a projection's case lie in pages, and what the append of its k and v makes of
the product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.oracle import appended
from kernelseam.oracle import cache as oracle
from kernelseam.oracle.cache import CacheRows
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.projections import qkv_projection
from kernelseam.samples.data.memory import Placement
from kernelseam.samples.data.places import Places, of_integers
from kernelseam.samples.projection_case import ProjectionCase

Expected = tuple[dict[str, CacheRows], dict[str, Array]]
"""Rows by result, and what those of 8 bits are multiplied by."""
SPREAD = 3
"""The average distance between positions that are read from memory."""
BEFORE = 20
"""The most keys that an entry has before its tokens."""
_SCALES = ("k_scales", "v_scales")


@lru_cache(maxsize=8)
def places(case: ProjectionCase) -> Places:
    """Where its tokens lie."""
    return Places(
        case.name,
        (case.batch, case.S),
        case.page_size,
        SPREAD * case.S + 5
        if case.positions
        else case.first_position + case.S + (BEFORE if case.cached else 0),
        "given" if case.positions else "lengths" if case.cached else "",
        case.sequences,
        origin=case.first_position,
        slot_dtype=DType.int32 if case.slots else None,
        spare=2,
    )


def given_scales(case: ProjectionCase, rng: np.random.Generator) -> dict[str, Array]:
    """Scales of heads, by which nothing saturates."""
    if case.scaled != "heads":
        return {}
    shape = (1, case.kv_heads, 1)
    return {n: (0.4 + 0.1 * rng.random(shape)).astype(np.float32) for n in _SCALES}


def placements(case: ProjectionCase) -> dict[str, Placement]:
    """Those of integers and scales."""
    own = places(case)
    found = of_integers(own.integers())
    for name in _SCALES if case.scaled else ():
        found[name] = Placement(name, DType.float32, (1, case.kv_heads, 1), (0, 1, 0))
        if case.scaled == "tokens":
            steps = (case.page_size * case.kv_heads, 1, case.kv_heads)
            shape = (case.batch, case.kv_heads, case.S)
            found[name] = own.in_pages(name, DType.float32, shape, steps)
    return found


def expected(case: ProjectionCase, x: Mapping[str, Array]) -> Expected:
    """The oracle's rows for the case's values."""
    tables = (x["cos"], x["sin"]) if case.rotary else None
    own = places(case)
    at, stored = np.clip(own.positions, 0, own.ends - 1), (own.slots >= 0)[:, None, :, None]
    cos, sin = (None, None) if tables is None or case.appends_rotate else tables
    products = qkv_projection(
        x["input"][:, 0],
        x["weight"][0, 0],
        x.get("bias"),
        case.num_heads,
        case.kv_heads,
        case.head_dim,
        cos,
        sin,
        case.rotary,
        at,
    )
    rows = dict[str, CacheRows]()
    for name, (result, K) in products.items():
        late = tables if case.appends_rotate and name != "v" else None
        between = case.out_dtype if name != "q" or late else case.dtype.accumulator
        of = appended.rows(result, K, case.dtype, between, late, case.rotary, at)
        other = appended.rows(result, K, case.dtype, between)  # where nothing is rotated
        rows[name] = replace(
            of,
            value=np.where(stored, of.value, other.value if name == "q" else 0.0),
            magnitude=np.where(stored, of.magnitude, other.magnitude),
            error=np.where(stored, of.error, other.error if name == "q" else 0.0),
        )
    return rows, {n[0]: x[n] for n in _SCALES if n in x}


def verdict(
    case: ProjectionCase, expected: Expected, results: Mapping[str, Array], flushed: bool
) -> Verdict:
    """Rows, and scales where they are written, beside the oracle's."""
    rows, scales = expected
    written = dict[str, Array]()
    if case.scaled == "tokens":
        stored = (places(case).slots >= 0)[:, None]
        written = {n[0]: np.where(stored, results[n], 2.0**-120) for n in _SCALES}
    found = {n: results[n] for n in rows}
    accumulator = case.dtype.accumulator
    return oracle.verdict(rows, found, {**scales, **written}, accumulator, written, flushed)
