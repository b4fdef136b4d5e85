"""Tile shapes of the shared kernels by arch: measured choices, no code.

Rows are tried against an arch's shared memory, so that one list serves archs that differ only in
that. Every row compiles without spills for every covering spec; ``tools/kernel_table.py`` shows it.
``rate`` and ``block_seconds`` were fitted to what an H200 measured of a tile; a rate that stands
without seconds was read off its neighbours, and one that is missing is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.frozen import changed
from kernelseam.kernels import AttentionTile, BackwardTile, DecodeTile, GemmTile, GemvTile

from kernelseam_cuda import tf32_tiles

_HALF_PRECISION = frozenset({DType.float16, DType.bfloat16})
_SINGLE = frozenset({DType.float32})
_DOUBLE = frozenset({DType.float64})


GEMM = (
    GemmTile(
        *(_HALF_PRECISION, 128, 128, 64, 2, 2),
        stages=2,
        min_blocks=2,
        rate=0.649,
        block_seconds=7.3e-7,
        slice_seconds=1.3e-6,
    ),
    GemmTile(
        _HALF_PRECISION, 128, 64, 64, 2, 2, stages=3, min_blocks=2, rate=0.437, block_seconds=2.4e-7
    ),
    GemmTile(
        *(_HALF_PRECISION, 64, 64, 64, 2, 2),
        stages=2,
        min_blocks=4,
        rate=0.38,
        block_seconds=9e-8,
        slice_seconds=8.4e-7,
    ),
    GemmTile(
        *(_HALF_PRECISION, 32, 32, 32, 1, 2, 2, 8),
        rate=0.161,
        block_seconds=0.3e-7,
        slice_seconds=3.5e-7,
    ),
    GemmTile(
        *(_HALF_PRECISION, 16, 16, 32, 1, 1),
        stages=2,
        min_blocks=4,
        teams=8,
        rate=0.10,
        block_seconds=2.6e-7,
        slice_seconds=5e-7,
    ),
    GemmTile(
        *(_SINGLE, 128, 128, 16, 2, 2),
        stages=3,
        min_blocks=2,
        persistent=False,
        plain=True,
        rate=0.61,
        block_seconds=2e-6,
    ),
    GemmTile(
        *(_SINGLE, 128, 64, 16, 2, 2),
        stages=3,
        min_blocks=3,
        persistent=False,
        row_sums=False,
        rate=0.619,
        block_seconds=1.4e-6,
    ),
    GemmTile(_SINGLE, 64, 64, 16, 2, 2, stages=3, min_blocks=3, rate=0.42, block_seconds=4e-7),
    GemmTile(_SINGLE, 32, 32, 16, 2, 2, stages=3, min_blocks=5, rate=0.305, block_seconds=2.7e-7),
    GemmTile(_SINGLE, 16, 16, 16, 1, 1, stages=2, min_blocks=3, teams=8, rate=0.15),
    *tf32_tiles.GEMM,
)
_PLAIN_DOUBLE = (
    GemmTile(_DOUBLE, 64, 64, 16, 2, 2, stages=2, min_blocks=2, rate=0.50),
    GemmTile(_DOUBLE, 32, 32, 16, 2, 2, stages=2, min_blocks=4, rate=0.35),
)
_MATRIX_DOUBLE = (
    GemmTile(
        *(_DOUBLE, 128, 128, 16, 4, 2),
        stages=3,
        persistent=False,
        plain=True,
        rate=0.61,
        block_seconds=3.6e-6,
    ),
    GemmTile(
        *(_DOUBLE, 128, 64, 16, 2, 2),
        stages=3,
        min_blocks=2,
        persistent=False,
        plain=True,
        rate=0.72,
        block_seconds=1.1e-6,
    ),
    GemmTile(
        *(_DOUBLE, 64, 64, 16, 2, 2),
        stages=3,
        min_blocks=2,
        persistent=False,
        rate=0.66,
        block_seconds=4e-7,
    ),
    GemmTile(_DOUBLE, 32, 32, 16, 2, 2, stages=3, min_blocks=4, persistent=False, rate=0.48),
)
"""A slice's rows fill all banks, as the matrix engine's float64 wants it. Rates are an H200's."""

