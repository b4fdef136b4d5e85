"""docs/projections.md runs as it stands, and computes what the formulas say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from attention_formula import attention

PAGE = (Path(__file__).parents[2] / "docs" / "projections.md").read_text(encoding="utf-8")


def test_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "projections.md", "exec"), names)
    given = {n: x.astype(np.float64) for n, x in names.items() if isinstance(x, np.ndarray)}
    x, weight, w_out = given["x"], given["w_qkv"], given["w_out"]
    heads = (x @ weight.T + given["b_qkv"]).reshape(2, 10, 12, 16).swapaxes(1, 2)
    cos, sin = np.cos(given["angles"]), np.sin(given["angles"])
    a, b = heads[:, :10, :, :8], heads[:, :10, :, 8:]
    rotated = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    wanted = {"q": rotated[:, :8], "k": rotated[:, 8:], "v": heads[:, 10:]}
    y, _ = attention(wanted["q"], wanted["k"], wanted["v"], causal=True)
    rows = y.swapaxes(1, 2).reshape(2, 10, 128)
    wanted |= {"y": y, "result": rows @ w_out.T + given["b_out"] + x}
    d = given["d_result"]
    wanted["d_y"] = (d @ w_out).reshape(2, 10, 8, 16).swapaxes(1, 2)
    wanted["d_w_out"], wanted["d_b_out"] = np.einsum("bsi,bsj->ij", d, rows), d.sum((0, 1))
    d = (
        np.concatenate([given[n] for n in ("dq", "dk", "dv")], axis=1)
        .swapaxes(1, 2)
        .reshape(2, 10, 192)
    )
    wanted |= {
        "d_input": d @ weight,
        "d_w_qkv": np.einsum("bsi,bsj->ij", d, x),
        "d_b_qkv": d.sum((0, 1)),
    }
    _check_pages(names)
    for name, want in wanted.items():
        found = names[name]
        assert found.dtype == np.float32 and found.shape == want.shape, name
        assert np.abs(found - want).max() < 1e-5 * np.abs(want).max(), name


def _check_pages(names: dict[str, Any]) -> None:
    """What the page's second block writes of the prompt of 7 tokens, whose cache was empty."""
    row = names["hidden_rows"][1:8].astype(np.float64)
    heads = (row @ names["w_qkv"].T.astype(np.float64) + names["b_qkv"]).reshape(7, 12, 16)
    cos, sin = (names[n][:7, None].astype(np.float64) for n in ("cos", "sin"))
    a, b = heads[:, :10, :8], heads[:, :10, 8:]
    rotated = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    assert np.abs(names["q_rows"][1:8] - rotated[:, :8]).max() < 2e-3 * np.abs(rotated).max()
    for name, want in (("k", rotated[:, 8:]), ("v", heads[:, 10:])):
        pages, scales = names[f"{name}_pages"][[6, 2]], names["scales"][f"{name}_scales"][[6, 2]]
        found = (pages.astype(np.float64) * scales[..., None]).reshape(8, 2, 16)[:7]
        assert np.abs(found - want).max() < 2**-4 * np.abs(want).max(), name
    assert names["seen"].shape == (9, 8, 16) and np.isfinite(names["seen"]).all()
