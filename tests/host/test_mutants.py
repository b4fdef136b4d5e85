"""Every bug planted in the device sources is killed by its parity case, which the sources as they
are pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernelseam.contract import Device
from kernelseam.kernels.sources import shared_sources
from kernelseam.parity.matrix import named
from kernelseam.parity.running.run import Target, run_case
from kernelseam.plugins import Plugins
from kernelseam.samples.common import DECODE, UNFUSED
from kernelseam_hostcpp.executable import BUILDS, SANITIZERS, Report, run
from kernelseam_hostcpp.runtime import DEVICES
from kernelseam_hostcpp.toolchain import sources
from mutant import (
    CONTRACTED,
    GEMM,
    SANITIZED,
    SANITIZED_DECODE,
    SANITIZED_UNFUSED,
    Mutant,
    mutants,
)
from mutants import MUTANTS


def _files() -> dict[str, str]:
    """Every device source by include name, as a bundle has them."""
    result = {**shared_sources(), **sources()}
    result["platform.h"] = result.pop("platform_host.h")
    return result


def test_the_table_is_sound() -> None:
    assert [n for n, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []
    assert sum(m.build == "plain" for m in MUTANTS) >= 20
    assert {m.build for m in MUTANTS} == set(BUILDS)
    for implementation, cases in (
        ("shared", SANITIZED),
        (UNFUSED, SANITIZED_UNFUSED),
        (DECODE, SANITIZED_DECODE),
    ):
        mine = [m for m in MUTANTS if m.implementation == implementation]
        assert {m.case for m in mine if m.build in SANITIZERS} <= set(cases)
    assert {m.case for m in MUTANTS if m.build == "contracted"} <= set(CONTRACTED)


def test_words_are_there_once() -> None:
    """Else ``planted`` raises, and names the mutant."""
    files = _files()
    assert [m.name for m in MUTANTS if m.planted(files) == files] == []


@pytest.mark.parametrize(
    ("find", "where"),
    [("int nowhere;", "nowhere"), ("#include", r"gemm/gemm\.h"), ("T A, B;", "nowhere")],
)
def test_words_that_are_not_there_once_are_named(find: str, where: str) -> None:
    mutant = Mutant("some-bug", GEMM, find, "", "gemm-f16-nt", "", "nothing is summed")
    files = {"gemm/gemm.h": "#include\n#include\nT A,B;", "tile/base.h": "int nowhere;"}
    output = (
        r"^mutant some-bug \(nothing is summed\): its words must be once in gemm/\*, they "
        rf"are {where}"
    )
    with pytest.raises(LookupError, match=output):
        mutant.planted(files)


@pytest.mark.parametrize(
    "text",
    [
        "a\n  gemm/ gemm-f16-nt\n  - x\n",
        "a: b\n  gemm/ gemm-f16-nt\n",
        "a: b\n  gemm/ gemm-f16-nt\n  + y\n  - x\n",
        "a: b\n  gemm/ gemm-f16-nt\n  - x\n  y\n",
    ],
)
def test_lines_that_are_no_mutant_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"some\.txt: a is not written as mutants\(\) says"):
        mutants(str(tmp_path / "some.txt"))


def test_white_space_is_any_white_space() -> None:
    mutant = Mutant("some-bug", GEMM, "if (x) barrier();", "if (y)", "gemm-f16-nt", "", "")
    files = {"gemm/a.h": "int x;\n  if (x)  // why\n", "gemm/b.h": "{\n  if (x)\n    barrier();\n}"}
    assert mutant.planted(files) == {**files, "gemm/b.h": "{\n  if (y)\n}"}


def _planted() -> Iterator[object]:
    for i, mutant in enumerate(MUTANTS):
        for device in DEVICES:
            marks = []
            if device.arch != mutant.archs[0]:
                marks = [pytest.mark.slow("another way to copy")]
            elif i % 8:
                marks = [pytest.mark.slow("seven of eight faults: a compilation each")]
            yield pytest.param(mutant, device, id=f"{mutant.name}-on-{device.arch}", marks=marks)


@pytest.fixture(scope="module")
def reports(
    ahead: Callable[..., Callable[[pytest.Item], Report]],
) -> Callable[[pytest.Item], Report]:
    return ahead(
        "test_is_killed",
        lambda mutant, device: run(
            named(mutant.case), device, mutant.build, mutant, implementation=mutant.implementation
        ),
    )


@pytest.mark.parametrize(("mutant", "device"), list(_planted()))
def test_is_killed(
    request: pytest.FixtureRequest,
    hostcpp: Plugins,
    reports: Callable[[pytest.Item], Report],
    has_sanitizer: Callable[[str], None],
    mutant: Mutant,
    device: Device,
) -> None:
    if mutant.build in SANITIZERS:
        has_sanitizer(mutant.build)
    case = named(mutant.case)
    # as the sources are
    right = run_case(case, Target(device, mutant.implementation, case.operation, builtin=True))
    right.require()
    if right.refusal is not None and device.arch not in mutant.archs:
        pytest.skip(f"{device.arch} does not take the case: {right.refusal}")
    report = reports(request.node)
    if device.arch not in mutant.archs:
        assert report.findings == () and report.verdict is not None and report.verdict.passed, (
            report.log
        )
    elif report.findings:
        assert re.fullmatch(mutant.reported, report.findings[0]), report.log
    else:
        assert mutant.build not in SANITIZERS, "sanitizers report it, no verdict"
        assert report.verdict is not None and not report.verdict.passed, report.verdict
        assert re.search(mutant.reported, report.verdict.message), report.verdict.message
