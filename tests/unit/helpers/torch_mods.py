"""Scores and masks as users of torch's FlexAttention write them: for each name and S_q × S_k a
score_mod and a mask_mod, either of which may be None. B = 2, H = 3."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

B, H = 2, 3
Mod = Callable[..., Any]
Mods = tuple[Mod | None, Mod | None]
F = torch.nn.functional
GLOBAL_WINDOW = 20


def drawn(*shape: int, seed: int = 0) -> Any:
    """N(0, 1) in float64, with a gradient."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(np.asarray(values)).requires_grad_()


def documents(n: int, count: int, seed: int) -> Any:
    return torch.from_numpy(np.sort(np.random.default_rng(seed).integers(0, count, n)))


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def alibi(n: int, m: int) -> Mods:
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / H) for i in range(H)], dtype=torch.float64)
    slopes.requires_grad_()
    return lambda s, b, h, q, kv: s + slopes[h] * (kv - q), causal


def softcap(n: int, m: int) -> Mods:
    cap = 1.5
    return lambda s, b, h, q, kv: cap * torch.tanh(s / cap), None


def relative(n: int, m: int) -> Mods:
    table = drawn(H, n + m)
    return lambda s, b, h, q, kv: s + table[h, kv - q + n], None


def relative_from_the_end(n: int, m: int) -> Mods:
    table = drawn(n + m)
    return lambda s, b, h, q, kv: s + table[kv - q], causal


def full_bias(n: int, m: int) -> Mods:
    bias = drawn(B, H, n, m)
    return lambda s, b, h, q, kv: s + bias[b, h, q, kv], None


def shared_bias(n: int, m: int) -> Mods:
    bias = drawn(n, m).detach()
    return lambda s, b, h, q, kv: s + bias[q, kv], None


def document_causal(n: int, m: int) -> Mods:
    doc = documents(max(n, m), 5, 1)
    return None, and_masks(causal, lambda b, h, q, kv: doc[q] == doc[kv])


