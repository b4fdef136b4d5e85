"""benchmarks/soak.py on the host: every stage with small counts, and that each says what is
wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam.contract import Device
from kernelseam.errors import DeviceError
from kernelseam.parity.matrix import named
from kernelseam.parity.running import run
from kernelseam.parity.running.stages import Computed
from kernelseam.planning import Call
from kernelseam.plugins import plugins
from kernelseam.reference.runtime import HostRuntime
from kernelseam.samples.case import Case

STAGES = [
    "a sticky error",
    "launches",
    "operations",
    "no memory left",
    "binaries",
    "threads and streams",
    "random problems",
]


@pytest.fixture(scope="module")
def soak() -> Any:
    from benchmarks import soak

    return soak


@pytest.fixture
def device() -> Device:
    return plugins().backend("numpy").runtime.devices()[0]


@pytest.mark.parametrize(
    "workers", [pytest.param(0, marks=pytest.mark.slow("the same, in one process")), 1]
)
def test_the_script(
    soak: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    given = "--device numpy:0 --seconds 250 --mixed-seconds 1 --problems 30 --specs 10"
    given += f" --launches 50 --operations 10 --threads 2 --streams 2 --mixed 6 --workers {workers}"
    assert soak.main([*given.split(), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert [s["stage"] for s in report["stages"]] == STAGES
    assert [s["status"] for s in report["stages"]] == ["not run", *["passed"] * 6]
    of = {s["stage"]: s["figures"] for s in report["stages"]}
    assert of["launches"]["launches"] == 50 and of["operations"]["operations"] == 20
    assert of["no memory left"]["times that memory ran out"] == 3
    assert (
        of["threads and streams"]["streams"] == 4
        and of["threads and streams"]["results compared"] >= 2
    )
    problems = of["random problems"]
    assert (
        problems["problems"] == problems["passed"] == 30
        and 0.01 < problems["worst error over tolerance"] <= 1
    )
    page = (tmp_path / "out" / "soak.md").read_text()
    assert (
        "| a sticky error | not run | 0 | no error of the host's sticks |\n| launches | passed | "
        in page
    )
    assert "problems: 30; passed: 30; worst error over tolerance: 0." in page
    assert "nothing was wrong; all in " in capsys.readouterr().out


def test_problems_are_thirty_thousand_of_four_hundred_specs(soak: Any) -> None:
    wanted = soak.problems.batches(30_000, 400, 1)
    for family, specs, count in (("attention", 240, 18_000), ("products", 160, 12_000)):
        mine = [b for b in wanted if b.family == family]
        assert {b.specs for b in mine} == {specs}
        assert sorted(n for b in mine for n in b.numbers) == list(range(count))
    half = [b.family for b in wanted[: len(wanted) // 2]]
    assert abs(half.count("attention") / len(half) - 0.6) < 0.01, "the families in turn"


def test_a_wrong_problem_fails_the_soak(
    soak: Any, device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = run.compute

    def wrong(case: Case, *arguments: Any) -> Computed:
        actual = compute(case, *arguments)
        return replace(actual, changed=7) if case.name.endswith("-3") else actual

    monkeypatch.setattr(run, "compute", wrong)
    soaked, clock = soak.Soaked("random problems"), soak.Clock.of(60)
    soak.problems.run(soaked, soak.problems.batches(20, 20, 1), device, "numpy", 0, clock)
    assert [w.partition("\n")[0] for w in soaked.wrong] == [
        f"failed {family} 3: 7 bytes differ after a second launch on the same inputs"
        for family in ("attention", "products")
    ]
    assert (
        soaked.status == "failed"
        and soaked.figures["problems"] == 20
        and soaked.figures["passed"] == 18
    )


def test_a_lost_device_ends_the_problems(
    soak: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: HostRuntime, *arguments: Any) -> Any:
        raise DeviceError("the runtime says 700")

    monkeypatch.setattr(HostRuntime, "from_host", lost)
    soaked = soak.Soaked("random problems")
    soak.problems.run(
        soaked, soak.problems.batches(20, 20, 1), device, "numpy", 0, soak.Clock.of(60)
    )
    first, second, third, fourth = soaked.wrong
    assert first.startswith("error attention 0: Traceback") and second == (
        "error attention 0: the device was lost: DeviceError: the runtime says 700"
    )
    assert (
        third == "19 of 20 problems were not run in the time there was"
        and fourth == "no problem passed"
    )


def test_a_process_that_dies_costs_its_problem_alone(soak: Any) -> None:
    """Whose batch has no result: it is run again one by one, and what ends a process alone is
    named."""
    batch = soak.problems.Batch("products", 1, 20, (4, 5, 6))

    def task(result: Any) -> Any:
        def give() -> Any:
            if isinstance(result, Exception):
                raise result
            return result

        return SimpleNamespace(result=give)

    again = list(
        soak.problems._answer(task(RuntimeError("its process ended with status -11")), batch)
    )
    assert again == [replace(batch, numbers=(n,)) for n in batch.numbers]
    (row,) = soak.problems._answer(
        task(RuntimeError("its process ended with status -11")), again[1]
    )
    assert (row.family, row.number, row.status) == ("products", 5, "error")
    assert row.detail == "RuntimeError: its process ended with status -11"
    first = soak.problems.Row("products", 4, "error", 0.0, "")
    _, output, rest = soak.problems._answer(task(([first], "DeviceError: 700")), batch)
    assert (
        output.detail == "the device was lost to this process: DeviceError: 700"
        and rest.numbers == (5, 6)
    )


def test_no_time_is_reported(soak: Any, device: Device) -> None:
    soaked, over = soak.Soaked("random problems"), soak.Clock.of(0)
    soak.problems.run(soaked, soak.problems.batches(20, 20, 1), device, "numpy", 0, over)
    assert soaked.wrong == [
        "20 of 20 problems were not run in the time there was",
        "no problem passed",
    ]
    soaked = soak.Soaked("launches")
    soak.repeats.launches(soaked, device, "numpy", 50, over)
    assert soaked.wrong == ["only 0 of 50 were done in the time there was"]


def test_one_byte_that_differs_is_found_among_threads(soak: Any, device: Device) -> None:
    soaked = soak.Soaked("threads and streams")
    (known,) = soak.mixed.known(
        [named("gemm-f32-nn"), named("gemm-f32-nn-alpha-beta")], device, "numpy", soaked
    )
    assert known.case.name == "gemm-f32-nn", (
        "what a launch changes for the next one is not compared"
    )
    off = known.wanted["all"].copy()
    off[20_000] ^= 1
    soak.mixed.run(
        soaked,
        [replace(known, wanted={"all": off})],
        device,
        "numpy",
        2,
        2,
        soak.Clock.of(60),
        rounds=3,
    )
    assert soaked.wrong == ["gemm-f32-nn: 1 bytes of all are not what the same call gave alone"] * 4


def test_an_error_in_a_thread_is_reported(
    soak: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    soaked = soak.Soaked("threads and streams")
    known = soak.mixed.known([named("gemm-f32-nn")], device, "numpy", soaked)

    def refuse(self: Call, stream: object = None) -> None:
        raise DeviceError("the runtime says 1")

    monkeypatch.setattr(Call, "__call__", refuse)
    soak.mixed.run(soaked, known, device, "numpy", 2, 1, soak.Clock.of(60), rounds=1)
    assert soaked.wrong == [
        *(f"thread {i}: DeviceError: the runtime says 1" for i in range(2)),
        "nothing was compared",
    ]


def test_memory_that_launches_leak_is_reported(
    soak: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, launch = [], Call.__call__

    def keeping(self: Call, stream: object = None) -> None:
        kept.append(object())
        launch(self, stream)

    monkeypatch.setattr(Call, "__call__", keeping)
    soaked = soak.Soaked("launches")
    soak.repeats.launches(soaked, device, "numpy", 2000, soak.Clock.of(60))
    assert len(soaked.wrong) == 1 and soaked.wrong[0].endswith(
        "blocks of Python's memory are left over"
    )


def test_lost_memory_is_reported(
    soak: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([100 << 20, 97 << 20])
    monkeypatch.setattr(sys.modules["benchmarks.soaking"], "free_bytes", lambda device: next(free))
    soaked = soak.stage("some stage", device, lambda s: None)
    assert soaked.wrong == ["3145728 bytes of device memory are gone"]
    assert soak.stage("some stage", device, lambda s: 1 / 0).wrong[0].startswith("StopIteration")


def test_a_device_without_memory_is_reported(
    soak: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostRuntime, "empty", lambda *arguments: np.empty(1, np.float32))
    monkeypatch.setattr(ks, "attention", lambda *arguments, **options: None)
    soaked = soak.Soaked("no memory left")
    soak.exhausted.run(soaked, device, "numpy", soak.Clock.of(60))
    assert soaked.wrong == ["a pebibyte found memory where there is none"] * 3


def test_what_says_nothing_after_an_error_is_named(soak: Any) -> None:
    ours = {"raised": "DeviceError", "ours": True, "message": "cuCtxSynchronize failed with 700"}
    silent = soak.sticky._said(lambda: None)
    foreign = soak.sticky._said(lambda: 1 / 0)
    output = {"synchronize": ours, "a copy": silent, "new memory": foreign}
    assert soak.sticky.faults({"right before": True, "said": output}) == [
        "a copy after the error: no error: nothing was said",
        "new memory after the error: ZeroDivisionError: division by zero",
    ]
    assert soak.sticky.faults({"right before": False, "said": {}}) == [
        "the product was wrong before the error"
    ]


def test_a_child_that_dies_is_reported(soak: Any, device: Device) -> None:
    """On the host the address that nobody has ends the process."""
    with pytest.raises(RuntimeError, match=r"^the child ended with -?\d+: "):
        soak.sticky.ask(device, "numpy")
