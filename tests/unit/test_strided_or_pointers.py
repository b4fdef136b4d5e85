"""docs/strided-or-pointers.md runs as it stands, and so does the benchmark behind its figures."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_formula import attention
from idle_step import IDLE
from kernelseam.contract import Cost, Device, PlanParts
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError
from kernelseam.plugins import Plugins, plugins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "strided-or-pointers.md").read_text(encoding="utf-8")


def test_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "strided-or-pointers.md", "exec"), names)
    q, k, v = (names[n].astype(np.float64) for n in "qkv")
    assert q.shape == (2, 4, 8, 16)
    scores = q @ k.swapaxes(2, 3) / 4
    out, _ = attention(q, k, v)
    assert np.abs(np.stack(names["c_list"]) - scores.reshape(8, 8, 8)).max() < 1e-5
    assert np.abs(names["out_tokens"].swapaxes(1, 2) - out).max() < 1e-5
    assert len(blocks) == 8


@pytest.fixture
def benchmark(discovered: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch) -> Any:
    discovered()
    place = ROOT / "benchmarks" / "strided_or_pointers.py"
    spec = importlib.util.spec_from_file_location("strided_or_pointers", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "strided_or_pointers", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TIMED_SECONDS", 1e-4)
    return module


def table(benchmark: Any, monkeypatch: pytest.MonkeyPatch, place: Path) -> tuple[int, str]:
    given = ["strided_or_pointers.py", "--device", "numpy", "--small", "--markdown", str(place)]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    return int(ended.value.code or 0), place.read_text(encoding="utf-8")


def test_the_benchmark_makes_a_table(
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = table(benchmark, monkeypatch, tmp_path / "table.md")
    assert code == 0 and capsys.readouterr().out == text + "\n"
    rows = [
        [c.strip() for c in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert [r[0] for r in rows].count("memory") == 2
    actual = [r for r in rows if r[0] != "memory"]
    both = [
        (kind, way, "1")
        for kind in ("contiguous", "gapped", "token-major")
        for way in ("strides", "pointers")
    ]
    assert [(r[0], r[1], r[4]) for r in actual] == 2 * [
        *both,
        ("scattered", "pointers", "1"),
        ("scattered", "a call per matrix", "6"),
    ]
    assert {r[2] for r in actual} == {"**numpy**"} and all(float(r[3]) > 0 for r in actual)
    operations = 2 * 6 * 16 * 16 * 8  # of both products
    for r in actual:
        assert float(r[5]) * 1e6 == pytest.approx(operations / float(r[3]), rel=0.2)


class Wrong:
    """A way that computes nothing, fails at lists, and takes nothing in float32."""

    name, backend, operation = "wrong", "numpy", "gemm"

    def supports(self, problem: Any, device: Device) -> str | None:
        return "takes no float32" if problem.spec.dtype is DType.float32 else None

    def cost(self, problem: object, device: Device) -> Cost:
        return Cost(0, 0, 1e3)

    def build(self, problem: Any, device: Device) -> PlanParts:
        if problem.spec.view == "pointers":
            raise DeviceError("the runtime said 719\nand more")
        return IDLE


def test_the_benchmark_finds_what_is_wrong(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugins().registry.implementations.append(Wrong())
    code, text = table(benchmark, monkeypatch, tmp_path / "table.md")
    assert code == 1 and "| wrong |" not in text
    refused, failed = text.partition("FAILED:")[::2]
    assert refused.partition("Refused:")[2] == (
        "\n\n* wrong, p·v: 6 × 16×8×16 float32: takes no float32 (contiguous by strides, "
        "contiguous by pointers, gapped by strides, gapped by pointers, token-major by strides, "
        "token-major by pointers, scattered by pointers)\n\n"
    )
    product = "q·kᵀ: 6 × 16×16×8 float16"
    assert f"* wrong, {product}: is wrong: C[0, 0, 0] is nan, the oracle says " in failed
    assert (
        f"* wrong, {product}: the runtime said 719 (contiguous by pointers, gapped by pointers, "
        "token-major" in failed
    )
