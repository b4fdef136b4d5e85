"""Scores and masks that users write, by name: cases refer to them. Over NumPy's arrays, seeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernelseam.expressions import elementwise as e
from kernelseam.samples.files import function_in

Mod = Callable[..., Any]


class Mods(NamedTuple):
    score_mod: Mod | None = None
    mask_mod: Mod | None = None


class Extents(NamedTuple):
    """Of the attention that they are for."""

    batch: int
    heads: int
    S_q: int
    S_k: int


def _drawn(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _documents(n: int, count: int) -> Any:
    return np.sort(np.random.default_rng(count).integers(0, count, n)).astype(np.int32)


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def causal(x: Extents) -> Mods:
    return Mods(mask_mod=_causal)


def bottom_right_causal(x: Extents) -> Mods:
    def mask(b: Any, h: Any, q: Any, kv: Any, *, q_len: Any, kv_len: Any) -> Any:
        return kv - q <= kv_len - q_len

    return Mods(mask_mod=mask)


def window(x: Extents) -> Mods:
    w = 17
    return Mods(mask_mod=lambda b, h, q, kv: abs(q - kv) <= w)


def sink_window(x: Extents) -> Mods:
    sinks, w = 4, 16
    return Mods(mask_mod=lambda b, h, q, kv: (q >= kv) & ((q - kv < w) | (kv < sinks)))


def recent(x: Extents) -> Mods:
    """A window before the last key, and sinks: what a cache that is cut keeps."""
    sinks, w = 4, 40

    def mask(b: Any, h: Any, q: Any, kv: Any, *, q_len: Any, kv_len: Any) -> Any:
        return (kv < sinks) | (kv_len - q_len + q - kv < w)

    return Mods(mask_mod=mask)


def dilated(x: Extents) -> Mods:
    step, reach = 3, 40
    return Mods(mask_mod=lambda b, h, q, kv: (q >= kv) & ((q - kv) % step == 0) & (q - kv <= reach))


def prefix(x: Extents) -> Mods:
    lengths = np.arange(5, 5 + 9 * x.batch, 9, dtype=np.int32)
    return Mods(mask_mod=lambda b, h, q, kv: (q >= kv) | (kv < lengths[b]))


def documents(x: Extents) -> Mods:
    doc = _documents(max(x.S_q, x.S_k), 5).astype(np.int64)
    return Mods(mask_mod=lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]))


def blocks_of_documents(x: Extents) -> Mods:
    """Ten equal documents: most blocks are empty."""
    size = max(x.S_q, x.S_k) // 10 + 1
    return Mods(mask_mod=lambda b, h, q, kv: q // size == kv // size)


def neighbourhood(x: Extents) -> Mods:
    w, radius = 8, 2
    rows = -(-max(x.S_q, x.S_k) // w)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        row = e.clip(q // w, radius, rows - 1 - radius)
        column = e.clip(q % w, radius, w - 1 - radius)
        return (abs(row - kv // w) <= radius) & (abs(column - kv % w) <= radius)

    return Mods(mask_mod=mask)


def tree(x: Extents) -> Mods:
    draw, paths = np.random.default_rng(3), [1]
    for i in range(1, 60):
        paths.append(paths[int(draw.integers(0, i))] | 1 << i)
    bits = np.array([paths[i % 60] for i in range(max(x.S_q, x.S_k))], np.int64)
    return Mods(
        mask_mod=lambda b, h, q, kv: (q // 60 == kv // 60) & ((bits[q] >> (kv % 60)) & 1 == 1)
    )


def block_diffusion(x: Extents) -> Mods:
    half, size = max(x.S_q // 2, 1), 8

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        noised, other = q < half, kv < half
        i, j = (q % half) // size, (kv % half) // size
        own = (i == j) & (noised == other)
        return own | ((i > j) & noised & ~other) | ((i >= j) & ~noised & ~other)

    return Mods(mask_mod=mask)


def heads_apart(x: Extents) -> Mods:
    """A window of its own for each head."""
    widths = np.arange(3, 3 + 11 * x.heads, 11, dtype=np.int32)
    return Mods(mask_mod=lambda b, h, q, kv: abs(q - kv) < widths[h])


def nothing_visible(x: Extents) -> Mods:
    return Mods(mask_mod=lambda b, h, q, kv: q < -kv)


def alibi(x: Extents) -> Mods:
    slopes = (2.0 ** -np.arange(1, x.heads + 1)).astype(np.float32)
    return Mods(lambda s, b, h, q, kv: s + slopes[h] * (kv - q), _causal)


def soft_cap(x: Extents) -> Mods:
    cap = 3.0
    return Mods(lambda s, b, h, q, kv: cap * e.tanh(s / cap))


def another_cap(x: Extents) -> Mods:
    cap = 3.0
    return Mods(lambda s, b, h, q, kv: s / e.sqrt(1 + (s / cap) * (s / cap)))


def relative(x: Extents) -> Mods:
    table, n = _drawn(x.heads, x.S_q + x.S_k), x.S_q
    return Mods(lambda s, b, h, q, kv: s + table[h, kv - q + n])


def relative_from_the_end(x: Extents) -> Mods:
    table = _drawn(x.S_q + x.S_k)
    return Mods(lambda s, b, h, q, kv: s + table[kv - q])


def bias(x: Extents) -> Mods:
    plane = _drawn(*x)
    return Mods(lambda s, b, h, q, kv: s + plane[b, h, q, kv])


def temperature(x: Extents) -> Mods:
    t = abs(_drawn(x.heads)) + 0.5
    return Mods(lambda s, b, h, q, kv: s * t[h], _causal)


def checkerboard(x: Extents) -> Mods:
    return Mods(lambda s, b, h, q, kv: e.where((q + kv) % 2 == 0, s * 0.5, s))


def scalars(x: Extents) -> Mods:
    scale, shift = np.float32(0.7), np.array(0.25, np.float32)
    return Mods(lambda s, b, h, q, kv: s * scale + shift)


def buckets(x: Extents) -> Mods:
    """T5's, without a logarithm at a bucket's edge."""
    table, exact = _drawn(16, x.heads), 4

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        d = e.maximum(q - kv, 0)
        large = exact + e.minimum(d // 7, 15 - exact)
        return s + table[e.where(d < exact, d, large), h]

    return Mods(score, _causal)


def segments(x: Extents) -> Mods:
    kinds = np.random.default_rng(6).integers(0, 4, max(x.S_q, x.S_k)).astype(np.uint8)
    table = _drawn(4, 4).astype(np.float16)
    return Mods(lambda s, b, h, q, kv: s + table[kinds[q], kinds[kv]])


def never(x: Extents) -> Mods:
    """A score of −inf is not a mask."""
    return Mods(lambda s, b, h, q, kv: e.where(q >= kv, s, -np.inf))


def huge(x: Extents) -> Mods:
    """Finite scores beyond float32's range in base 2."""
    return Mods(lambda s, b, h, q, kv: e.where(kv % 3 == 0, -3e38, s))


