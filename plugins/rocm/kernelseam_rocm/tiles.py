"""Tile shapes of the shared kernels by family of archs.

Chosen by what the compiler makes of them: none spills for any covering spec, those for head dims up
to 128 move no registers to AGPRs in their loops, and of such the ones whose matrix units would work
the most by count. None was timed on a device yet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernelseam.descriptors.common.precision import PRECISIONS
from kernelseam.dtypes import DType
from kernelseam.kernels import AttentionTile, BackwardTile, DecodeTile, GemmTile, GemvTile

HALF_PRECISION = frozenset({DType.float16, DType.bfloat16})
SINGLE, DOUBLE = frozenset({DType.float32}), frozenset({DType.float64})

# 64 columns of K a slice are whole lines of 128 bytes. One slice in LDS, one on its way in
# registers: another block of the compute unit works while this one waits.
CDNA_GEMM = (
    GemmTile(HALF_PRECISION, 128, 128, 64, 2, 2, stages=1, min_blocks=2, persistent=False),
    GemmTile(
        HALF_PRECISION, 128, 64, 64, 2, 2, stages=1, min_blocks=2, persistent=False, row_sums=False
    ),
    GemmTile(HALF_PRECISION, 64, 64, 64, 2, 2, stages=1, min_blocks=2, persistent=False),
    GemmTile(HALF_PRECISION, 32, 32, 64, 2, 2, stages=1, min_blocks=4, persistent=False),
    GemmTile(HALF_PRECISION, 16, 16, 32, 1, 1, stages=2, min_blocks=2, persistent=False, teams=4),
    GemmTile(SINGLE, 128, 64, 16, 2, 2, stages=2, min_blocks=2, persistent=False),
    GemmTile(SINGLE, 64, 64, 16, 2, 2, stages=2, min_blocks=2, persistent=False),
    GemmTile(SINGLE, 32, 32, 16, 2, 2, stages=2, min_blocks=4, persistent=False),
    GemmTile(SINGLE, 16, 16, 16, 1, 1, stages=2, min_blocks=2, persistent=False, teams=4),
    GemmTile(DOUBLE, 64, 64, 16, 2, 2, stages=2, min_blocks=2, persistent=False),
    GemmTile(DOUBLE, 32, 32, 16, 2, 2, stages=2, min_blocks=4, persistent=False),
)
TF32_GEMM = tuple(
    GemmTile(SINGLE, *shape, min_blocks=blocks, persistent=False, teams=teams, precision=precision)
    for precision in PRECISIONS
    for shape, blocks, teams in (
        ((128, 64, 32, 2, 2, 1), 2, 1),
        ((64, 64, 32, 2, 2, 1), 2, 1),
        ((32, 32, 32, 2, 2, 1), 4, 1),
        ((16, 16, 32, 1, 1, 1), 4, 4),
    )
)
"""float32 by way of TF32, where an arch has instructions for it: slices of whole lines. Of fewer
blocks the compiler would take AGPRs for the small tiles' sums."""
GFX90A_GEMM = tuple(replace(t, reduces_halves=t.bn < 128) for t in CDNA_GEMM)
"""Sums and maxima of pairs of halves leave 128×128 too few scalar registers, of which there are 6
fewer than on gfx942."""
CDNA_GEMV = (
    GemvTile(True, 8, 4, 128, 2),
    GemvTile(True, 64, 2, 256, 4, ahead=True),
    GemvTile(False, 8, 4, 256, 4),
    GemvTile(False, 8, 2, 512, 8, ahead=True),
)
RDNA_GEMV = (
    GemvTile(True, 8, 4, 128, 4),
    GemvTile(True, 32, 2, 128, 4, ahead=True),
    GemvTile(False, 8, 4, 256, 8),
    GemvTile(False, 8, 2, 512, 16, ahead=True),
)
_RDNA_GEMM = (
    GemmTile(HALF_PRECISION, 64, 64, 64, 2, 2, stages=1, min_blocks=2, persistent=False),
    GemmTile(HALF_PRECISION, 32, 32, 64, 2, 2, stages=2, min_blocks=2, persistent=False),
    GemmTile(HALF_PRECISION, 16, 16, 32, 1, 1, stages=2, min_blocks=2, persistent=False, teams=4),
    GemmTile(SINGLE, 128, 64, 16, 4, 2, stages=2, min_blocks=2, persistent=False),
    GemmTile(SINGLE, 64, 64, 16, 4, 2, stages=2, min_blocks=2, persistent=False),
    GemmTile(SINGLE, 32, 32, 16, 2, 2, stages=2, min_blocks=2, persistent=False),
    GemmTile(SINGLE, 16, 16, 16, 1, 1, stages=2, min_blocks=2, persistent=False, teams=4),
    GemmTile(DOUBLE, 64, 64, 16, 4, 2, stages=2, min_blocks=2, persistent=False),
    GemmTile(DOUBLE, 32, 32, 16, 2, 2, stages=2, min_blocks=2, persistent=False),
)
RDNA3_GEMM = (
    GemmTile(HALF_PRECISION, 128, 128, 64, 4, 2, stages=1, persistent=False, row_sums=False),
    GemmTile(
        HALF_PRECISION, 128, 64, 64, 4, 2, stages=1, min_blocks=2, persistent=False, row_sums=False
    ),
    *_RDNA_GEMM,
)
RDNA4_GEMM = (
    GemmTile(
        HALF_PRECISION, 128, 128, 64, 4, 2, stages=1, min_blocks=2, persistent=False, row_sums=False
    ),
    GemmTile(HALF_PRECISION, 128, 64, 64, 4, 2, stages=1, min_blocks=2, persistent=False),
    *_RDNA_GEMM,
)