_US = 1e-6
_SIXTEEN_ROWS = AttentionTile(
    *(_HALF_PRECISION, 128, 4, 16, 64, 2),
    q_resident=True,
    min_blocks=2,
    plain=True,
    rate=0.459,
    block_seconds=2.6e-6,
)
_SHARED_STAGE = AttentionTile(
    *(_HALF_PRECISION, 256, 4, 16, 64, 1),
    min_blocks=2,
    plain=True,
    shared_stage=True,
    block_seconds=1.5e-6,
    rate=0.35,
)
_SINGLE_SHARED_STAGE = AttentionTile(
    *(_SINGLE, 128, 4, 32, 32, 1),
    min_blocks=2,
    plain=True,
    score_unroll=1,
    shared_stage=True,
    rate=0.47,
    block_seconds=_US,
)
ATTENTION = (
    AttentionTile(_HALF_PRECISION, 64, 4, 32, 64, 2, plain=True, rate=0.493, block_seconds=3e-6),
    AttentionTile(
        *(_HALF_PRECISION, 64, 4, 16, 64, 2),
        q_resident=True,
        min_blocks=2,
        plain=True,
        rate=0.381,
        block_seconds=1.5e-6,
    ),
    AttentionTile(
        *(_HALF_PRECISION, 64, 4, 16, 32, 2),
        q_resident=True,
        min_blocks=2,
        rate=0.238,
        block_seconds=7.1e-7,
    ),
    replace(_SHARED_STAGE, max_dim=96, rows=32, score_unroll=2, rate=0.54, block_seconds=4.5e-6),
    replace(_SIXTEEN_ROWS, max_dim=96, block_seconds=4e-6),
    replace(_SHARED_STAGE, max_dim=128, rows=32, score_unroll=1, rate=0.515, block_seconds=4.1e-6),
    AttentionTile(
        *(_HALF_PRECISION, 128, 4, 32, 48, 2),
        min_blocks=2,
        plain=True,
        score_unroll=1,
        rate=0.471,
        block_seconds=3.6e-6,
    ),
    replace(_SIXTEEN_ROWS, block_seconds=2.6e-6, rate=0.459),
    AttentionTile(
        *(_HALF_PRECISION, 128, 4, 16, 48, 2),
        q_resident=True,
        min_blocks=2,
        rate=0.327,
        block_seconds=1.8e-6,
    ),
    replace(_SHARED_STAGE, max_dim=192, rows=16, rate=0.47),
    AttentionTile(_HALF_PRECISION, 192, 8, 16, 32, 2, rate=0.42),
    replace(_SHARED_STAGE, max_dim=256, rows=16, score_unroll=8, rate=0.35, block_seconds=1.5e-6),
    AttentionTile(_HALF_PRECISION, 256, 8, 16, 64, 2, plain=True, rate=0.395, block_seconds=_US),
    AttentionTile(_HALF_PRECISION, 256, 8, 16, 48, 2, plain=True, rate=0.39, block_seconds=_US),
    AttentionTile(_HALF_PRECISION, 256, 8, 16, 32, 2, plain=True, rate=0.361, block_seconds=_US),
    AttentionTile(_HALF_PRECISION, 256, 8, 16, 16, 2, rate=0.216, block_seconds=3.2e-6),
    AttentionTile(_HALF_PRECISION, 576, 4, 16, 32, 2, column_warps=4, rate=0.08),
    AttentionTile(_HALF_PRECISION, 576, 4, 16, 16, 2, column_warps=4, rate=0.065),
    replace(_SINGLE_SHARED_STAGE, max_dim=64, bn=64, rate=0.57),
    AttentionTile(
        _SINGLE, 64, 4, 32, 32, 2, min_blocks=2, plain=True, rate=0.55, block_seconds=_US
    ),
    AttentionTile(_SINGLE, 64, 4, 16, 32, 2, rate=0.238, block_seconds=7.1e-7),
    AttentionTile(
        _SINGLE, 128, 4, 16, 32, 2, min_blocks=2, plain=True, rate=0.45, block_seconds=_US
    ),
    _SINGLE_SHARED_STAGE,
    AttentionTile(_SINGLE, 128, 4, 16, 16, 2, rate=0.35, block_seconds=_US),
    AttentionTile(_SINGLE, 256, 4, 8, 16, 2),
    *tf32_tiles.ATTENTION,
)

