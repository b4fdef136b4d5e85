"""The bugs in NVIDIA's device sources and the command that runs them on a GPU, here with a bug of
the host's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fast_cases
import pytest
from kernelseam.contract import Device
from kernelseam.parity.matrix import named
from kernelseam.plugins import Plugins
from kernelseam.samples.case import Case
from mutant import Mutant
from mutants import NVIDIA, SM90

BUG = Mutant(
    "half-of-the-columns",
    "platform_host.h",
    "add(acc.x[r][c], a.x[r][k + e], x[e]);",
    "acc.x[r][c] = x[e];",
    "gemm-f16-nt",
    "",
    "the last product is the sum",
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    from benchmarks import platform_mutants

    monkeypatch.setattr(platform_mutants.mutant_hunt, "MUTANTS", (BUG,))
    return platform_mutants


@pytest.fixture
def hunting(script: Any) -> Any:
    """What a process of the script does."""
    return script.mutant_hunt


@pytest.fixture
def device(hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The host, whose toolchain gets its header back."""
    backend = hostcpp.backend("hostcpp")
    assert backend.toolchain is not None
    monkeypatch.setattr(backend.toolchain, "platform_files", backend.toolchain.platform_files)
    return backend.runtime.devices()[0]


def case_named(name: str) -> Case:
    return fast_cases.CASES.get(name) or named(name)


def test_words_are_there_once() -> None:
    """Else ``planted`` raises, and names the mutant. Cases are the matrix units'."""
    toolchain = pytest.importorskip(
        "kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed"
    )
    files = dict(toolchain.sources())
    for mutant in (*NVIDIA, *SM90):
        assert mutant.planted(files) != files, mutant.name
        case = case_named(mutant.case)
        assert case.dtype.itemsize != 4 or getattr(case, "precision", None), mutant.name


def test_the_table_is_sound() -> None:
    assert [n for n, count in Counter(m.name for m in (*NVIDIA, *SM90)).items() if count > 1] == []
    kernels = {m.implementation for m in (*NVIDIA, *SM90)}
    assert kernels == {"shared", "sm90", "sm90-e4m3", "sm90-latent", "sm90-tf32"}


def test_a_bug_is_seen_by_its_case(hunting: Any, device: Device) -> None:
    hunting.plant(BUG, "hostcpp")
    seen = hunting.hunt(BUG, device, time.monotonic() + 60)
    assert (seen.name, seen.passed, seen.case) == (BUG.name, 0, "gemm-f16-nt")
    assert "error/tolerance" in seen.finding and seen.as_it_should


def test_the_header_as_it_is_passes(hunting: Any, device: Device) -> None:
    seen = hunting.hunt(None, device, time.monotonic() + 60)
    assert (seen.name, seen.passed, seen.case, seen.trouble) == (
        "none",
        1,
        "",
        "",
    ) and seen.as_it_should


def test_a_case_of_another_operation_shows_nothing(hunting: Any, device: Device) -> None:
    """A fast kernel's bug is tried on cases of other bugs: that it cannot compute them is no sign
    of it."""
    assert hunting._verdict(named("gemm-f16-nt"), device, "decode") is None
    assert hunting._verdict(named("gemm-f16-nt"), device, "shared") == ""