def _resident(
    max_dim: int, warps: int, rows: int, bn: int, stages: int, blocks: int = 1, plain: bool = False
) -> AttentionTile:
    """In half precision, with queries in registers and the ring where they lay."""
    return AttentionTile(
        HALF_PRECISION,
        max_dim,
        warps,
        rows,
        bn,
        stages,
        q_resident=True,
        min_blocks=blocks,
        plain=plain,
        q_returned=True,
    )


# With 32 rows a wave every fragment that is read from LDS serves two matrix instructions: at 16 LDS
# would be the limit.
CDNA_SINGLE_ATTENTION = (
    AttentionTile(SINGLE, 64, 4, 16, 32, 1),
    AttentionTile(SINGLE, 128, 4, 16, 16, 1),
    AttentionTile(SINGLE, 256, 3, 8, 16, 1),
)
RDNA_SINGLE_ATTENTION = (
    AttentionTile(SINGLE, 64, 8, 8, 32, 1),
    AttentionTile(SINGLE, 128, 8, 8, 16, 1),
    AttentionTile(SINGLE, 256, 8, 8, 16, 1, column_warps=4),
)
CDNA_ATTENTION = (
    _resident(64, 4, 32, 64, 1, 2, plain=True),
    _resident(64, 4, 32, 32, 1, 2),
    _resident(64, 4, 16, 64, 1, 2, plain=True),
    _resident(128, 4, 32, 32, 1, 2, plain=True),
    _resident(128, 4, 16, 64, 1, 2, plain=True),
    _resident(128, 4, 16, 16, 1, 2),
    _resident(256, 4, 16, 16, 1, 2, plain=True),
    _resident(256, 4, 16, 16, 1),
    AttentionTile(HALF_PRECISION, 576, 4, 16, 16, 1, column_warps=4),
    *CDNA_SINGLE_ATTENTION,
)
# Of 64 keys a scalar register of gfx90a's would spill, where rows are read an element at a time.
GFX90A_ATTENTION = tuple(
    replace(t, bn=32) if (t.max_dim, t.rows, t.bn) == (128, 16, 64) else t for t in CDNA_ATTENTION
)
CDNA4_ATTENTION = (
    _resident(64, 8, 32, 128, 1, plain=True),
    _resident(64, 4, 32, 64, 1, 2),
    _resident(64, 4, 16, 64, 1, 2, plain=True),
    AttentionTile(HALF_PRECISION, 128, 8, 32, 64, 1, plain=True),
    _resident(128, 4, 32, 32, 1, 2, plain=True),
    _resident(128, 4, 16, 64, 1, 2, plain=True),
    _resident(128, 4, 16, 16, 1, 2),
    _resident(256, 4, 16, 32, 1, 2, plain=True),
    _resident(256, 4, 16, 32, 2),
    AttentionTile(HALF_PRECISION, 576, 4, 16, 16, 1, column_warps=4),
    *CDNA_SINGLE_ATTENTION,
)
# Queries that stay in registers take twice as many on gfx11, where both halves of a wave hold them.
# A wave of 32 lanes has registers for 128 columns of 16 rows and little more: wider heads, and
# scores with options, are shared by waves.
RDNA3_ATTENTION = (
    AttentionTile(HALF_PRECISION, 64, 8, 16, 64, 1, plain=True),
    _resident(64, 8, 16, 32, 1),
    _resident(64, 4, 16, 32, 1),
    AttentionTile(HALF_PRECISION, 128, 8, 16, 32, 1, plain=True),
    AttentionTile(HALF_PRECISION, 128, 4, 16, 32, 1, plain=True, score_unroll=2),
    AttentionTile(HALF_PRECISION, 128, 8, 16, 32, 1, column_warps=4),
    AttentionTile(HALF_PRECISION, 256, 8, 16, 16, 1, plain=True, column_warps=2),
    AttentionTile(HALF_PRECISION, 256, 8, 16, 16, 1, column_warps=4),
    AttentionTile(HALF_PRECISION, 576, 8, 16, 16, 1, column_warps=8),
    *RDNA_SINGLE_ATTENTION,
)
RDNA4_ATTENTION = (
    _resident(64, 8, 16, 64, 1, plain=True),
    _resident(64, 8, 16, 32, 1),
    _resident(64, 4, 16, 32, 1),
    _resident(128, 8, 16, 32, 1, plain=True),
    AttentionTile(HALF_PRECISION, 128, 8, 16, 32, 1, column_warps=2),
    AttentionTile(HALF_PRECISION, 256, 8, 16, 16, 1, plain=True, column_warps=2),
    AttentionTile(HALF_PRECISION, 256, 8, 16, 16, 1, column_warps=4),
    AttentionTile(HALF_PRECISION, 576, 8, 16, 16, 1, column_warps=8),
    *RDNA_SINGLE_ATTENTION,
)