DECODE = tuple(
    DecodeTile(
        *(_HALF_PRECISION, *shape),
        q_resident=q_resident,
        item_cost=item_cost,
        block_seconds=seconds,
        rate=rate,
    )
    for shape, q_resident, item_cost, seconds, rate in (
        ((64, 4, 16, 16, 5, 2), True, 12, 2.8e-6, 0.138),
        ((64, 4, 32, 32, 3, 2), True, 8, 3.6e-6, 0.296),
        ((128, 4, 16, 16, 3, 2), True, 8, 3.6e-6, 0.192),
        ((128, 4, 32, 16, 3, 1), False, 8, 4.9e-6, 0.231),
        ((128, 4, 16, 16, 2, 1), True, 8, 3.9e-6, 0.133),
        ((256, 4, 16, 16, 3, 1), False, 5, 5.3e-6, 0.157),
        ((256, 4, 16, 16, 2, 1), False, 5, 5.1e-6, 0.156),
        ((256, 2, 16, 16, 2, 1), False, 5, 5.7e-6, 0.06),
    )
)
"""Few queries over many keys. Seconds and rates are of an H200 (benchmarks/notes/choices.md)."""

_E4M3 = DType.float8_e4m3fn
_STORED_GEMM = tuple(
    GemmTile(frozenset({_E4M3}), *shape, min_blocks=blocks, teams=teams, rate=rate, scale_k=scale_k)
    for shape, blocks, teams, rate, scale_k in (
        ((128, 128, 64, 4, 2, 3), 1, 1, 0.55, 0),
        ((128, 64, 64, 4, 2, 3), 1, 1, 0.42, 32),
        ((64, 64, 64, 2, 2, 3), 2, 1, 0.40, 32),
        ((32, 32, 128, 1, 2, 2), 6, 1, 0.25, 32),
        ((16, 16, 64, 1, 1, 2), 4, 8, 0.10, 32),
    )
)
"""Factors of 8 bits. Slices of 128 would have twice the fragments in registers at once, and spill.
Rates are those of half precision, not measured."""
_STORED_ATTENTION = tuple(
    replace(t, dtype_kv=_E4M3)
    for t in ATTENTION
    if t.dtypes is _HALF_PRECISION and not t.shared_stage
)
_STORED_DECODE = tuple(
    DecodeTile(_HALF_PRECISION, *shape, q_resident=q_resident, dtype_kv=_E4M3, **more)
    for shape, q_resident, more in (
        ((64, 4, 16, 32, 4, 3), True, {"item_cost": 12}),
        ((64, 4, 32, 32, 3, 2), True, {}),
        ((128, 4, 16, 32, 3, 2), True, {"item_cost": 12}),
        ((128, 4, 32, 16, 3, 1), False, {"rate": 0.2, "plain": True}),
        ((128, 4, 16, 16, 2, 1), True, {"rate": 0.2}),
        ((256, 6, 16, 32, 2, 1), False, {"rate": 0.3}),
        ((256, 4, 16, 16, 2, 1), False, {"item_cost": 5, "rate": 0.3}),
        ((256, 2, 16, 16, 2, 1), False, {"item_cost": 5, "rate": 0.2}),
    )
)
"""Over keys and values of 8 bits: twice the keys are as many bytes in flight. An H200 measured 16
rows of D 64, 128 and 256."""


