"""What the calls of a rank's queries over a rank's keys see together is what the whole's mask
shows, each pair once."""

from __future__ import annotations

import itertools
import random

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from kernelseam import absent  # noqa: E402
from kernelseam.distributed import plan  # noqa: E402
from kernelseam.distributed.order import Run, runs  # noqa: E402
from kernelseam.distributed.plan import (  # noqa: E402
    Mask,
    Part,
    opening_and_closing,
    parts,
    reach,
    seen,
)
from kernelseam.distributed.states import _rounded_is_faster  # noqa: E402
from kernelseam.plugins import plugins  # noqa: E402

Plane = npt.NDArray[np.int64]


def of_part(part: Part, prefix: int) -> tuple[npt.NDArray[np.bool_], Plane]:
    """(what is seen, distances) of a part's rows, as the core's descriptor defines them."""
    visible = np.zeros((part.m, part.n), bool)
    distances = np.zeros((part.m, part.n), np.int64)
    offsets = part.offsets
    spans = [(0, part.m, 0, part.n)]
    if offsets is not None:
        spans = [(a, b, a, b) for a, b in itertools.pairwise(offsets)]
    for a, b, c, d in spans:
        i, j = np.arange(b - a)[:, None], np.arange(d - c)
        away = j - i - ((d - c) - (b - a))
        left, right = part.window
        assert (left is None or left >= 0) and (right is None or right >= 0)
        inside = np.ones(away.shape, bool)
        inside &= True if left is None else away >= -left
        inside &= True if right is None else away <= right
        below = np.broadcast_to(j < np.clip(prefix - part.first_key, 0, part.n), away.shape)
        inside = below if part.lengths else inside | below if part.prefix else inside
        visible[a:b, c:d] = inside
        if part.slopes == "before":
            away = (part.first_key + j) - (part.first_query + i)
            assert (away <= 0).all()
        elif part.slopes == "after":
            away = (part.first_key + j) - (part.first_query + i)
            assert (away >= 0).all()
        distances[a:b, c:d] = away
    return visible, distances


def of_whole(mask: Mask, prefix: int) -> tuple[npt.NDArray[np.bool_], Plane]:
    i, j = np.arange(mask.rows_q)[:, None], np.arange(mask.rows_k)
    d = j - i - (mask.rows_k - mask.rows_q)
    visible = np.ones(d.shape, bool)
    visible &= True if mask.left is None else d >= -mask.left
    visible &= True if mask.right is None else d <= mask.right
    if mask.documents is not None:
        which = np.searchsorted(mask.documents, np.arange(mask.rows_q), side="right")
        which[: mask.documents[0]], which[mask.documents[-1] :] = -1, -1
        visible &= (which[:, None] == which) & (which != -1)
    if mask.lengths:
        return np.broadcast_to(j < prefix, d.shape), d
    return visible | (j < prefix) if mask.prefix else visible, d


def places(of: tuple[Run, ...]) -> Plane:
    return np.concatenate([np.arange(r.start, r.stop) for r in of])


def hold(mask: Mask, size: int, balanced: bool, gathered: bool, prefix: int) -> None:
    visible, distance = of_whole(mask, prefix)
    for r in range(size):
        queries = runs(r, size, mask.rows_q, balanced)
        of_keys = [runs(s, size, mask.rows_k, balanced) for s in range(size)]
        for s, keys in enumerate([(Run(0, mask.rows_k),)] if gathered else of_keys):
            rows, columns = places(queries), places(keys)
            times = np.zeros((len(rows), len(columns)), int)
            found = parts(mask, queries, keys)
            opening, closing = opening_and_closing(found)
            assert sum(map(seen, opening)) <= sum(map(seen, closing)) or len(found) > 1
            for part in opening + closing:
                at = np.ix_(
                    range(part.query, part.query + part.m), range(part.key, part.key + part.n)
                )
                shown, away = of_part(part, prefix)
                times[at] += shown
                if mask.alibi:
                    want = distance[np.ix_(rows, columns)][at]
                    np.testing.assert_array_equal(np.abs(away[shown]), np.abs(want[shown]))
            np.testing.assert_array_equal(times, visible[np.ix_(rows, columns)])
            if not gathered and not (mask.prefix or mask.lengths):
                assert bool(found) == plan._sees(mask, queries, keys)
                if found:
                    assert (r - s) % size <= reach(mask, size, balanced)[s]
                pairs = int(visible[np.ix_(rows, columns)].sum())
                assert pairs == sum(map(seen, found))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("balanced", [False, True])
