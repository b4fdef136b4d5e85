"""What tests on a GPU share: helpers of their own, and those of the unit tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent / "helpers"),
    str(Path(__file__).parents[1] / "unit" / "helpers"),
]
