"""The shared GEMM on operands of more than 2³¹ elements: every offset that a kernel makes of them is 64-bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kernelseam import BatchedGemmStrided, plan
from kernelseam.plugins import Plugins

sys.path.append(str(Path(__file__).parents[1] / "unit" / "helpers"))

from far_operands import FAR, hold  # noqa: E402


@pytest.mark.parametrize("name", FAR)
def test_one_operand_spans_more_than_2_31_elements(hostcpp: Plugins, name: str) -> None:
    def bind(descriptor: BatchedGemmStrided, **arrays: Any) -> Any:
        made = plan(descriptor, device="hostcpp:0", implementation="shared")
        return made.bind(**{n: x.ctypes.data for n, x in arrays.items()})

    hold(name, bind)