def packed_documents(n: int, m: int) -> Mods:
    doc = documents(max(n, m), 4, 2)
    start = torch.searchsorted(doc, torch.arange(4)).to(torch.int32)

    def within(mask: Mod) -> Mod:
        def inner(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (doc[q] == doc[kv]) & mask(b, h, q - start[doc[q]], kv - start[doc[kv]])

        return inner

    return None, within(causal)


def window(n: int, m: int) -> Mods:
    w = 17
    return None, lambda b, h, q, kv: (q - kv <= w) & (kv - q <= w)


def window_of_a_global(n: int, m: int) -> Mods:
    return None, lambda b, h, q, kv: (q >= kv) & (q - kv <= GLOBAL_WINDOW)


def prefix(n: int, m: int) -> Mods:
    lengths = torch.tensor([11, 30], dtype=torch.int32)
    return None, or_masks(causal, lambda b, h, q, kv: kv < lengths[b])


def neighbourhood(n: int, m: int) -> Mods:
    w, radius = 8, 2
    rows = -(-n // w)

    def neighbours(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = (q // w).clamp(radius, rows - 1 - radius)
        y = (q % w).clamp(radius, w - 1 - radius)
        return ((x - kv // w).abs() <= radius) & ((y - kv % w).abs() <= radius)

    return None, neighbours


def dilated(n: int, m: int) -> Mods:
    step, reach = 3, 24
    return None, lambda b, h, q, kv: (q >= kv) & ((q - kv) % step == 0) & (q - kv <= reach)


def tree(n: int, m: int) -> Mods:
    parents, paths = [-1], [1]
    draw = np.random.default_rng(3)
    for i in range(1, 60):
        parents.append(int(draw.integers(0, i)))
        paths.append(paths[parents[i]] | 1 << i)
    bits = torch.tensor([paths[i % 60] for i in range(max(n, m))], dtype=torch.int64)
    return None, lambda b, h, q, kv: (q // 60 == kv // 60) & ((bits[q] >> (kv % 60)) & 1 == 1)


def sink_window(n: int, m: int) -> Mods:
    sinks, w = 4, 16
    return None, lambda b, h, q, kv: (q >= kv) & ((q - kv < w) | (kv < sinks))


def temperature(n: int, m: int) -> Mods:
    t = drawn(H)
    return lambda s, b, h, q, kv: s * F.softplus(t[h]), causal


def soft_mask(n: int, m: int) -> Mods:
    weights = drawn(n, m, seed=4)
    return lambda s, b, h, q, kv: s + torch.log(torch.sigmoid(weights[q, kv])), None


def t5(n: int, m: int) -> Mods:
    table, exact, far = drawn(16, H), 4, 32

    def bucketed(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        d = torch.maximum(q - kv, torch.zeros_like(q))
        steps = torch.log(d.clamp(min=1).float() / exact) / math.log(far / exact) * (16 - exact)
        large = exact + steps.int()
        return s + table[torch.where(d < exact, d, large.clamp(max=15)), h]

    return bucketed, causal


def checkerboard(n: int, m: int) -> Mods:
    return lambda s, b, h, q, kv: torch.where((q + kv) % 2 == 0, s * 0.5, s), None


def causal_as_a_score(n: int, m: int) -> Mods:
    return lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")), None


def scalars(n: int, m: int) -> Mods:
    t, u = drawn(), drawn(seed=9)
    return lambda s, b, h, q, kv: s * t + u, None


def sandwich(n: int, m: int) -> Mods:
    return lambda s, b, h, q, kv: s + torch.cos((q - kv) / 10000 ** (h / H)) * 2, None


def graph(n: int, m: int) -> Mods:
    distances = torch.from_numpy(np.random.default_rng(5).integers(0, 6, (B, n, m)))
    table = drawn(H, 6)
    return lambda s, b, h, q, kv: s + table[h, distances[b, q, kv]], None


def block_diffusion(n: int, m: int) -> Mods:
    half, size = n // 2, 8

    def diffusion(b: Any, h: Any, q: Any, kv: Any) -> Any:
        noised, other = q < half, kv < half
        x, y = (q % half) // size, (kv % half) // size
        own = (x == y) & (noised == other)
        return own | ((x > y) & noised & ~other) | ((x >= y) & ~noised & ~other)

    return None, diffusion


def segments(n: int, m: int) -> Mods:
    kinds = torch.from_numpy(np.random.default_rng(6).integers(0, 4, max(n, m)))
    table = drawn(4, 4)
    return lambda s, b, h, q, kv: s + table[kinds[q], kinds[kv]], None


def by_row(n: int, m: int) -> Mods:
    kinds = torch.from_numpy(np.random.default_rng(6).integers(0, 4, max(n, m)))
    table = drawn(4, H)
    return lambda s, b, h, q, kv: s * table[kinds[q], h], None


class Hinge(torch.nn.Module):  # type: ignore[misc]
    """A module whose parameters and numbers a bound method reads."""

    def __init__(self, heads: int, reach: int) -> None:
        super().__init__()
        self.slope, self.reach = torch.nn.Parameter(drawn(heads).detach()), reach

    def score(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s - self.slope[h] * F.relu((q - kv).float() - self.reach)


def bound_method(n: int, m: int) -> Mods:
    return Hinge(H, 3).score, functools.partial(lambda w, b, h, q, kv: q - kv < w, 40)


MODS: dict[str, Callable[[int, int], Mods]] = {
    f.__name__: f
    for f in (
        *(alibi, softcap, relative, relative_from_the_end, full_bias, shared_bias),
        *(document_causal, packed_documents, window, window_of_a_global, prefix, neighbourhood),
        *(dilated, tree, sink_window, temperature, soft_mask, t5, checkerboard),
        *(causal_as_a_score, scalars, sandwich, graph, block_diffusion, segments, by_row),
        bound_method,
    )
}


def grids(n: int, m: int) -> list[Any]:
    """b, h, q_idx and kv_idx as torch's indices, each on its own axis."""
    extents = (B, H, n, m)
    return [
        torch.arange(e).reshape([-1 if i == j else 1 for j in range(4)])
        for i, e in enumerate(extents)
    ]