def _decode(max_dim: int, warps: int, blocks: int, rate: float) -> DecodeTile:
    """With 16 rows and 16 keys a wave, and as many waves as LDS and registers hold. More options
    than a lean tile has would spill. The rate is that of the shared kernel (0.4, estimated), times
    its part of that kernel's matrix share by count, with two waves a SIMD."""
    return DecodeTile(
        HALF_PRECISION, max_dim, warps, 16, 16, 1, blocks, lean=True, item_cost=5, rate=rate
    )


# Of fewer waves the compiler would take AGPRs, and move.
CDNA_DECODE = (_decode(64, 4, 2, 0.2), _decode(128, 6, 1, 0.2))
CDNA4_DECODE = (_decode(64, 4, 2, 0.2), _decode(128, 4, 2, 0.2))
RDNA_DECODE = (_decode(64, 4, 2, 0.25), _decode(128, 4, 1, 0.25))


def with_stored(rows: tuple[AttentionTile, ...], stored: DType) -> tuple[AttentionTile, ...]:
    """Those in half precision once more, over keys and values of 8 bits, which are converted on
    their way to LDS."""
    return (
        *rows,
        *(replace(t, dtype_kv=stored, widened=True) for t in rows if t.dtypes is HALF_PRECISION),
    )


def with_stored_gemm(rows: tuple[GemmTile, ...], stored: DType) -> tuple[GemmTile, ...]:
    """Those in half precision once more, of A and B of 8 bits: slices of as many bytes. On CDNA,
    whose instructions take no constants, scales leave the smaller tiles too few scalar registers;
    a factor that does not lie along K moves a few to vector registers, and so do scales of blocks
    with a bias and a residual. Blocks' sums beside the others leave 128×128 too few of either."""
    narrow = frozenset({stored})
    few = rows is CDNA_GEMM
    return (
        *rows,
        *(
            replace(
                t,
                dtypes=narrow,
                bk=2 * t.bk,
                row_sums=False,
                plain=few and t.bn == 64,
                scale_k=0 if t.bm == 128 else 64 if few else 32,
            )
            for t in rows
            if t.dtypes is HALF_PRECISION
        ),
    )


