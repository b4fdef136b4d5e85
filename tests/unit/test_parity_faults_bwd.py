"""Gradients that are wrong are caught: each kind of fault, planted in the model, by the case named
beside it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from calibration import samples as calibration
from calibration import tile_model_bwd
from kernelseam.oracle import tolerances
from kernelseam.oracle.formulas import Array
from kernelseam.parity.matrix import named
from kernelseam.parity.running import stages
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.data import attention as attention_data
from kernelseam.samples.data import attention_bwd as attention_bwd_data
from kernelseam.samples.operations import operands

CAUGHT = {
    "no-delta": "f16-64",
    "delta-of-the-first-row": "f16-64",
    "no-scale-dq": "f16-64",
    "no-scale-dk": "f16-64",
    "heads-not-summed": "f16-64-gqa-6-2",
    "wrong-kv-head": "f16-64-gqa-6-2",
    "causal-off-by-one": "f16-64-causal-33x129-ramp",
    "causal-one-short": "f16-64-causal-33x129",
    "causal-top-left": "f16-64-causal-33x129",
    "window-one-wider": "f16-64-window-16-0",
    "window-one-short": "f16-64-window-33-12",
    "prefix-forgotten": "f16-64-causal-prefix",
    "mask-forgotten": "f16-64-mask",
    "no-cap": "f16-64-softcap-5",
    "no-cap-slope": "f16-64-softcap-5",
    "cap-slope-in-dbias": "f16-64-bias-softcap",
    "no-slopes": "f16-64-causal-alibi-gqa",
    "no-bias": "f16-64-bias-alone",
    "bias-not-summed": "f16-64-bias-by-key",
    "sinks-sign": "f16-64-sinks",
    "sinks-without-lse": "f16-64-sinks",
    "last-key": "f16-64-ramp",
    "last-query": "f16-64-causal-33x129",
    "lengths-one-less": "f16-64-lengths-ramp",
    "lse-base-2": "f16-64",
    "half-scores": "f16-64-extreme",
}
"""Fault → the case that catches it."""
REPEATING = (
    "f16-64-bias-by-key",
    "f16-64-bias-by-query",
    "f16-64-bias-of-heads",
    "f16-64-bias-one",
)


@lru_cache(maxsize=4)
def _values(case: BackwardCase) -> dict[str, Array]:
    return operands.values(case)


def _computed(case: BackwardCase, fault: str) -> dict[str, Array]:
    x, f = _values(case), case.forward
    shape = attention_bwd_data.bias_shape(case) if case.bias_gradient else None
    with np.errstate(all="ignore"):
        result = tile_model_bwd.attention_bwd(
            x, f.causal, f.scale_used, attention_data.variant(f, x), shape, fault=fault
        )
    return {name: result[name] for name in operands.outputs(case)}


def _case(name: str) -> BackwardCase:
    result = named(f"attention-bwd-{name}")
    assert isinstance(result, BackwardCase)
    return result


def test_every_fault_has_its_case() -> None:
    assert set(CAUGHT) == set(tile_model_bwd.FAULTS)


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_fault_is_caught(fault: str) -> None:
    case = _case(CAUGHT[fault])
    right = stages.verdict(case, _computed(case, ""))
    assert right.passed and right.worst < 0.8, right.message
    wrong = stages.verdict(case, _computed(case, fault))
    assert not wrong.passed and wrong.worst > 2, wrong.message


@pytest.mark.parametrize("name", REPEATING)
def test_a_bias_s_gradient_that_is_not_summed_is_caught(name: str) -> None:
    case = _case(name)
    wrong = stages.verdict(case, _computed(case, "bias-not-summed"))
    assert not wrong.passed and wrong.message.startswith("dbias")


def test_gradients_of_keys_beyond_the_lengths_are_zeros() -> None:
    case = _case("f16-64-lengths")
    actual = _computed(case, "")
    assert stages.verdict(case, actual).passed
    actual["dv"][2, 0, 100, 3] = 1e-3
    assert not stages.verdict(case, actual).passed


def test_constants_have_room() -> None:
    rng = np.random.default_rng(3)
    samples = [s for _ in range(20) for s in calibration.gradient_samples(rng)]
    assert len(samples) > 20 and max(s.ratio for s in samples) < 0.9
    assert 0.05 < max(s.needed for s in samples) < tolerances.ATTENTION_CONSTANT / 2
