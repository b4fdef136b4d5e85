"""Every kind of fault of queries, keys and values of 8 bits is outside of the bound on some of a
few random heads, on which the right model is within it."""

from __future__ import annotations

import numpy as np
import pytest
from calibration import samples, stored_queries
from kernelseam.dtypes import DType
from kernelseam.oracle import check, formulas

DRAWN = 24


def _worst(fault: str) -> list[float]:
    rng = np.random.default_rng(8)
    found = []
    for number in range(DRAWN):
        x, causal = stored_queries.drawn(rng), number % 2 == 1
        q, k, v = (y[None, None] for y in (x.q, x.k, x.v))
        scale = x.q.shape[1] ** -0.5
        want = formulas.attention(q, k, v, causal, scale, None, x.variant)
        with np.errstate(all="ignore"):
            out, lse = stored_queries.attention(x, causal, scale, fault=fault)
        verdict = check.attention_verdict(
            want,
            len(x.k),
            x.q.shape[1],
            DType.of(x.q.dtype, stored=True),
            out[None, None],
            lse[None, None],
            q.shape[:3],
            None,
        )
        found.append(verdict.worst)
    return found


def test_the_right_model_is_within_the_bound() -> None:
    assert max(_worst("")) <= 1


@pytest.mark.parametrize("fault", stored_queries.FAULTS)
def test_fault_is_caught(fault: str) -> None:
    assert max(_worst(fault)) > 1


def test_calibration() -> None:
    """A few of the problems that ``tools/calibrate.py`` draws."""
    rng = np.random.default_rng(1)
    found = [s for _ in range(20) for s in samples.query_samples(rng)]
    assert len(found) == 40 and {s.kind.split()[1] for s in found} == {"reference", "tile"}
    assert max(s.ratio for s in found) <= 1
