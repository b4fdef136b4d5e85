"""Outcomes as tables: one row an implementation, and the list of what failed or was refused."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelseam.parity.run import Outcome


@dataclass(frozen=True)
class Row:
    """What one implementation did."""

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


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row an operation, backend and implementation, in the order they came."""
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for o in outcomes:
        groups[o.case.operation, o.backend, o.implementation].append(o)
    found = []
    for key, group in groups.items():
        count = Counter(o.status for o in group)
        worst, name = max(((o.verdict.worst, o.case.name) for o in group if o.verdict), default=(0.0, ""))
        found.append(Row(
            *key, len(group), count["passed"], count["refused"], count["failed"] + count["error"], worst, name,
            sum(o.seconds for o in group),
        ))
    return found


HEAD = (
    "operation", "backend", "implementation", "cases", "passed", "refused", "failed", "worst error/tolerance", "in",
    "s",
)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.operation, row.backend, row.implementation, str(row.cases), str(row.passed), str(row.refused),
        str(row.failed), f"{row.worst:.3f}", row.worst_case, f"{row.seconds:.1f}",
    )


def table(found: Sequence[Row]) -> str:
    """The rows in columns, for a terminal."""
    lines = [HEAD, *map(_cells, found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def refusals(outcomes: Iterable[Outcome]) -> list[tuple[str, str, int]]:
    """(implementation, reason, how many cases), for what was refused as it may be."""
    count = Counter((f"{o.backend} {o.implementation}", o.detail) for o in outcomes if o.status == "refused")
    return [(who, why, n) for (who, why), n in count.items()]


def markdown(outcomes: Sequence[Outcome], devices: Sequence[str]) -> str:
    """A report: devices, the table, refusals with their reasons, failures with their details."""
    lines = ["# Parity report", "", *(f"* {d}" for d in devices), ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += ["| " + " | ".join(_cells(r)) + " |" for r in rows(outcomes)]
    if refused := refusals(outcomes):
        lines += ["", "## Refused, with the reason given", ""]
        lines += [f"* {who}, {n} case(s): {why}" for who, why, n in refused]
    if bad := [o for o in outcomes if o.status in ("failed", "error")]:
        lines += ["", "## Failed", ""]
        for o in bad:
            lines += [f"### {o.case.name} on {o.backend} {o.implementation}", "", "```", o.detail.rstrip(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"
