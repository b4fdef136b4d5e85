"""Head dims that do not fill the tiles they are computed in: forward and gradients, beside peers
that round them up, too."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.comparing.attention import AttentionRow
from benchmarks.comparing.backward import BackwardRow

FULL = (32, 40, 48, 72, 80, 88, 104, 112, 120, 136, 152, 160, 176, 184, 192, 200, 224, 248)
CAUSAL = (32, 72, 80, 104, 112, 160, 192, 224)
BACKWARD = ((32, True), (40, False), (72, False), (80, False), (80, True), (88, False))
BACKWARD_WIDE = ((112, False), (112, True), (160, False), (160, True), (192, True), (224, True))


def dims_rows() -> list[AttentionRow]:
    """4096 queries and keys; values of another head dim; pictures, whose tokens are no whole
    tiles."""
    long = AttentionRow("attention-dims", 4, 16, 4096, 64)
    return [
        *(replace(long, D=D) for D in FULL),
        *(replace(long, D=D, causal=True) for D in CAUSAL),
        replace(long, D=64, D_v=128),
        replace(long, D=128, D_v=64),
        replace(long, batch=64, S=257, D=80),
        replace(long, batch=8, S=1025, D=88),
        replace(long, batch=32, S=577, D=72),
        *(replace(long, heads=8, D=512, causal=causal) for causal in (False, True)),
        replace(long, heads=8, D=320),
    ]


def backward_dims_rows() -> list[BackwardRow]:
    """Of the gradients."""
    return [
        BackwardRow(4, 16, 4096, D, causal, suite="backward-dims")
        for D, causal in (*BACKWARD, *BACKWARD_WIDE)
    ]
