"""Shared kernels on attentions, gradients, merges and pages of which one operand spans more than
2³¹ elements: batches, heads, rows and pages beyond what 32-bit offsets reach."""

from __future__ import annotations

import pytest
from kernelseam.kernels import definition, kernel
from kernelseam.plugins import Plugins
from large_offsets import CASES, verdict_of
from mutant import Mutant
from mutants import FAR_MUTANTS

OFTEN = 3
"""So many of the planted offsets, the first, are run whenever tests are."""


@pytest.mark.parametrize("name", CASES)
def test_one_operand_spans_more_than_2_31_elements(hostcpp: Plugins, name: str) -> None:
    operand, case = CASES[name]
    verdict = verdict_of(case, operand, hostcpp.backend("hostcpp").runtime.devices()[0], "shared")
    assert verdict.passed, verdict.message


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            m, id=m.name, marks=[pytest.mark.slow("seconds each: gigabytes")] * (i >= OFTEN)
        )
        for i, m in enumerate(FAR_MUTANTS)
    ],
)
def test_an_offset_of_32_bits_is_seen(
    hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    planted = mutant.planted(kernel.shared_sources())
    for module in (definition, kernel):
        monkeypatch.setattr(module, "shared_sources", lambda: planted)
    operand, case = CASES[mutant.case]
    assert not verdict_of(
        case, operand, hostcpp.backend("hostcpp").runtime.devices()[0], "shared"
    ).passed
