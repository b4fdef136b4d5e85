"""Every kind of fault of keys and values of 8 bits, and of queries beside them, is outside of the
bound on some of a few random heads, on which the right model is within it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from calibration import samples, stored_keys, stored_queries
from calibration.samples import Sample
from kernelseam.dtypes import DType
from kernelseam.oracle import check, formulas


@dataclass(frozen=True)
class Model:
    """Heads to draw, an attention in which faults can be planted, and what draws problems."""

    drawn: Callable[[np.random.Generator], Any]
    attention: Callable[..., Any]
    faults: Mapping[str, str]
    heads: int
    samples: Callable[[np.random.Generator], Iterable[Sample]]


MODELS = {
    "keys": Model(
        stored_keys.drawn, stored_keys.attention, stored_keys.FAULTS, 40, samples.stored_samples
    ),
    "queries": Model(
        stored_queries.drawn,
        stored_queries.attention,
        stored_queries.FAULTS,
        24,
        samples.query_samples,
    ),
}


def _worst(model: Model, fault: str) -> float:
    """The largest error of all heads, as a part of the bound."""
    rng = np.random.default_rng(8)
    worst = 0.0
    for number in range(model.heads):
        x, causal = model.drawn(rng), number % 2 == 1
        q, k, v = (y[None, None] for y in (x.q, x.k, x.v))
        scale = x.q.shape[1] ** -0.5
        want = formulas.attention(q, k, v, causal, scale, None, x.variant)
        with np.errstate(all="ignore"):
            out, lse = model.attention(x, causal, scale, fault=fault)
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
        worst = max(worst, verdict.worst)
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_the_right_model_is_within_the_bound(name: str) -> None:
    assert _worst(MODELS[name], "") <= 1


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, model in MODELS.items() for fault in model.faults]
)
def test_fault_is_caught(name: str, fault: str) -> None:
    assert _worst(MODELS[name], fault) > 1


@pytest.mark.parametrize(("name", "draws", "needed"), [("keys", 30, 4), ("queries", 20, np.inf)])
def test_calibration(name: str, draws: int, needed: float) -> None:
    """Some problems of those that docs/accuracy.md counts. Of keys alone the bound's constant
    is 8: half of it would do."""
    rng = np.random.default_rng(1)
    drawn = [s for _ in range(draws) for s in MODELS[name].samples(rng)]
    assert len(drawn) == 2 * draws
    assert {s.kind.split()[1] for s in drawn} == {"reference", "tile"}
    assert max(s.ratio for s in drawn) <= 1 and max(s.needed for s in drawn) < needed
