"""The reference on attentions, gradients, merges and pages of which one operand spans more than 2³¹
elements."""

from __future__ import annotations

import pytest
from far_cases import CASES, held
from kernelseam.plugins import plugins


@pytest.mark.parametrize("name", CASES)
def test_one_operand_spans_more_than_2_31_elements(name: str) -> None:
    operand, case = CASES[name]
    verdict = held(case, operand, plugins().backend("numpy").runtime.devices()[0], "numpy")
    assert verdict.passed, verdict.message