def test_an_undetected_bug_is_tried_on_the_covering_choice(
    hunting: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [named("gemm-f16-nt"), named("gemm-f16-nn")]
    monkeypatch.setattr(hunting.precompile, "choice", lambda known, device: cases)
    seen = hunting.hunt(BUG, device, time.monotonic() + 60)  # it is not planted
    assert (seen.passed, seen.case) == (2, "") and not seen.as_it_should
    assert not hunting.hunt(BUG, device, 0.0).as_it_should, "no time"


def test_what_does_not_compile_is_no_bug(hunting: Any, device: Device) -> None:
    broken = Mutant("broken", "platform_host.h", BUG.find, "no such thing;", "gemm-f16-nt", "", "")
    hunting.plant(broken, "hostcpp")
    seen = hunting.hunt(broken, device, time.monotonic() + 60)
    assert seen.trouble.startswith("it does not compile: ") and not seen.as_it_should
    hunting.plant(BUG, "hostcpp")  # in the header as it was
    assert hunting.hunt(BUG, device, time.monotonic() + 60).as_it_should


def test_bugs_compile_to_something_else(hunting: Any, hostcpp: Plugins, device: Device) -> None:
    idle = Mutant("idle", "platform_host.h", BUG.find, f"{BUG.find} ", "gemm-f16-nt", "", "")
    assert hunting.compiled(BUG, "host", "hostcpp") == ""
    assert hunting.compiled(idle, "host", "hostcpp") == "idle: it changes nothing in gemm-f16-nt"


def test_each_has_a_process_of_its_own(
    script: Any,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page says what was seen, and what came of a process that died or hung."""
    bugs = [
        Mutant(name, "platform_host.h", "x", "y", "gemm-f16-nt", "", f"it is {name}")
        for name in "abcde"
    ]
    monkeypatch.setattr(script.mutant_hunt, "MUTANTS", tuple(bugs))
    monkeypatch.setattr(script.mutant_hunt, "LUCK", {"e": "it is luck"})
    requested = []

    def run(line: list[str], timeout: float, **options: Any) -> Any:
        name = line[line.index("--child") + 1]
        requested.append(name)
        assert options["env"]["KERNELSEAM_CACHE_DIR"].endswith(f"/{name}")
        if name == "c":
            raise subprocess.TimeoutExpired(line, timeout)
        actual = script.Seen(name, 0, "gemm-f16-nt", "C is 1|2")
        if name in ("none", "e"):
            actual = script.Seen(name, 1)
        if name == "d":  # ended by its own watchdog, its last words what it said before the case
            actual = script.Seen(name, 0, "gemm-f16-nt", "it does not come back within 10 s")
        code, output = {"b": (9, "killed"), "d": (1, "Timeout (0:00:10)!\nThread 0x1")}.get(
            name, (0, "")
        )
        return SimpleNamespace(returncode=code, stdout=json.dumps(asdict(actual)), stderr=output)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "find_device", lambda name: device)
    given = [
        "--device",
        "hostcpp:0",
        "--workers",
        "2",
        "--report",
        str(tmp_path / "page.md"),
        "--seconds",
        "50",
    ]
    assert script.main(given) == 1
    out = capsys.readouterr().out
    assert "NOT AS IT SHOULD: b: its process ended with 9: killed" in out
    assert "as it should: d: gemm-f16-nt: it does not come back within 10 s" in out
    assert "as it may: e: no case showed it, which may be: it is luck" in out
    assert re.search(r"^2 of 5 bugs were seen, 1 may go unseen, in \d+ s$", out, re.MULTILINE)
    assert (
        "after d had hung: no case showed it" in out
        and requested[-1] == "none"
        and requested.count("none") == 2
    )
    page = (tmp_path / "page.md").read_text()
    assert "2 of 5 were seen by a parity case. The sources as they are passed 1 of 1 cases" in page
    assert "| a | it is a | gemm-f16-nt | C is 1/2 | 0 |" in page
    assert "| c | it is c | – | no answer within 50 s | 0 |" in page
    assert script.main([*given, "--only", "a", "--only", "d", "--only", "e"]) == 0
    assert script.main([*given, "--only", "a", "--place", "sm90/"]) == 0, "none there"


def test_a_bug_that_changes_no_binary_says_so(
    script: Any, hunting: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = Mutant("idle", "platform_host.h", BUG.find, f"{BUG.find} ", "gemm-f16-nt", "", "")
    monkeypatch.setattr(hunting, "MUTANTS", (idle,))
    monkeypatch.setattr(hunting, "LUCK", {"idle": "a test finds it"})
    hunting.plant(idle, "hostcpp")
    seen = hunting.hunt(idle, device, time.monotonic() + 60)
    assert seen.may_pass and not seen.as_it_should
    assert script._why(seen) == "its binary is the same, which may be: a test finds it"
    page = script.page([script.Seen("none", 1), seen], device, "command")
    assert "| – | its binary is the same, which may be: a test finds it | 0 |" in page


HANGS = """
import sys, time
from benchmarks import platform_mutants as script
from kernelseam.contract import Device

script.mutant_hunt.precompile.units = lambda *given: [()]
script.mutant_hunt._build_all = lambda *given: ""
script.mutant_hunt._verdict = lambda case, *given: time.sleep(60)
script.mutant_hunt.hunt(None, Device("hostcpp", 0, "host"), time.monotonic() + 60, 0.3, script.mutant_hunt.MUTANTS[:1], script._print)
"""  # noqa: E501


def test_a_case_that_hangs_ends_its_process(script: Any, python_command: list[str]) -> None:
    """By a thread of faulthandler's, which needs no lock of Python's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    start = time.monotonic()
    done = subprocess.run(
        [*python_command, "-c", HANGS], capture_output=True, text=True, env=environment, timeout=60
    )
    assert time.monotonic() - start < 30 and done.returncode == 1 and script.HUNG in done.stderr, (
        done.stderr
    )
    last = script.Seen(**json.loads(done.stdout.splitlines()[-1]))
    assert (last.case, last.finding) == (NVIDIA[0].case, "it does not come back within 0.3 s")
