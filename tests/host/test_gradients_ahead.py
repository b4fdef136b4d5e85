"""Gradients that are compiled beside the forward of a call that differentiates."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import compilation
from kernelseam.compilation.ahead import begin, expect, expect_no_more
from kernelseam.contract import SourceBundle
from kernelseam.ops.gradients_ahead import gradients_ahead
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostToolchain


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, bool]]:
    """The kernels that are compiled, and whether by the thread of the test."""
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path / "cache"))
    compilation.forget()
    names: list[tuple[str, bool]] = []
    plain = HostToolchain.compile

    def compile(self: HostToolchain, bundle: SourceBundle, arch: str) -> bytes:
        names.append((bundle.name, threading.current_thread() is threading.main_thread()))
        return plain(self, bundle, arch)

    monkeypatch.setattr(HostToolchain, "compile", compile)
    return names


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "kernelseam: ahead":
            thread.join()


def test_the_gradients_of_a_call_find_their_kernels_compiled(
    hostcpp: Plugins, compiled: list[tuple[str, bool]]
) -> None:
    runtime = hostcpp.backend("hostcpp").runtime
    device = runtime.devices()[0]
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        runtime.from_host(rng.standard_normal((1, 2, 9, 8)).astype(np.float32), device)
        for _ in range(4)
    )
    options: dict[str, Any] = {"causal": True, "scale": 0.5}
    token = expect(partial(gradients_ahead, {"q": q, "k": k, "v": v}, options, True, None))
    out, lse = kernelseam.attention(q, k, v, return_lse=True, **options)
    expect_no_more(token)
    wait()
    assert [name for name, by_caller in compiled if by_caller] == ["attention_forward"]
    ahead = {name for name, by_caller in compiled if not by_caller}
    assert ahead == {"attention_backward", "row_delta"}
    before = len(compiled)
    kernelseam.attention_bwd(dout, q, k, v, out, lse, **options)
    assert len(compiled) == before
    kernelseam.attention(q, k, v, softcap=2.0)  # expected no more
    wait()
    assert compiled[before:] == [("attention_forward", True)]


def test_it_begins_once_and_its_errors_are_left_to_the_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began: list[str] = []

    def fails() -> None:
        raise ValueError("of the gradients")

    def later() -> Any:
        began.append("")
        return fails

    token = expect(later)
    with caplog.at_level("DEBUG", "kernelseam"):
        for _ in range(2):
            begin()
        wait()
    expect_no_more(token)
    assert began == [""] and "of the gradients" in caplog.text
    begin()
    assert began == [""]
