"""The reference on attentions, gradients, merges and pages of which one operand spans more than 2³¹
elements."""

from __future__ import annotations

import pytest
from kernelseam.plugins import plugins
from large_offsets import CASES, verdict_of


@pytest.mark.parametrize("name", CASES)
def test_one_operand_spans_more_than_2_31_elements(name: str) -> None:
    operand, case = CASES[name]
    verdict = verdict_of(case, operand, plugins().backend("numpy").runtime.devices()[0], "numpy")
    assert verdict.passed, verdict.message