MODS: dict[str, Callable[[Extents], Mods]] = {
    f.__name__: f
    for f in (
        *(causal, bottom_right_causal, window, sink_window, recent, dilated, prefix, documents),
        *(blocks_of_documents, neighbourhood, tree, block_diffusion, heads_apart),
        *(nothing_visible, alibi, soft_cap, another_cap, relative, relative_from_the_end, bias),
        *(temperature, checkerboard, scalars, buckets, segments, never, huge),
    )
}


def mods_of(name: str, extents: Extents) -> Mods:
    """Those of a name; or of files, each FILE:NAME, as ``in_files`` writes them. Raises
    InvalidValue."""
    if _BETWEEN not in name:
        return MODS[name](extents)
    score_mod, mask_mod = name.split(_BETWEEN)
    return Mods(_in_file("score_mod", score_mod), _in_file("mask_mod", mask_mod))


_BETWEEN = "\n"


def in_files(score_mod: str | None, mask_mod: str | None) -> str:
    """The name of functions in files, each FILE:NAME; empty where there are none."""
    if score_mod is None and mask_mod is None:
        return ""
    return f"{score_mod or ''}{_BETWEEN}{mask_mod or ''}"


def _in_file(field: str, place: str) -> Mod | None:
    option = f"--{field.replace('_', '-')}"
    return function_in(option, place, "mods.py:alibi") if place else None
