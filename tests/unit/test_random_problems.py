"""The random problems of benchmarks/random_attention.py: what is drawn, and that the reference computes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelseam.parity.cases import AttentionCase, BackwardCase, Case
from kernelseam.parity.run import Target, run_case
from kernelseam.plugins import plugins


@pytest.fixture(scope="module")
def drawing() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import drawing

    yield drawing
    sys.path.pop(0)


def _drawn(drawing: Any, seed: int, count: int) -> list[Case]:
    kinds = drawing.kinds(np.random.default_rng(seed), 60)
    return [
        drawing.draw(kinds[i % 60], f"random-{seed}-{i}", np.random.default_rng((seed, i))) for i in range(count)
    ]


def test_the_kinds_cover_operations_views_and_options(drawing: Any) -> None:
    kinds = drawing.kinds(np.random.default_rng(0), 60)
    assert len(set(kinds)) == 60
    assert {k.operation for k in kinds} == {"attention", "attention_bwd", "merge_states"}
    assert {k.views for k in kinds if k.operation == "attention"} == set(drawing.VIEWS)
    assert {o for k in kinds for o in k.options} == set(drawing.OPTIONS)
    assert {k.dtype for k in kinds} == {drawing.F16, drawing.BF16, drawing.F32}


def test_a_problem_is_its_number_s_alone(drawing: Any) -> None:
    first, again, other = _drawn(drawing, 1, 60), _drawn(drawing, 1, 60), _drawn(drawing, 2, 60)
    assert first == again and first != other


def test_problems_are_small_and_ragged(drawing: Any) -> None:
    cases = _drawn(drawing, 0, 600)
    forwards = [c.forward if isinstance(c, BackwardCase) else c for c in cases]
    found = [c for c in forwards if isinstance(c, AttentionCase)]
    assert max(c.batch * c.num_heads for c in found) <= drawing.MOST_HEADS
    assert max(c.S_q for c in found) <= drawing.LONGEST and max(c.S_k for c in found) > drawing.LONGEST
    assert any(0 in (c.kv_lengths or ()) for c in found) and any(c.page_size == 3 for c in found)
    assert any(c.S_q % 16 and c.S_k % 16 for c in found) and any(c.S_q == 1 for c in found)


def test_the_reference_computes_them(drawing: Any) -> None:
    device = plugins().backend("numpy").runtime.devices()[0]
    for case in _drawn(drawing, 5, 60):
        run_case(case, Target(device, "numpy", case.operation, own=True)).require()
