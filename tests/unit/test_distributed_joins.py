"""What a rank's calls give for some of its rows each: results joined, gradients summed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernelseam.distributed.partials import Partials, deepest  # noqa: E402
from kernelseam.distributed.plan import Part  # noqa: E402
from kernelseam.distributed.sums import Sum  # noqa: E402

ROWS = 9
SPANS = st.lists(
    st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda x: (min(x), abs(x[0] - x[1]))),
    max_size=9,
)
SHAPE = (1, 2, ROWS, 3)


def drawn(seed: int, *shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@settings(deadline=None)
@given(SPANS)
@example([(0, ROWS), (1, 0)])  # a call of no rows has no result beside the others'
def test_joined_results_are_those_of_all_keys(spans: list[tuple[int, int]]) -> None:
    """Weighted by e^lse, 0 and −inf of rows that no call has; of which some see no key."""
    made = Partials(
        SHAPE,
        torch.zeros(SHAPE).double(),
        torch.float64,
        [Part(a, m, 0, 1, 0, 0) for a, m in spans],
    )
    made._outs.fill_(torch.nan)  # memory that no call writes
    above, below = torch.zeros(SHAPE).double(), torch.zeros(SHAPE[:-1]).double()
    for seed, (a, m) in enumerate(spans):
        out, lse = made.room(Part(a, m, 0, 1, 0, 0))
        assert out.shape == (1, 2, m, 3) and lse.shape == (1, 2, m)
        x, s = drawn(seed, *out.shape), drawn(100 + seed, *lse.shape)
        s[:, 1, :1] = -torch.inf
        lse.copy_(s)
        out.copy_(x.masked_fill(s.isneginf().unsqueeze(-1), 0))
        above[:, :, a : a + m] += x * s.exp().unsqueeze(-1)
        below[:, :, a : a + m] += s.exp()
    wanted = (above / below.unsqueeze(-1)).nan_to_num(0)
    for found, right in zip(made.result(torch.float64), (wanted, below.log()), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(SPANS)
def test_few_results_of_a_row_are_kept(spans: list[tuple[int, int]]) -> None:
    """As many as a row has, up to four; else two."""
    seen = [sum(a <= row < a + m for a, m in spans) for row in range(ROWS)]
    assert deepest(spans) == max(seen)
    made = Partials(
        SHAPE, torch.zeros(1), torch.float32, [Part(a, m, 0, 1, 0, 0) for a, m in spans]
    )
    assert len(made._outs) == (max(1, max(seen)) if max(seen) <= 4 else 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@settings(deadline=None)
@given(SPANS, st.booleans())
def test_sums_are_rounded_once(dtype: str, spans: list[tuple[int, int]], wide: bool) -> None:
    kind = getattr(torch, dtype)
    total, wanted = Sum(torch.zeros(SHAPE, dtype=kind)), torch.zeros(SHAPE).double()
    for seed, (a, m) in enumerate(spans):
        term = drawn(seed, 1, 2, m, 3).to(kind)
        if seed % 2 and dtype == "bfloat16":  # as sums of other ranks come
            term = drawn(seed, 1, 2, m, 3).float()
        total.add(a, term)
        wanted[:, :, a : a + m] += term.double()
    asked = torch.float32 if wide and dtype == "bfloat16" else kind
    found = total.result(asked)
    assert found.dtype is asked and found.is_contiguous()
    step = torch.finfo(torch.float32 if dtype != "float64" else kind).eps
    error = (found.double() - wanted).abs()
    assert (error <= wanted.abs() * torch.finfo(asked).eps / 2 + 16 * step).all(), error.max()


def test_a_single_term_is_not_copied() -> None:
    term = drawn(0, *SHAPE)
    total = Sum(term)
    total.add(0, term)
    assert total.result(torch.float64) is term
