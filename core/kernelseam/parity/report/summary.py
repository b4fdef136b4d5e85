"""Summaries of a run of the matrix: counts by implementation and by group of cases, and the
environment.

``markdown`` and ``html`` make pages of a Report; ``table`` is for a terminal.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from kernelseam._version import __version__
from kernelseam.containment import Contained, error_text
from kernelseam.contract import CONTRACT_VERSION, Toolchain
from kernelseam.errors import KernelSeamError
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass
from kernelseam.parity.running.run import Outcome, Target
from kernelseam.plugins import Plugins
from kernelseam.samples.case import Case

FAILED = ("failed", "error")
EVIDENCE = {
    "measured": "ran on the device that the column names",
    "emulated": "the device's instructions, run by a program on the host: right results, no speed",
    "host": "ran on this machine's processor",
}


@dataclass(frozen=True)
class Row:
    """Counts of one implementation's outcomes."""

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
    """Outcomes of a run, its columns, and its environment."""

    outcomes: Sequence[Outcome]
    targets: Sequence[Target]
    facts: Sequence[tuple[str, str]] = ()
    """Names and values: versions, devices, compilers. No dates: the same run makes the same
    report."""
    command: str = ""
    not_covered: Sequence[str] = ()
    """Sentences about cases that were not run: operations without implementations, cases after a
    device failed."""

    @property
    def passed(self) -> bool:
        """Whether there are outcomes and none failed."""
        return bool(self.outcomes) and not self.bad

    @cached_property
    def bad(self) -> list[Outcome]:
        """Outcomes that failed."""
        return [o for o in self.outcomes if o.status in FAILED]

    @cached_property
    def operations(self) -> list[str]:
        """The operations, in the order of the cases."""
        return list(dict.fromkeys(o.case.operation for o in self.outcomes))

    def columns(self, operation: str) -> list[Target]:
        """The implementations of an operation."""
        return [t for t in self.targets if t.operation == operation]

    def of(self, target: Target) -> list[Outcome]:
        key = (target.operation, target.device.backend, target.implementation)
        return [o for o in self.outcomes if (o.case.operation, o.backend, o.implementation) == key]

    def groups(self, operation: str) -> dict[str, dict[str, dict[str, Outcome]]]:
        """Group of cases → case → ``str(target)`` → outcome."""
        by_group: dict[str, dict[str, dict[str, Outcome]]] = {}
        for o in self.outcomes:
            if o.case.operation == operation:
                cases_of_group = by_group.setdefault(o.case.group or "cases", {})
                cases_of_group.setdefault(o.case.name, {})[f"{o.backend}-{o.implementation}"] = o
        return by_group

    def count(self) -> Counter[str]:
        """The numbers of passed, refused and failed outcomes."""
        return Counter("failed" if o.status in FAILED else o.status for o in self.outcomes)


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row per operation, backend and implementation, in order of appearance."""
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for o in outcomes:
        groups[o.case.operation, o.backend, o.implementation].append(o)
    table_rows = []
    for key, group in groups.items():
        count = Counter(o.status for o in group)
        judged = [
            (o.verdict.worst, o.case.name)
            for o in group
            if o.verdict is not None and o.verdict.worst > 0
        ]
        worst, name = max(judged, default=(0.0, ""))
        table_rows.append(
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
    return table_rows


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


def table(table_rows: Sequence[Row]) -> str:
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
            for row in table_rows
        ),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def refusals(outcomes: Iterable[Outcome]) -> list[tuple[str, str, str, int]]:
    """(operation, implementation, reason, how many cases), for refusals that are allowed."""
    count = Counter(
        (o.case.operation, f"{o.backend} {o.implementation}", o.detail)
        for o in outcomes
        if o.status == "refused"
    )
    return [(operation, who, why, n) for (operation, who, why), n in count.items()]


def worst(outcomes: Iterable[Outcome], n: int) -> list[Outcome]:
    """The n outcomes with the largest error over tolerance above 0."""
    judged = [
        (o.verdict.worst, o) for o in outcomes if o.verdict is not None and o.verdict.worst > 0
    ]
    return [o for _, o in sorted(judged, key=lambda pair: -pair[0])[:n]]


def last_line(detail: str) -> str:
    """A message as one line: the exception, if it is a traceback."""
    lines = detail.strip().splitlines() or [""]
    if not lines[0].startswith("Traceback"):
        return lines[0]
    return next((line for line in reversed(lines) if line and not line[0].isspace()), lines[-1])


def ratio(value: float) -> str:
    """Error over tolerance, with few digits; a value above 1 never rounds to 1."""
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
    """Versions, devices, and the compilers of their kernels."""
    named_values = [("kernelseam", f"{__version__}, contract {CONTRACT_VERSION}")]
    named_values += [
        (f"plugin {name}", f"{info.version}: {info.summary}")
        for name, info in sorted(known.loaded.items())
    ]
    for d in dict.fromkeys(t.device for t in targets):
        named_values.append(
            (f"device {d.backend}:{d.index}", f"{d.arch}, {d.name or 'no name'}, {d.evidence}")
        )
        toolchain = known.backend(d.backend).toolchain
        if toolchain is not None:
            named_values.append((f"compiler of {d.backend}", _compiler(toolchain)))
    named_values.append(("Python", f"{platform.python_version()}, NumPy {np.__version__}"))
    return named_values


def _compiler(toolchain: Toolchain) -> str:
    try:
        with Contained("its compiler()"):
            return toolchain.compiler()
    except KernelSeamError as e:
        return f"none: {last_line(str(e))}"
    except Exception as e:
        return f"none: {last_line(error_text(e))}"


def not_covered(cases: Sequence[Case], targets: Sequence[Target]) -> list[str]:
    """A sentence for each operation of the cases that a backend of the run does not implement."""
    count = Counter(c.operation for c in cases)
    covered = {(t.device.backend, t.operation) for t in targets}
    return [
        f"{backend} has no implementation of {operation}: its {n} case(s) were not run."
        for backend in dict.fromkeys(t.device.backend for t in targets)
        for operation, n in count.items()
        if (backend, operation) not in covered
    ]