def test_every_visible_pair_once(size: int, balanced: bool) -> None:
    rng = random.Random(size)
    lengths = [2 * size, 4 * size, 6 * size, 10 * size]
    bounds = [None, 0, 1, 3, 7, 100]
    for _ in range(120):
        rows_q, rows_k = rng.choice(lengths), rng.choice(lengths)
        left, right = rng.choice(bounds), rng.choice([*bounds, 0, 0])
        alibi, prefix, lengthy = rng.random() < 0.4, rng.random() < 0.3, rng.random() < 0.1
        documents = None
        if rng.random() < 0.4:
            rows_k, prefix, lengthy = rows_q, False, False
            documents = tuple(sorted(rng.randrange(rows_q + 1) for _ in range(rng.randint(1, 6))))
        if lengthy:
            left = right = None
            alibi = prefix = False
        mask = Mask(rows_q, rows_k, left, right, alibi, prefix, lengthy, documents)
        hold(mask, size, balanced, rng.random() < 0.3, rng.randrange(rows_k + 1))


def test_balanced_causal_work_is_even_and_in_few_calls() -> None:
    size, rows = 8, 1024
    mask = Mask(rows, rows, None, 0)
    calls, work = set(), set()
    for r in range(size):
        found = [
            parts(mask, runs(r, size, rows, True), runs(s, size, rows, True)) for s in range(size)
        ]
        calls |= {len(x) for x in found}
        work.add(sum(map(seen, itertools.chain(*found))))
    assert calls == {1}
    assert work == {rows * (rows + 1) // 2 // size}


def test_a_triangle_and_a_rectangle_are_cut_in_two() -> None:
    opening, closing = opening_and_closing((Part(0, 9, 0, 9, 0, 0, (None, 0)),))
    assert opening == (Part(0, 4, 0, 4, 0, 0, (None, 0)),)
    assert closing == (Part(4, 5, 0, 9, 4, 0, (None, 0)),)
    opening, closing = opening_and_closing((Part(0, 9, 3, 5, 0, 3),))
    assert (opening, closing) == ((Part(0, 4, 3, 5, 0, 3),), (Part(4, 5, 3, 5, 4, 3),))
    banded = (Part(0, 9, 0, 9, 0, 0, (2, 0)),)
    assert opening_and_closing(banded) == ((), banded)


def test_a_window_ends_the_way_round() -> None:
    assert reach(Mask(64, 64, 7, 0), 8, False) == (1,) * 7 + (0,)
    assert reach(Mask(64, 64, 9, 0), 8, False) == (2,) * 6 + (1, 0)
    assert reach(Mask(64, 64, None, 0), 8, False) == (7, 6, 5, 4, 3, 2, 1, 0)
    assert reach(Mask(64, 64), 8, False) == (7,) * 8
    assert reach(Mask(64, 64, documents=(0, 8, 24, 64)), 8, False) == (0, 1, 7, 4, 7, 7, 7, 7)


def test_states_are_rounded_early_only_where_that_is_faster() -> None:
    """A kernel that writes q's dtype alone is worth it; where none is there, states are float32."""
    if "cuda" not in plugins().registry.backends:
        pytest.skip("the plugin for CUDA is not installed")
    device = absent.product("sm_90a")

    def is_faster(implementation: str | None = None, dim: int = 128, **more: object) -> bool:
        fields = {"batch": 1, "num_heads": 16, "S_q": 4096, "S_k": 4096, "head_dim": dim}
        given = {**fields, "dtype": "bfloat16", **more}
        return _rounded_is_faster(device, tuple(given.items()), implementation)

    assert is_faster() and is_faster(dtype="float16", kv_lengths=0)
    assert is_faster(dim=64, alibi_slopes=0) and not is_faster(dim=100)
    assert not is_faster("x")
