"""Running, timing and reporting, shared by the commands attention and gemm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from kernelseam.cli.output import duration, emit_json, facts, heading, scaled
from kernelseam.cli.progress import working
from kernelseam.contract import EMULATED, Device, Problem
from kernelseam.dispatch import find_device
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.launch_trace import trace
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.epilogues import Epilogue
from kernelseam.oracle.operands import Operands
from kernelseam.oracle.subnormals import flushes
from kernelseam.oracle.verification import VERIFIERS
from kernelseam.planning import Call, Plan
from kernelseam.plugins import plugins

TIMED_SECONDS, FEWEST_RUNS = 0.5, 5
_HOST_COPIES = 4
TIME_OF_EMULATION = (
    "the device is emulated: the time is that of a program on the host and says "
    "nothing of the hardware"
)


def device_for(problem: Problem, backend: str | None) -> Device:
    """The device to run on; ``backend`` may be BACKEND:INDEX. Raises UnknownName, and InvalidValue
    where its memory is too small for the problem."""
    with working("looking for devices"):
        device = find_device(backend)
    have, need = device.limits.memory_bytes, problem.bytes_moved
    if device.is_host:  # random operands are made and copied there, too
        need *= _HOST_COPIES
    if 0 < have < need:
        raise InvalidValue(
            "problem",
            problem,
            f"takes {scaled(need, 'B')}, and {device} has {scaled(have, 'B')}",
            "Make it smaller",
        )
    return device


def verdict_of(planned: Plan, epilogue: Epilogue | None) -> Verdict:
    """The results of products over standard normal values compared with the oracle."""
    device, known = planned.device, plugins().backend(planned.device.backend)
    descriptor, problem = planned.descriptor, planned.problem
    resolved = descriptor.resolve(descriptor.operands(), known.runtime, device)
    given: dict[str, Any] = {"zero_mean": True}
    if epilogue is not None:
        given["epilogue"] = epilogue
    read = Operands(resolved.pointers, known.runtime, device)
    verifier: Any = VERIFIERS[type(problem)]
    kept = verifier.kept(problem, read)
    verdict: Verdict = verifier.verdict(problem, read, kept, flushes(known, device), **given)
    return verdict


@dataclass(frozen=True)
class Timing:
    """Seconds of one call on the device's clock: the median, 10th and 90th percentile."""

    median: float
    low: float
    high: float
    runs: int


def measure(call: Call) -> Timing:
    """Time a warm call for about half a second, FEWEST_RUNS times at least."""
    device = call.plan.device
    runtime, launch = plugins().backend(device.backend).runtime, call.launcher()
    with runtime.activate(device), working(f"timing on {device}"):
        seconds = list(runtime.time(launch, device, 1))
        if seconds[0] < TIMED_SECONDS:
            once = min(runtime.time(launch, device, 3))
            runs = int(min(max(TIMED_SECONDS / max(once, 1e-7), FEWEST_RUNS), 500))
            seconds = list(runtime.time(launch, device, runs))
    while len(seconds) < FEWEST_RUNS:
        progress = f"timing on {device}: {len(seconds)} of {FEWEST_RUNS} runs"
        with runtime.activate(device), working(f"{progress}, each {duration(seconds[-1])}"):
            seconds += runtime.time(launch, device, 1)
    seconds.sort()
    at = len(seconds) - 1
    return Timing(
        statistics.median(seconds), seconds[round(0.1 * at)], seconds[round(0.9 * at)], len(seconds)
    )


@dataclass(frozen=True)
class Run:
    """One computed problem, for the report."""

    name: str
    plan: Plan
    launches: int
    elements: int
    """Of the results."""
    verdicts: dict[str, Verdict]
    """By reference: the oracle, or a stored result."""
    timing: Timing | None
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(v.passed for v in self.verdicts.values())

    def data(self) -> dict[str, Any]:
        """As JSON data. Rates are of the median time."""
        plan, problem = self.plan, self.plan.problem
        data: dict[str, Any] = {
            "name": self.name,
            "problem": str(problem),
            "implementation": plan.implementation,
            "launches": self.launches,
            "elements": self.elements,
            "kernels": [asdict(r) for r in plan.launches],
            "workspace_bytes": plan.workspace_bytes,
            "operations": problem.operations,
            "bytes": problem.bytes_moved,
            "notes": self._notes(),
        }
        if self.verdicts:
            data["verify"] = {
                n: {**asdict(v), "passed": bool(v.passed)} for n, v in self.verdicts.items()
            }
        if self.timing is not None:
            t = self.timing
            data["time"] = {
                "median_seconds": t.median,
                "p10_seconds": t.low,
                "p90_seconds": t.high,
                "runs": t.runs,
                "tflops": problem.operations / t.median / 1e12,
                "gbytes_per_second": problem.bytes_moved / t.median / 1e9,
            }
        return data

    def _notes(self) -> list[str]:
        emulated = self.timing is not None and self.plan.device.evidence == EMULATED
        return [
            n for n in (self.plan.note, *self.notes, TIME_OF_EMULATION if emulated else "") if n
        ]

    def show(self) -> None:
        problem, t = self.plan.problem, self.timing
        rows: list[tuple[str, object]] = [
            ("device", f"{self.plan.device} {self.plan.device.name}".rstrip()),
            ("implementation", self.plan.implementation),
            (
                "launches",
                f"{self.launches}: {', '.join(r.kernel for r in self.plan.launches)}".removesuffix(
                    ": "
                ),
            ),
        ]
        rows += [("note", note) for note in self._notes()]
        for name, v in self.verdicts.items():
            seen = f"all {v.checked}"
            if v.checked < self.elements:
                seen = f"a sample of {v.checked} of {self.elements}"
            worst = f"{seen} elements, worst error/tolerance {v.worst:.3g}"
            rows.append(
                (
                    f"against {name}",
                    f"passed: {worst}" if v.passed else f"FAILED: {v.message} ({worst})",
                )
            )
        if t is not None:
            spread = f"spread {duration(t.low)} to {duration(t.high)} ({t.runs} runs)"
            tflops, gbytes = (
                problem.operations / t.median / 1e12,
                problem.bytes_moved / t.median / 1e9,
            )
            rows.append(("time", f"median {duration(t.median)}, {spread}"))
            if self.plan.device.evidence != EMULATED:
                rows.append(("rate", f"{tflops:.4g} TFLOP/s, {gbytes:.4g} GB/s"))
        heading(f"{self.name}: {problem}" if self.name else str(problem))
        facts([(f"  {name}", value) for name, value in rows])


def execute(call: Call) -> int:
    """Run a call and synchronize. Returns the number of launches."""
    with trace() as records:
        call()
    device = call.plan.device
    plugins().backend(device.backend).runtime.synchronize(device)
    return len(records)


def report(
    operation: str, device: Device, runs: Sequence[Run], *, verify: bool, as_json: bool
) -> None:
    """Show the runs; exit status 1 if a verification failed."""
    passed = all(r.passed for r in runs)
    if as_json:
        emit_json(
            {
                "operation": operation,
                "device": str(device),
                "backend": device.backend,
                "evidence": device.evidence,
                "passed": passed if verify else None,
                "runs": [r.data() for r in runs],
            }
        )
    else:
        for r in runs:
            r.show()
    if not passed:
        raise typer.Exit(1)
