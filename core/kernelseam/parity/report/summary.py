"""What became of a run of the matrix: counts by implementation, by group of cases, and what it ran
on.

``markdown`` and ``html`` make pages of a Report; ``table`` is for a terminal.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kernelseam._version import __version__
from kernelseam.containment import Contained, told
from kernelseam.contract import CONTRACT_VERSION, Toolchain
from kernelseam.errors import KernelSeamError
from kernelseam.forking import cached_property
from kernelseam.parity.cases.case import Case
from kernelseam.parity.running.run import Outcome, Target
from kernelseam.plugins import Plugins

BAD = ("failed", "error")
EVIDENCE = {
    "measured": "ran on the device that the column names",
    "emulated": "the device's instructions, run by a program on the host: right results, no speed",
    "host": "ran on this machine's processor",
}


@dataclass(frozen=True)
class Row:
    """What one implementation did with some cases."""

    operation: str
    backend: str
    implementation: str
    cases: int
    passed: int
    refused: int
    failed: int
    """Wrong results and errors."""
    worst: float
    """Largest error over tolerance."""
    worst_case: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """Outcomes of a run, its columns, and what it ran on."""

    outcomes: Sequence[Outcome]
    targets: Sequence[Target]
    facts: Sequence[tuple[str, str]] = ()
    """Names and values: versions, devices, compilers. No dates: the same run makes the same
    report."""
    command: str = ""
    not_covered: Sequence[str] = ()
    """Sentences about what was not run: operations for which nothing is registered, what came after
    a lost device."""

    @property
    def passed(self) -> bool:
        """Whether there is something, and nothing of it failed."""
        return bool(self.outcomes) and not self.bad

    @cached_property
    def bad(self) -> list[Outcome]:
        """What failed."""
        return [o for o in self.outcomes if o.status in BAD]

    @cached_property
    def operations(self) -> list[str]:
        """In the order of the cases."""
        return list(dict.fromkeys(o.case.operation for o in self.outcomes))

    def columns(self, operation: str) -> list[Target]:
        """The implementations of an operation."""
        return [t for t in self.targets if t.operation == operation]

    def of(self, target: Target) -> list[Outcome]:
        """What one implementation did."""
        key = (target.operation, target.device.backend, target.implementation)
        return [o for o in self.outcomes if (o.case.operation, o.backend, o.implementation) == key]

    def groups(self, operation: str) -> dict[str, dict[str, dict[str, Outcome]]]:
        """Group of cases → case → ``str(target)`` → outcome."""
        found: dict[str, dict[str, dict[str, Outcome]]] = {}
        for o in self.outcomes:
            if o.case.operation == operation:
                group = found.setdefault(o.case.group or "cases", {})
                group.setdefault(o.case.name, {})[f"{o.backend}-{o.implementation}"] = o
        return found

    def count(self) -> Counter[str]:
        """How many passed, were refused, failed."""
        return Counter("failed" if o.status in BAD else o.status for o in self.outcomes)


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row an operation, backend and implementation, in the order they came."""
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for o in outcomes:
        groups[o.case.operation, o.backend, o.implementation].append(o)
    found = []
    for key, group in groups.items():
        count = Counter(o.status for o in group)
        judged = [
            (o.verdict.worst, o.case.name)
            for o in group
            if o.verdict is not None and o.verdict.worst > 0
        ]
        worst, name = max(judged, default=(0.0, ""))
        found.append(
            Row(
                *key,
                len(group),
                count["passed"],
                count["refused"],
                count["failed"] + count["error"],
                worst,
                name,
                sum(o.seconds for o in group),
            )
        )
    return found


HEAD = (
    "operation",
    "backend",
    "implementation",
    "cases",
    "passed",
    "refused",
    "failed",
    "worst error/tolerance",
    "in",
    "s",
)


def table(found: Sequence[Row]) -> str:
    """The rows in columns, for a terminal."""
    lines = [
        HEAD,
        *(
            (
                row.operation,
                row.backend,
                row.implementation,
                str(row.cases),
                str(row.passed),
                str(row.refused),
                str(row.failed),
                f"{row.worst:.3f}",
                row.worst_case,
                f"{row.seconds:.1f}",
            )
            for row in found
        ),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def refusals(outcomes: Iterable[Outcome]) -> list[tuple[str, str, str, int]]:
    """(operation, implementation, reason, how many cases), for what was refused as it may be."""
    count = Counter(
        (o.case.operation, f"{o.backend} {o.implementation}", o.detail)
        for o in outcomes
        if o.status == "refused"
    )
    return [(operation, who, why, n) for (operation, who, why), n in count.items()]


def worst(outcomes: Iterable[Outcome], n: int) -> list[Outcome]:
    """The n outcomes with the largest error over tolerance, of those that have one above 0."""
    judged = [
        (o.verdict.worst, o) for o in outcomes if o.verdict is not None and o.verdict.worst > 0
    ]
    return [o for _, o in sorted(judged, key=lambda pair: -pair[0])[:n]]


def last_line(detail: str) -> str:
    """A message in one line: of a traceback, what was raised."""
    lines = detail.strip().splitlines() or [""]
    if not lines[0].startswith("Traceback"):
        return lines[0]
    return next((line for line in reversed(lines) if line and not line[0].isspace()), lines[-1])


def ratio(value: float) -> str:
    """Error over tolerance in as few figures as matter."""
    if value == 0:
        return "0"
    if value == float("inf"):
        return "∞"
    if value < 0.001:
        return "<0.001"
    if value < 0.995:
        return f"{value:.2f}" if value >= 0.01 else f"{value:.3f}"
    if value <= 1:
        return f"{np.floor(value * 1000) / 1000:.3f}"
    return f"{value:.3g}" if value >= 1.01 else f"{np.ceil(value * 1000) / 1000:.3f}"


def facts(known: Plugins, targets: Sequence[Target]) -> list[tuple[str, str]]:
    """Versions, the devices that ran and the compilers of their kernels."""
    found = [("kernelseam", f"{__version__}, contract {CONTRACT_VERSION}")]
    found += [
        (f"plugin {name}", f"{info.version}: {info.summary}")
        for name, info in sorted(known.loaded.items())
    ]
    for d in dict.fromkeys(t.device for t in targets):
        found.append(
            (f"device {d.backend}:{d.index}", f"{d.arch}, {d.name or 'no name'}, {d.evidence}")
        )
        toolchain = known.backend(d.backend).toolchain
        if toolchain is not None:
            found.append((f"compiler of {d.backend}", _compiler(toolchain)))
    found.append(("Python", f"{platform.python_version()}, NumPy {np.__version__}"))
    return found


def _compiler(toolchain: Toolchain) -> str:
    try:
        with Contained("its compiler()"):
            return toolchain.compiler()
    except KernelSeamError as e:
        return f"none: {last_line(str(e))}"
    except Exception as e:
        return f"none: {last_line(told(e))}"


def not_covered(cases: Sequence[Case], wanted: Sequence[Target]) -> list[str]:
    """A sentence for each operation of the cases that a backend of the run has no implementation
    of."""
    count = Counter(c.operation for c in cases)
    covered = {(t.device.backend, t.operation) for t in wanted}
    return [
        f"{backend} has no implementation of {operation}: its {n} case(s) were not run."
        for backend in dict.fromkeys(t.device.backend for t in wanted)
        for operation, n in count.items()
        if (backend, operation) not in covered
    ]