_OF_GRADIENTS = (
    *("dtypes", "max_dim", "warps", "rows", "step", "column_warps", "score_rows", "query_rows"),
)


def _atomic(*rows: tuple[Any, ...]) -> tuple[BackwardTile, ...]:
    """With atomics: scores are computed once. What is owned is "resident" in registers where those
    suffice, so that LDS holds more of it; "plain" rows would have too few scalar registers for
    scores with options; "two" blocks' registers: of more the compiler makes AGPRs, and moves;
    "rolled" loops over K: on gfx11, where fragments take twice the registers, two steps spill."""
    return tuple(
        BackwardTile(
            stages=1,
            **dict(zip(_OF_GRADIENTS, row, strict=True)),
            min_blocks=2 if "two" in words else 1,
            plain="plain" in words,
            one_layout=row[0] is SINGLE,
            resident="resident" in words,
            unroll=1 if "rolled" in words else 2,
        )
        for *row, words in rows
    )


def _apart(max_dim: int, warps: int, rows: int, step: int, **more: Any) -> BackwardTile:
    """Keys and queries in a launch each."""
    return BackwardTile(
        HALF_PRECISION, max_dim, warps, rows, step, 1, apart=True, one_layout=False, **more
    )


# What is owned and what is walked over lie in LDS, the latter as either factor of a product; what
# is owned stays in registers where those suffice. Blocks of 8 warps, and head dims up to 512, fit
# the LDS of CDNA 4 alone.
CDNA_ATTENTION_BWD = (
    _apart(64, 4, 32, 32, min_blocks=2, resident=True, plain=True),
    _apart(64, 4, 16, 32, min_blocks=2),
    _apart(128, 8, 16, 64, resident=True, plain=True),
    _apart(128, 4, 16, 32, min_blocks=2, resident=True, plain=True),
    _apart(128, 4, 16, 16, min_blocks=2),
    _apart(256, 4, 16, 16, column_warps=4),
    _apart(512, 4, 16, 16, column_warps=4),
    BackwardTile(SINGLE, 64, 4, 16, 16, 1, apart=True),
    BackwardTile(SINGLE, 128, 4, 8, 16, 1, column_warps=2, apart=True),
    BackwardTile(SINGLE, 256, 4, 8, 16, 1, column_warps=4, apart=True),
    BackwardTile(SINGLE, 512, 4, 8, 16, 1, column_warps=4, apart=True),
    *_atomic(
        (HALF_PRECISION, 64, 4, 64, 32, 2, 32, 16, "resident plain two"),
        (HALF_PRECISION, 128, 4, 32, 32, 2, 16, 16, "resident plain two"),
        (HALF_PRECISION, 256, 4, 64, 16, 4, 16, 16, "resident"),
        (SINGLE, 64, 4, 32, 16, 2, 16, 8, "plain"),
        (SINGLE, 128, 4, 16, 16, 2, 8, 8, ""),
    ),
)
_RDNA_ATTENTION_BWD = (
    _apart(64, 8, 16, 16, column_warps=2, plain=True),
    _apart(64, 8, 16, 16, column_warps=4),
    _apart(128, 8, 16, 16, column_warps=2, plain=True),
    _apart(128, 8, 16, 16, column_warps=4),
    _apart(256, 8, 16, 16, column_warps=8),
    BackwardTile(SINGLE, 64, 4, 8, 16, 1, apart=True),
    BackwardTile(SINGLE, 128, 4, 8, 16, 1, column_warps=2, apart=True),
    BackwardTile(SINGLE, 256, 4, 8, 16, 1, column_warps=4, apart=True),
    *_atomic(
        (HALF_PRECISION, 64, 8, 32, 32, 4, 16, 16, ""),
        (SINGLE, 64, 8, 16, 16, 2, 8, 8, ""),
        (SINGLE, 128, 4, 16, 16, 2, 8, 8, ""),
    ),
)
RDNA3_ATTENTION_BWD = (
    *_RDNA_ATTENTION_BWD,
    *_atomic((HALF_PRECISION, 128, 4, 16, 32, 2, 16, 16, "rolled")),
)
RDNA4_ATTENTION_BWD = (
    *_RDNA_ATTENTION_BWD,
    *_atomic((HALF_PRECISION, 128, 4, 16, 32, 2, 16, 16, "")),
)
