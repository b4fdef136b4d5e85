"""What the README shows is true."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    q, k, v, out, scores = (
        np.asarray(names[n], np.float64) for n in ("q", "k", "v", "out", "scores")
    )
    wanted = q @ k.swapaxes(2, 3) / 8
    assert np.abs(scores - wanted).max() < 1e-4
    wanted = np.where(np.tril(np.ones((256, 256), bool)), wanted, -np.inf)
    weights = np.exp(wanted - wanted.max(-1, keepdims=True))
    assert np.abs(out - weights @ v / weights.sum(-1, keepdims=True)).max() < 1e-4
    assert capsys.readouterr().out.startswith("[LaunchRecord(kernel='numpy_gemm'")


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs", *(f"plugins/{p}/README.md" for p in ("cuda", "rocm", "rocm_emulator"))],
)
def test_links_lead_somewhere(page: str) -> None:
    place = ROOT / page
    for file in sorted(place.rglob("*.md")) if place.is_dir() else [place]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (file.parent / link).exists(), f"{file} links to {link}"
