"""Tile shapes of the shared kernels for float32 multiplied in TF32; see ``tiles``."""

from __future__ import annotations

from kernelseam.descriptors.common.precision import PRECISIONS
from kernelseam.dtypes import DType
from kernelseam.kernels import AttentionTile, BackwardTile, GemmTile

_SINGLE = frozenset({DType.float32})


def _gemm(
    precision: str,
    bm: int,
    bn: int,
    warps_m: int,
    warps_n: int,
    stages: int,
    min_blocks: int,
    plain: bool,
    rate: float,
) -> GemmTile:
    """A tile of float32 multiplied in TF32. A slice's rows fill all banks, as the matrix engine
    wants it."""
    return GemmTile(
        _SINGLE,
        bm,
        bn,
        32,
        warps_m,
        warps_n,
        stages,
        min_blocks,
        persistent=False,
        plain=plain,
        precision=precision,
        rate=rate,
    )


_GEMM = {
    "tf32": (
        (128, 128, 2, 2, 3, 2, True, 2.6),
        (128, 64, 2, 2, 3, 2, False, 2.2),
        (64, 64, 2, 2, 3, 3, False, 1.6),
        (32, 32, 1, 2, 2, 8, False, 0.6),
    ),
    "tf32x3": (
        (128, 64, 4, 2, 3, 1, False, 0.54),
        (64, 64, 2, 2, 3, 2, False, 0.59),
        (32, 32, 1, 2, 2, 6, False, 0.48),
    ),
}
"""Rows, columns, warps, stages, blocks, plain, rate: of float32's plain units; the split's are an
H200's, where TF32's are less than half of these, as mma.sync's are beside wgmma's."""

_ATTENTION = (
    (32, 4, 16, 64, 1, 3, 1, True, 0.68),
    (64, 4, 16, 64, 1, 2, 1, True, 0.78),
    (64, 4, 16, 32, 2, 2, 1, False, 0.70),
    (128, 4, 16, 64, 1, 2, 1, True, 0.80),
    (128, 4, 16, 16, 2, 2, 1, False, 0.55),
    (256, 8, 16, 32, 1, 1, 1, True, 0.70),
    (256, 8, 16, 16, 1, 1, 2, False, 0.45),
    (256, 4, 16, 16, 1, 1, 2, False, 0.40),
)
"""Head dim, warps, rows, keys, stages, blocks, warps that share rows, plain, rate of the split
products. Of one stage keys and values come in turns."""


def _attention(
    precision: str,
    max_dim: int,
    warps: int,
    rows: int,
    bn: int,
    stages: int,
    min_blocks: int,
    column_warps: int,
    plain: bool,
    rate: float,
) -> AttentionTile:
    """A tile of float32 multiplied in TF32; an H200's rounded products take two fifths of the time
    of the split ones."""
    return AttentionTile(
        _SINGLE,
        max_dim,
        warps,
        rows,
        bn,
        stages,
        min_blocks=min_blocks,
        column_warps=column_warps,
        plain=plain,
        in_turns=stages == 1,
        score_unroll=1,
        precision=precision,
        rate=rate if precision == "tf32x3" else 2.5 * rate,
        block_seconds=1e-6,
    )


_ATTENTION_BWD = (
    (64, 8, 32, 64, 2, 32, 0, True),
    (64, 4, 32, 32, 2, 16, 0, False),
    (128, 8, 32, 64, 4, 16, 0, True),
    (128, 8, 32, 32, 4, 16, 0, False),
    (128, 4, 16, 16, 2, 0, 0, True),
    (128, 4, 16, 16, 4, 0, 0, False),
    (256, 8, 16, 16, 4, 0, 0, True),
    (256, 8, 16, 16, 8, 0, 0, False),
    (64, 8, 32, 64, 2, 32, 16, True),
    (64, 4, 32, 32, 2, 16, 16, False),
    (128, 8, 32, 64, 4, 16, 32, True),
    (128, 8, 32, 32, 4, 16, 16, False),
)
"""Head dim, warps, rows, rows a step, warps that share rows, rows of scores, of dq with atomics,
plain."""


def _backward(
    precision: str,
    max_dim: int,
    warps: int,
    rows: int,
    step: int,
    column_warps: int,
    score_rows: int,
    query_rows: int,
    plain: bool,
) -> BackwardTile:
    """A tile of gradients: those in order with a kernel for keys and one for queries."""
    return BackwardTile(
        _SINGLE,
        max_dim,
        warps,
        rows,
        step,
        2,
        column_warps,
        plain=plain,
        apart=not query_rows,
        score_rows=score_rows,
        query_rows=query_rows,
        unroll=2,
        precision=precision,
    )


GEMM = tuple(_gemm(precision, *row) for precision, rows in _GEMM.items() for row in rows)
ATTENTION = tuple(_attention(p, *row) for p in PRECISIONS for row in _ATTENTION)
ATTENTION_BWD = tuple(_backward(p, *row) for p in PRECISIONS for row in _ATTENTION_BWD)


def gradients(blackwell: bool) -> tuple[BackwardTile, ...]:
    """Those of gradients. Split products of 16 rows by two warps spill on Blackwell's archs (nvrtc
    13.5: 8 to 12 bytes), where four warps share the rows."""
    return tuple(
        t
        for t in ATTENTION_BWD
        if not (
            blackwell and (t.precision, t.rows, t.column_warps, t.max_dim) == ("tf32x3", 16, 2, 128)
        )
    )
