"""The bugs in NVIDIA's platform header and the command that runs them on a GPU, here with a bug of the host's."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelseam.contract import Device
from kernelseam.parity.cases import named
from kernelseam.plugins import Plugins
from mutant import Mutant

ROOT = Path(__file__).parents[2]
BUG = Mutant(
    "half-of-the-columns", "platform_host.h", "add(acc.x[r][c], a.x[r][k + e], x[e]);", "acc.x[r][c] = x[e];",
    "gemm-f16-nt", "", "the last product is the sum",
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import platform_mutants

    monkeypatch.setattr(platform_mutants, "MUTANTS", (BUG,))
    yield platform_mutants
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def device(hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The host, whose toolchain gets its header back."""
    backend = hostcpp.backend("hostcpp")
    assert backend.toolchain is not None
    monkeypatch.setattr(backend.toolchain, "platform_files", backend.toolchain.platform_files)
    return backend.runtime.devices()[0]


def nvidia() -> tuple[Mutant, ...]:
    sys.path.append(str(ROOT / "tests" / "gpu"))
    try:
        from nvidia_mutants import MUTANTS
    finally:
        sys.path.pop()
    return MUTANTS


@pytest.mark.parametrize("mutant", nvidia(), ids=lambda m: m.name)
def test_words_are_there_once(mutant: Mutant) -> None:
    toolchain = pytest.importorskip("kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed")
    files = dict(toolchain.sources())
    assert mutant.planted(files) != files
    case = named(mutant.case)
    assert case.dtype.itemsize != 4 or getattr(case, "precision", None), "the matrix units' cases"


def test_the_table_is_sound() -> None:
    assert [n for n, count in Counter(m.name for m in nvidia()).items() if count > 1] == []
    assert len(nvidia()) >= 30


def test_a_bug_is_seen_by_its_case(script: Any, device: Device) -> None:
    script.plant(BUG, "hostcpp")
    seen = script.hunt(BUG, device, time.monotonic() + 60)
    assert (seen.name, seen.passed, seen.case) == (BUG.name, 0, "gemm-f16-nt")
    assert "error/tolerance" in seen.said and seen.as_it_should


def test_the_header_as_it_is_passes(script: Any, device: Device) -> None:
    seen = script.hunt(None, device, time.monotonic() + 60)
    assert (seen.name, seen.passed, seen.case, seen.trouble) == ("none", 1, "", "") and seen.as_it_should


def test_a_bug_that_nobody_sees_is_tried_on_the_covering_choice(
    script: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [named("gemm-f16-nt"), named("gemm-f16-nn")]
    monkeypatch.setattr(script.ahead, "choice", lambda known, device: cases)
    seen = script.hunt(BUG, device, time.monotonic() + 60)  # it is not planted
    assert (seen.passed, seen.case) == (2, "") and not seen.as_it_should
    assert not script.hunt(BUG, device, 0.0).as_it_should, "no time"


def test_what_does_not_compile_is_no_bug(script: Any, device: Device) -> None:
    broken = Mutant("broken", "platform_host.h", BUG.find, "no such thing;", "gemm-f16-nt", "", "")
    script.plant(broken, "hostcpp")
    seen = script.hunt(broken, device, time.monotonic() + 60)
    assert seen.trouble.startswith("it does not compile: ") and not seen.as_it_should
    script.plant(BUG, "hostcpp")  # in the header as it was
    assert script.hunt(BUG, device, time.monotonic() + 60).as_it_should


def test_bugs_compile_to_something_else(script: Any, hostcpp: Plugins, device: Device) -> None:
    idle = Mutant("idle", "platform_host.h", BUG.find, f"{BUG.find} ", "gemm-f16-nt", "", "")
    assert script.compiled(BUG, "host", "hostcpp") == ""
    assert script.compiled(idle, "host", "hostcpp") == "idle: it changes nothing in gemm-f16-nt"


def test_each_has_a_process_of_its_own(
    script: Any, device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page says what was seen, and what came of a process that died or hung."""
    bugs = [Mutant(name, "platform_host.h", "x", "y", "gemm-f16-nt", "", f"it is {name}") for name in "abc"]
    monkeypatch.setattr(script, "MUTANTS", tuple(bugs))

    def run(line: list[str], timeout: float, **options: Any) -> Any:
        name = line[line.index("--child") + 1]
        assert options["env"]["KERNELSEAM_CACHE_DIR"].endswith(f"/{name}")
        if name == "c":
            raise subprocess.TimeoutExpired(line, timeout)
        found = script.Seen(name, 1) if name == "none" else script.Seen(name, 0, "gemm-f16-nt", "C is 1|2")
        return SimpleNamespace(returncode=9 * (name == "b"), stdout=json.dumps(asdict(found)), stderr="killed")

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "find_device", lambda name: device)
    given = ["--device", "hostcpp:0", "--workers", "2", "--report", str(tmp_path / "page.md"), "--seconds", "50"]
    assert script.main(given) == 1
    out = capsys.readouterr().out
    assert "NOT AS IT SHOULD: b: its process ended with 9: killed" in out and "1 of 3 bugs were seen, in 0 s" in out
    page = (tmp_path / "page.md").read_text()
    assert "1 of 3 were seen by a parity case. The header as it is passed 1 of 1 cases" in page
    assert "| a | it is a | gemm-f16-nt | C is 1/2 | 0 |" in page
    assert "| c | it is c | – | no answer within 50 s | 0 |" in page
    assert script.main([*given, "--only", "a"]) == 0
