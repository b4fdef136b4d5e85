"""A row of weights that outgrows e4m3 alone shows the check of a thread's rows that looks at one.

The model is of what ``sm90/attention/softmax.h`` does to weights of 8 bits: blocks of keys from the
last to the first, references a headroom below the first block's maxima, and a new one in a warp of
which a quarter of a thread's part of a row does not stay below the largest number. The rest of the
kernel is exact here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from calibration.tile_model import LOG2_E, Single
from fast_cases import CASES
from kernelseam.dtypes import DType
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.parity.running.stages import verdict
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.operations.table import operation_of

LARGEST, HEADROOM, LARGEST_SUM = np.float32(448), np.float32(5), np.float32(1e30)
WARP_ROWS = 16
BOTH, FIRST, SECOND = (True, True), (True, False), (False, True)
"""Which of a thread's two rows, eight apart, are looked at."""


@dataclass(frozen=True)
class Tile:
    """Keys of a block, and how many of their exponentials come before the wait for the products."""

    bn: int
    ahead: int


TILES = {64: Tile(64, 64), 128: Tile(128, 48), 256: Tile(64, 64)}


def head(
    q: Array, k: Array, v: Array, scale: float, tile: Tile, seen: tuple[bool, bool]
) -> tuple[Single, Single]:
    """Out [S_q, D_v] and LSE [S_q] of one head."""
    bn, S_k = tile.bn, len(k)
    padded = ((q, WARP_ROWS), (k, bn), (v, bn))
    Q, K, V = (np.pad(x.astype(np.float32), ((0, -len(x) % n), (0, 0))) for x, n in padded)
    factor, rows = np.float32(scale * LOG2_E), len(Q)
    looked = np.array(seen)[np.arange(rows) % WARP_ROWS // 8]
    last = len(K) // bn - 1
    m = l = np.zeros(rows, np.float32)  # noqa: E741
    o = np.zeros((rows, v.shape[1]), np.float32)
    for block in range(last, -1, -1):
        at = slice(block * bn, (block + 1) * bn)
        s = Q @ K[at].T * factor
        if block == last:
            s[:, S_k - block * bn :] = -np.inf
            m = s.max(axis=1) - HEADROOM
        p = np.exp2(s - m[:, None])
        # A thread's elements of a row are two of eight columns: of each a sum, of either part.
        parts = (p[:, : tile.ahead], p[:, tile.ahead :])
        sums = np.concatenate([x.reshape(rows, -1, 8).sum(axis=1) for x in parts if x.size], axis=1)
        above = looked & (block < last) & ~(sums < LARGEST).all(axis=1)
        for warp in np.flatnonzero(above.reshape(-1, WARP_ROWS).any(axis=1)):
            own = slice(warp * WARP_ROWS, (warp + 1) * WARP_ROWS)
            assert (sums[own] < LARGEST_SUM).all()
            by = np.maximum(np.log2(p[own].max(axis=1)) - HEADROOM, 0)
            fade = np.exp2(-by)
            m[own] += by
            l[own] *= fade
            p[own] *= fade[:, None]
            o[own] *= fade[:, None]
        l = l + p.sum(axis=1)  # noqa: E741
        # the conversion's largest number stands for what is larger
        rounded = np.minimum(p, LARGEST).astype(DType.float8_e4m3fn.numpy).astype(np.float32)
        o += rounded @ V[at]
    lse = (m + np.log2(l)) * np.float32(math.log(2))
    return (o / l[:, None])[: len(q)], lse[: len(q)]


def judged(case: AttentionCase, seen: tuple[bool, bool]) -> Verdict:
    inputs = operation_of(case).values(case)
    shape = (case.batch, case.num_heads, case.S_q)
    out, lse = np.zeros((*shape, case.value_dim), np.float32), np.zeros(shape, np.float32)
    for b, h in np.ndindex(shape[:2]):
        g = h * case.kv_heads // case.num_heads
        q, k, v = inputs["q"][b, h], inputs["k"][b, g], inputs["v"][b, g]
        out[b, h], lse[b, h] = head(q, k, v, case.scale_used, TILES[case.head_dim], seen)
    return verdict(case, {"out": out.astype(case.dtype.numpy), "lse": lse})


def few(kind: str, what: str) -> AttentionCase:
    """Two heads of the case, all of whose rows are held against the oracle."""
    case = CASES[f"attention-{kind}-many-tiles-e4m3-{what}"]
    assert isinstance(case, AttentionCase)
    return replace(case, batch=1, num_heads=2, kv_heads=1, sample=None)


@pytest.mark.parametrize("kind", ["f16-64", "bf16-128", "bf16-256"])
def test_a_row_that_rises_alone_shows_a_check_left_out(kind: str) -> None:
    case = few(kind, "rises-every-24")
    assert judged(case, BOTH).worst < 0.5
    for seen in (FIRST, SECOND):
        assert judged(case, seen).worst > 3, seen


def test_rows_that_rise_together_hide_it() -> None:
    """Of a tile's few rows each second one of a thread has a first that rises, too."""
    assert judged(few("bf16-128", "rises"), FIRST).passed


def test_tiles_are_the_hopper_kernels() -> None:
    tiles = pytest.importorskip(
        "kernelseam_cuda.sm90.attention_tiles", reason="the CUDA plugin is not installed"
    )
    used = [t for t in tiles.E4M3_ATTENTION if not (t.hides or t.short)]
    assert {t.head_dim: Tile(t.bn, 2 * t.ahead) for t in used} == TILES


def test_constants_are_the_hopper_kernels() -> None:
    toolchain = pytest.importorskip(
        "kernelseam_cuda.toolchain", reason="the CUDA plugin is not installed"
    )
    block, softmax = (
        toolchain.sources()[f"sm90/attention/{name}.h"] for name in ("block", "softmax")
    )
    assert f"constexpr int HEADROOM = E4M3 ? {HEADROOM:.0f} : 0" in block
    assert f"constexpr float LARGEST_E4M3 = {LARGEST:.0f}.f;" in softmax
    assert f"constexpr float LARGEST_SUM = {LARGEST_SUM:.0e}f;".replace("e+", "e") in softmax