_BACKWARD_RATES = {
    (64, 0): 0.39,
    (128, 0): 0.44,
    (256, 0): 0.40,
    (64, 1): 0.37,
    (128, 1): 0.39,
    (256, 1): 0.335,
}
"""Of the first tile of a head dim in 16 bits, in order and with atomics."""


_OF_GRADIENTS = (
    *("dtypes", "max_dim", "warps", "rows", "step", "column_warps", "score_rows", "query_rows"),
    *("unroll", "min_blocks", "plain"),
)


def _backward(*rows: tuple[Any, ...]) -> tuple[BackwardTile, ...]:
    """Tiles of gradients, those in order with a kernel for keys and one for queries: they keep 64
    rows a step in registers where one for both does not. Where ``score_rows`` is not 0, scores are
    handed on, so that no two warps of a block make the same."""
    plain = (BackwardTile(stages=2, **dict(zip(_OF_GRADIENTS, row, strict=True))) for row in rows)
    return tuple(
        replace(
            t,
            apart=not t.query_rows,
            rate=_BACKWARD_RATES[t.max_dim, t.query_rows > 0]
            if t.dtypes is _HALF_PRECISION and t.step == 64
            else 0.0,
        )
        for t in plain
    )


ATTENTION_BWD = _backward(
    (_HALF_PRECISION, 64, 8, 16, 64, 1, 0, 0, 4, 1, True),
    (_HALF_PRECISION, 64, 8, 16, 32, 1, 0, 0, 4, 1, False),
    (_HALF_PRECISION, 128, 8, 32, 64, 2, 32, 0, 2, 1, True),
    (_HALF_PRECISION, 128, 8, 16, 32, 1, 0, 0, 4, 1, True),
    (_HALF_PRECISION, 128, 8, 16, 32, 2, 0, 0, 4, 1, False),
    (_HALF_PRECISION, 256, 8, 32, 64, 4, 16, 0, 2, 1, True),
    (_HALF_PRECISION, 256, 8, 32, 32, 4, 16, 0, 2, 1, True),
    (_HALF_PRECISION, 256, 8, 16, 32, 2, 0, 0, 4, 1, True),
    (_HALF_PRECISION, 256, 8, 16, 16, 2, 0, 0, 4, 1, False),
    (_HALF_PRECISION, 512, 8, 16, 16, 4, 0, 0, 4, 1, False),
    (_HALF_PRECISION, 512, 8, 16, 16, 8, 0, 0, 4, 1, False),
    (_SINGLE, 64, 4, 8, 32, 1, 0, 0, 4, 1, False),
    (_SINGLE, 128, 4, 8, 16, 1, 0, 0, 4, 1, False),
    (_SINGLE, 256, 4, 8, 16, 2, 0, 0, 4, 1, False),
    (_SINGLE, 512, 4, 8, 16, 4, 0, 0, 4, 1, False),
    # With atomics, scores once. Warps divide scores, dk and dv, and dq each in their own
    # way, so that a fragment that is read from shared memory serves as many products as it can.
    # Where 64 rows a step do not fit, or scores are changed, it is 32.
    (_HALF_PRECISION, 64, 4, 32, 64, 2, 32, 32, 2, 3, True),
    (_HALF_PRECISION, 64, 8, 32, 32, 2, 16, 16, 2, 1, False),
    (_HALF_PRECISION, 128, 8, 32, 64, 2, 32, 32, 2, 1, True),
    (_HALF_PRECISION, 128, 8, 32, 32, 2, 16, 16, 2, 1, False),
    (_HALF_PRECISION, 128, 8, 32, 32, 4, 16, 16, 2, 1, False),
    (_HALF_PRECISION, 256, 8, 32, 64, 4, 32, 32, 2, 1, True),
    (_HALF_PRECISION, 256, 8, 32, 32, 4, 16, 16, 1, 1, False),
    (_SINGLE, 64, 4, 32, 32, 2, 16, 16, 2, 1, False),
    (_SINGLE, 128, 8, 16, 64, 2, 16, 16, 2, 1, True),
    (_SINGLE, 128, 4, 16, 16, 2, 8, 8, 2, 1, False),
)
GEMV = (
    GemvTile(True, 8, 4, 128, 4, latency=6e-7, block_seconds=1e-7, step_seconds=1.1e-7),
    GemvTile(
        *(True, 32, 4, 128, 4, True),
        resident_threads=640,
        latency=3.3e-7,
        step_seconds=3e-7,
    ),
    GemvTile(
        True, 32, 1, 128, 4, ahead=True, latency=1.3e-7, block_seconds=7.6e-8, step_seconds=1.3e-7
    ),
    GemvTile(
        *(False, 8, 4, 256, 8),
        latency=1.9e-7,
        block_seconds=1.4e-7,
        step_seconds=3.3e-7,
        wave_seconds=3.5e-7,
    ),
    GemvTile(
        *(False, 8, 4, 512, 16, True),
        most_ahead=2,
        latency=2.8e-7,
        block_seconds=1.3e-6,
        step_seconds=5.5e-7,
        wave_seconds=3.5e-7,
    ),
    GemvTile(  # of few columns and a long sum: twice as many blocks
        *(False, 4, 4, 512, 16, True),
        most_ahead=2,
        latency=2.8e-7,
        block_seconds=1.3e-6,
        step_seconds=3.5e-7,
        wave_seconds=3.5e-7,
        dtypes=_SINGLE,
    ),
)


