"""The softmax that is guarded by its sums (that of a kernel for one arch, ``softmax.h``), in NumPy,
and faults for it.

The sibling of ``model.attention``, which takes the maximum of every tile of keys. Blocks of keys go
from the last to the first. The first of a warpgroup's 64 rows and those that hide keys are online
steps; the others' weights are exponentials over the reference of the rows, which is kept, and only
a thread's own sum of them is looked at. A warp takes a new reference where one of its threads' sums
is not below LIMIT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kernelseam.oracle.formulas import Array

from calibration.tile_model import LOG2_E, Single, TileModel, weigh

LIMIT = np.float32(2**15)
LARGEST_SUM = np.float32(1e30)
STAYS = np.float32(8)
"""In base 2: an online step keeps a reference that would grow by no more."""
LEAD = np.float32(15)
"""In base 2, of bfloat16: how far above a row's largest score its reference may be set where a
block's sums move it."""
ROWS, WARP_ROWS, LANES = 64, 16, 4
"""Of a warpgroup, of a warp, and lanes that share a row."""

GUARDED_FAULTS = {
    "limit-not-checked": "a block is never taken to a new reference",
    "nan-below-limit": "a sum that is NaN counts as below the limit",
    "one-row-checked": "a thread looks at the sum of the first of its two rows only",
    "one-lane-checked": "the first of four lanes that share a row looks at its sum, and decides "
    "for all",
    "infinite-by-sums": "a block whose sums are infinite is scaled down by them",
    "masked-not-raised": "the reference stays in blocks that hide keys",
    "rare-keeps-p": "a block's own weights are not scaled down to the new reference",
    "rare-keeps-o": "the output is not scaled down to the new reference",
    "rare-keeps-l": "the sum of earlier blocks is not scaled down to the new reference",
    "rare-first-row": "a thread scales its second row by what its first one needs",
    "rare-unscaled": "products that are computed again lack the scale",
    "rare-by-sum": "the new reference is a thread's sum and not its mean: it can be 2^5 above "
    "the largest weight",
    "half-leads": "references of float16 lead, too, as only bfloat16's weights may be so small",
}


@dataclass(frozen=True)
class Tile:
    """What of a kernel's tile its numbers depend on: ``groups`` of 64 queries, ``bn`` keys a
    block."""

    groups: int
    bn: int
    turns: bool
    """Whether a warpgroup also takes blocks behind its own rows' last key, which another one of its
    tile needs."""


def tile(head_dim: int, hides: bool) -> Tile:
    """That of the Hopper kernel; of dims that it does not have, the nearest."""
    if head_dim <= 64:
        return Tile(4, 64, False)
    return Tile(2, 128, True) if head_dim <= 192 else Tile(2, 64, not hides)


@dataclass
class _State:
    """Of a warpgroup's rows, in base 2."""

    m: Single
    """References, [64]."""
    l: Single  # noqa: E741
    """Each lane's part of the sums, [64, 4]."""
    o: Single
    """[64, D_v]"""

    def scale(self, fade: Single, fault: str = "") -> None:
        if fault != "rare-keeps-l":
            self.l *= fade[:, None]
        if fault != "rare-keeps-o":
            self.o *= fade[:, None]


@dataclass(frozen=True, eq=False)
class _Head:
    """One head: keys and values filled up with zeros to whole blocks."""

    k: Single
    v: Single
    bn: int
    dtype: npt.DTypeLike
    factor: np.float32
    """From products to base 2; of capped scores, which are in base 2, 1."""
    cap: tuple[np.float32, np.float32] | None
    """In base 2, and scale over the cap."""
    exp2: Callable[[Single], Single]
    fault: str

    @property
    def lead(self) -> np.float32:
        leads = self.fault == "half-leads" or np.dtype(self.dtype) != np.float16
        return LEAD if leads else np.float32(0)

    def scores(self, q: Single, block: int) -> Single:
        """[64, BN]: products, or capped scores in base 2."""
        s: Single = q @ self.k[block * self.bn : (block + 1) * self.bn].T
        if self.cap is not None:
            s = self.cap[0] * np.tanh(s * self.cap[1])
        return s

    def weights(
        self, s: Single, m: Single, factor: np.float32 | None = None
    ) -> tuple[Single, Single]:
        """2^(factor·s − m) by one rounding, and each lane's sums [64, 4]."""
        factor = self.factor if factor is None else factor
        p = self.exp2(
            (s.astype(np.float64) * factor - m.astype(np.float64)[:, None]).astype(np.float32)
        )
        return p, lane_sums(p)

    def add(self, state: _State, p: Single, block: int, visible: npt.NDArray[np.bool_]) -> None:
        rounded = p.astype(self.dtype).astype(np.float32)
        state.o += weigh(rounded, self.v[block * self.bn : (block + 1) * self.bn], visible)


