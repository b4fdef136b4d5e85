"""What several problems compute from their extents."""

from __future__ import annotations

import math


def distinct(extent: int, stride: int) -> int:
    """How many different matrices an axis walks over: one where its stride is 0."""
    return min(extent, 1) if stride == 0 else extent


def default_scale(head_dim: int) -> float:
    """1/√D_qk."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
