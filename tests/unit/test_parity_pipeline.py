"""Many cases with workers: the same outcomes as without, faults that cost one case, devices that
are lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from kernelseam.contract import Backend, Device, PlanParts
from kernelseam.errors import DeviceError
from kernelseam.parity.matrix import named
from kernelseam.parity.running import pipeline
from kernelseam.parity.running.pipeline import run_all
from kernelseam.parity.running.run import Outcome, targets
from kernelseam.parity.running.workers import Workers
from kernelseam.planning import forget
from kernelseam.plugins import plugins
from kernelseam.reference.gemm import NumpyGemm
from kernelseam.reference.runtime import HostRuntime
from kernelseam.samples.case import Case

NAMES = (
    "gemm-f16-nt",
    "gemm-f32-nn-gaps-beta",
    "gemm-f16-nt-pointers-device",
    "gemm-f16-nt-subnormal",
    "attention-f16-64-causal-7x129",
    "attention-f16-64-packed-ramp",
    "attention-f16-64-mqa",
    "attention-bwd-f16-64-causal-130x130",
    "merge-states-f32-f16-absent",
)


class FarGemm(NumpyGemm):
    """The reference, on a backend of its own; wrong where B is transposed, and fails at
    integers."""

    name, backend = "far", "far"

    def supports(self, problem: Any, device: Device) -> str | None:
        return (
            "takes no gaps"
            if problem.spec.vector_a < 16 and not problem.spec.b_transposed
            else None
        )

    def build(self, problem: Any, device: Device) -> PlanParts:
        if problem.alpha != 1:
            raise DeviceError("the runtime said 719")
        return super().build(
            replace(problem, alpha=2.0) if problem.spec.a_transposed else problem, device
        )


class FarRuntime(HostRuntime):
    """Host memory; with ``broken`` set it copies nothing any more."""

    broken = ""

    def __init__(self) -> None:
        self.device = Device("far", 0, "far1")

    def describe(self, array: object) -> Any:
        result = super().describe(array)
        return None if result is None else replace(result, device=self.device)

    def from_host(self, host: Any, device: Device) -> Any:
        if self.broken:
            raise DeviceError(self.broken)
        return super().from_host(host, device)


@pytest.fixture
def far() -> Iterator[FarRuntime]:
    registry, runtime = plugins().registry, FarRuntime()
    kept = list(registry.implementations)
    registry.add_backend(Backend("far", runtime, implementations=(FarGemm(),), priority=-300))
    yield runtime
    del registry.backends["far"]
    registry.implementations[:] = kept
    forget()


def _told(outcomes: list[Outcome]) -> list[Any]:
    """All but the seconds."""
    return [replace(o, seconds=0.0, computing=0.0) for o in outcomes]


def test_outcomes_are_those_of_one_process(far: FarRuntime) -> None:
    cases = [
        *map(named, NAMES),
        replace(named("gemm-f32-tn"), name="wrong"),
        named("gemm-f16-nn-alpha-beta"),
        named("attention-f16-64-causal-nan-in-hidden-v"),
    ]
    numpy = targets(backend="numpy")
    exempt = replace(
        next(t for t in numpy if t.operation == "attention"), implementation="gemm-softmax-gemm"
    )
    wanted = [*numpy, exempt, *targets(backend="far")]
    alone, piped = list(run_all(cases, wanted)), list(run_all(cases, wanted, workers=2))
    assert _told(piped) == _told(alone)
    actual = {(o.case.name, o.implementation): o for o in piped}
    assert len(actual) == len(piped) == 12 + 4 + 6
    assert actual["wrong", "far"].status == "failed" and actual["wrong", "numpy"].status == "passed"
    assert "the runtime said 719" in actual["gemm-f16-nn-alpha-beta", "far"].detail
    assert {o.status for o in piped} == {"passed", "failed", "refused", "error"}
    judged = [o for o in piped if o.verdict is not None]
    assert all(o.seconds > o.computing > 0 for o in judged)


def test_so_much_memory_is_in_use_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Workers):
        """Computes here when it is asked, and knows how many tasks nobody has asked for."""

        open: list[int] = [0, 0]

        def start(self, work: Callable[..., Any], *arguments: Any) -> Any:
            kind = work.__name__ == "_judge"
            self.open[kind] += 1
            most[kind] = max(most[kind], self.open[kind])
            return Later(kind, lambda: work(*arguments))

    @dataclass
    class Later:
        kind: bool
        work: Callable[[], Any]

        def done(self) -> bool:
            return False

        def result(self) -> Any:
            Counting.open[self.kind] -= 1
            return self.work()

    most = [0, 0]
    monkeypatch.setattr(pipeline, "Workers", Counting)
    cases = [replace(named("gemm-f64-nn"), name=f"gemm-{i}") for i in range(40)]
    actual = list(run_all(cases, targets(backend="numpy"), workers=1))
    assert [o.case.name for o in actual] == [c.name for c in cases]
    assert {o.status for o in actual} == {"passed"}
    assert Counting.open == [0, 0] and most == [pipeline.AHEAD + 1] * 2


class Deadly(str):
    """Ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_worker_that_dies_costs_its_case_alone() -> None:
    cases: list[Case] = [replace(named("gemm-f64-nn"), name=f"gemm-{i}") for i in range(5)]
    cases[2] = replace(cases[2], group=Deadly("cases"))
    actual = list(run_all(cases, targets(backend="numpy"), workers=1, limit=60))
    assert [o.status for o in actual] == ["passed", "passed", "error", "passed", "passed"]
    with pytest.raises(
        AssertionError,
        match="^gemm-2 on numpy-numpy: its data were not prepared: its process ended",
    ):
        actual[2].require()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_lost_device_ends_the_run(
    far: FarRuntime, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def build(self: FarGemm, problem: Any, device: Device) -> PlanParts:
        if problem.K == 7:
            FarRuntime.broken = "the runtime says 700 for ever"
            raise DeviceError("the runtime said 700")
        return NumpyGemm.build(self, problem, device)

    monkeypatch.setattr(FarGemm, "build", build)
    monkeypatch.setattr(FarRuntime, "broken", "")
    cases = [
        replace(named("gemm-f64-nn"), name=f"gemm-{i}", K=7 if i == 3 else 33) for i in range(9)
    ]
    actual = []
    with pytest.raises(DeviceError) as caught:
        for o in run_all(cases, targets(backend="far"), workers=workers):
            actual.append(o)
    assert str(caught.value) == (
        "the device computes nothing any more since gemm-3 on far-far: DeviceError: the runtime "
        "says 700 for ever. Not run after it: 5."
    )
    assert [o.status for o in actual] == ["passed"] * 3 + ["error"]
    assert "the runtime said 700" in actual[3].detail


def test_an_error_that_the_device_survives_is_a_case_s_own(far: FarRuntime) -> None:
    cases = [named("gemm-f16-nn-alpha-beta"), named("gemm-f16-nt")]
    assert [o.status for o in run_all(cases, targets(backend="far"))] == ["error", "passed"]


HANGS = """
    import threading
    from dataclasses import dataclass, replace
    from kernelseam.errors import DeviceError
    from kernelseam.parity.matrix import named
    from kernelseam.parity.running.pipeline import run_all
    from kernelseam.parity.running.run import targets
    from kernelseam.reference.gemm import NumpyGemm

    build = NumpyGemm.build

    def hang(self, problem, device):
        if problem.K == 7:
            threading.Event().wait()
        return build(self, problem, device)

    NumpyGemm.build = hang
    cases = [replace(named("gemm-f64-nn"), name=f"gemm-{i}", K=7 if i == 1 else 33) for i in range(4)]
    try:
        for o in run_all(cases, targets(backend="numpy"), workers=1, limit=6):
            print(o.case.name, o.status, o.detail.partition(".")[0], "in hang" in o.detail)
    except DeviceError as e:
        print(e)
    import atexit
    print("the end")
"""  # noqa: E501


def test_a_device_that_hangs_ends_the_run_and_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HANGS)], capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("gemm-0 passed")
    assert lines[1:] == [
        "gemm-1 error no answer within 6 s True",
        (
            "the device computes nothing any more since gemm-1 on numpy-numpy: no answer within 6 "
            "s. Not run after it: 2."
        ),
        "the end",
    ]
    assert done.returncode == 1, done.stderr