def lane_sums(p: Single) -> Single:
    """Sums of a row's elements by the lane that has them, [64, BN] → [64, 4].

    Element i of a thread's accumulator is in its row i/2 % 2 and in column 8·(i/4) + 2·(lane % 4) +
    i % 2.
    """
    sums: Single = p.reshape(len(p), -1, LANES, 2).sum(axis=(1, 3))
    return sums


def attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    scale: float,
    *,
    fault: str = "",
    exp2: Callable[[Single], Single] = np.exp2,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    sink: float = -np.inf,
) -> tuple[Array, Single]:
    """One head, q [S_q,D], k [S_k,D], v [S_k,D_v] → out [S_q,D_v] in q's dtype, LSE [S_q] in
    float32."""
    (S_q, D), S_k = q.shape, k.shape[0]
    left, right = window[0], 0 if causal else window[1]
    hides, size = left is not None or right is not None, tile(D, causal or window != (None, None))
    filled = ((q, ROWS), (k, size.bn), (v, size.bn))
    Q, K, V = (np.pad(np.asarray(x, np.float32), ((0, -len(x) % n), (0, 0))) for x, n in filled)
    head = _Head(
        K,
        V,
        size.bn,
        q.dtype,
        np.float32(scale * np.log2(np.e) if softcap is None else 1),
        None if softcap is None else (np.float32(softcap * LOG2_E), np.float32(scale / softcap)),
        exp2,
        fault,
    )
    out, lse = np.zeros((len(Q), v.shape[1]), np.float32), np.zeros(len(Q), np.float32)

    def band(i: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first key that a query sees, and the one after its last."""
        at = i + S_k - S_q
        low = np.zeros_like(i) if left is None else np.clip(at - left, 0, S_k)
        return low, np.full_like(i, S_k) if right is None else np.clip(at + 1 + right, 0, S_k)

    for row in range(0, S_q if S_k else 0, ROWS):
        low, high = band(np.arange(row, row + ROWS))
        first = row - row % (ROWS * size.groups)
        tile_low, tile_high = band(np.array([first, min(first + ROWS * size.groups, S_q) - 1]))
        begin, end = int(tile_low[0]) // size.bn, -(-int(tile_high[1]) // size.bn)
        begin, end = (begin, end) if begin < end else (0, 1)
        last = (
            end - 1
            if size.turns or not hides
            else max(min(-(-int(high[-1]) // size.bn), end) - 1, begin)
        )
        # Blocks that all rows see whole, and before which each has seen a key.
        open_begin, open_end = -(-int(low[-1]) // size.bn), max(int(high[0]) - hides, 0) // size.bn
        state = _State(
            np.full(ROWS, -np.inf, np.float32),
            np.zeros((ROWS, LANES), np.float32),
            np.zeros((ROWS, v.shape[1]), np.float32),
        )
        for block in range(last, begin - 1, -1):
            keys = np.arange(block * size.bn, (block + 1) * size.bn)
            visible = (keys >= low[:, None]) & (keys < high[:, None])
            s = head.scores(Q[row : row + ROWS], block)
            if block < last and (not hides or open_begin <= block < open_end):
                p = _guarded(head, state, s)
            else:
                p = _online(head, state, np.where(visible, s, np.float32(-np.inf)), block == last)
            head.add(state, p, block, visible)
        out[row : row + ROWS], lse[row : row + ROWS] = _finish(state, np.float32(sink * LOG2_E))
    if not S_k:
        lse[:] = sink
    return out[:S_q].astype(q.dtype), lse[:S_q]


def _online(head: _Head, state: _State, s: Single, first: bool) -> Single:
    """Weights of a block by its maxima; a reference that would grow by little is kept."""
    x = np.fmax.reduce(s, axis=1) * head.factor
    if first:
        state.m = x
    elif head.fault != "masked-not-raised":
        now = np.fmax(state.m, x)
        by = state.m - np.where(np.isneginf(now), np.float32(0), now)
        stays = by >= -STAYS
        state.scale(np.where(stays, np.float32(1), np.exp2(by)))
        state.m = np.where(stays, state.m, now)
    p, sums = head.weights(s, np.where(np.isneginf(state.m), np.float32(0), state.m))
    state.l = state.l + sums
    return p


def _guarded(head: _Head, state: _State, s: Single) -> Single:
    """Weights of a block that hides nothing to the kept references, or to new ones in warps that
    need them."""
    p, sums = head.weights(s, state.m)
    # [warp, row % 8, lane]: a thread has two rows, eight apart.
    pairs = sums.reshape(-1, 2, WARP_ROWS // 2, LANES)
    threads = pairs[:, 0] if head.fault == "one-row-checked" else pairs[:, 0] + pairs[:, 1]
    if head.fault == "one-lane-checked":
        threads = threads[..., :1]
    above = threads >= LIMIT if head.fault == "nan-below-limit" else ~(threads < LIMIT)
    if head.fault == "limit-not-checked":
        above[...] = False
    for warp in np.flatnonzero(above.any(axis=(1, 2))):
        rows = slice(WARP_ROWS * warp, WARP_ROWS * (warp + 1))
        own = _State(state.m[rows], state.l[rows], state.o[rows])
        if head.fault == "infinite-by-sums" or (threads[warp] < LARGEST_SUM).all():
            p[rows], sums[rows] = _rebase_by_sums(own, p[rows], sums[rows], head)
        else:
            p[rows], sums[rows] = _rebase_by_tops(head, own, s[rows])
        state.m[rows], state.l[rows], state.o[rows] = own.m, own.l, own.o
    state.l = state.l + sums
    return p


def _rebase_by_sums(own: _State, p: Single, sums: Single, head: _Head) -> tuple[Single, Single]:
    """A warp's block over the largest mean of the four lanes of a row, which no weight's maximum is
    below, and a lead above it."""
    fault = head.fault
    elements = 1 if fault == "rare-by-sum" else p.shape[1] // LANES
    most = sums.max(axis=1) / np.float32(elements)
    to = np.where(most > 1, own.m + (np.log2(most) + head.lead), own.m)
    fade = np.exp2(own.m - to)
    if fault == "rare-first-row":
        fade = np.tile(fade[: WARP_ROWS // 2], 2)
    own.m = to
    own.scale(fade, fault)
    return p if fault == "rare-keeps-p" else p * fade[:, None], sums * fade[:, None]


def _rebase_by_tops(head: _Head, own: _State, s: Single) -> tuple[Single, Single]:
    """A warp's block once more from its scores: an online step."""
    factor = np.float32(1) if head.fault == "rare-unscaled" else head.factor
    now = np.fmax(own.m, np.fmax.reduce(s, axis=1) * factor)
    base = np.where(np.isneginf(now), np.float32(0), now)
    own.scale(np.exp2(own.m - base), head.fault)
    own.m = now
    return head.weights(s, base, factor)


def _finish(state: _State, sink: np.float32) -> tuple[Single, Single]:
    """Results and LSE: a sink is one more key whose value is 0."""
    total, top = state.l.sum(axis=1), np.fmax(state.m, sink)
    base = np.where(np.isneginf(top), np.float32(0), top)
    fade = np.exp2(state.m - base)
    total = total * np.where(np.isneginf(state.m), np.float32(1), fade) + np.exp2(sink - base)
    nothing = total == 0
    inverse = np.where(nothing, np.float32(0), fade / np.where(nothing, np.float32(1), total))
    lse = np.where(nothing, np.float32(-np.inf), np.float32(np.log(2)) * (base + np.log2(total)))
    return state.o * inverse[:, None], lse


def guarded(fault: str = "") -> TileModel:
    """The model as an implementation of attention."""
    return TileModel("attention", fault, head=attention)
