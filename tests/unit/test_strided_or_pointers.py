"""docs/strided-or-pointers.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from attention_formula import attention

PAGE = Path(__file__).parents[2] / "docs" / "strided-or-pointers.md"


def test_the_page_runs() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "strided-or-pointers.md", "exec"), names)
    q, k, v = (names[n].astype(np.float64) for n in "qkv")
    assert q.shape == (2, 4, 8, 16)
    scores = q @ k.swapaxes(2, 3) / 4
    out, _ = attention(q, k, v)
    assert np.abs(np.stack(names["c_list"]) - scores.reshape(8, 8, 8)).max() < 1e-5
    assert np.abs(names["out_tokens"].swapaxes(1, 2) - out).max() < 1e-5
    assert len(blocks) == 8