def tiles(
    matrix_double: bool, e4m3: bool, large_cache: bool, blackwell: bool = False
) -> Mapping[str, tuple[Any, ...]]:
    """By operation, for archs whose matrix units are worth using for float64, or for others, that
    convert e4m3 or do not, whose cache keeps the keys of many heads or does not, and for which
    tiles that spill on Blackwell are left out."""
    attention = (*ATTENTION, *(_STORED_ATTENTION if e4m3 else ()))
    double = _MATRIX_DOUBLE if matrix_double else _PLAIN_DOUBLE
    return {
        "gemm": (*GEMM, *double, *(_STORED_GEMM if e4m3 else ())),
        "gemv": GEMV,
        "attention": tuple(changed(t, sections=large_cache) for t in attention),
        "attention_decode": (*DECODE, *(_STORED_DECODE if e4m3 else ())),
        "attention_bwd": (*ATTENTION_BWD, *tf32_tiles.gradients(blackwell)),
    }


def _turing() -> Mapping[str, tuple[Any, ...]]:
    """Those of the others without bfloat16 and TF32, which it has no instructions for; gradients
    whose rows fit into 64 KB; no decoding in one launch, whose rings want asynchronous copies."""
    narrow = _backward(
        (_HALF_PRECISION, 128, 8, 16, 16, 2, 0, 0, 4, 1, False),
        (_HALF_PRECISION, 256, 8, 16, 16, 8, 0, 0, 4, 1, False),
        (_SINGLE, 128, 4, 8, 16, 2, 0, 0, 4, 1, False),
    )
    result = dict(tiles(False, False, False))
    del result["attention_decode"]
    for operation in ("gemm", "attention", "attention_bwd"):
        result[operation] = tuple(t for t in result[operation] if t.precision in ("", None))
    result["attention_bwd"] = (*result["attention_bwd"], *narrow)
    return {
        operation: tuple(
            replace(t, dtypes=kept) for t in rows if (kept := t.dtypes - {DType.bfloat16})
        )
        for operation, rows in result.items()
    }


TURING = _turing()
