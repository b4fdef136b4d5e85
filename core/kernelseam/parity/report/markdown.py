"""A report in Markdown, compact enough to commit: totals, groups, failures, refusals, worst
cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kernelseam.parity.report.summary import EVIDENCE, Report, ratio, refusals, rows, worst
from kernelseam.parity.running.run import Outcome, Target

WORST = 3
"""The number of worst cases listed for each implementation."""


def markdown(report: Report) -> str:
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield from ("# Parity report", "")
    count = report.count()
    yield (
        f"{count['passed']} passed, {count['refused']} refused with a reason, "
        f"{count['failed']} failed."
    )
    yield from (
        (
            "A number is the largest error over tolerance against the float64 oracle: at most 1 "
            "passes."
        ),
        "",
        *(f"* {name}: {value}" for name, value in report.facts),
        *([f"* command: `{report.command}`"] if report.command else []),
        "",
    )
    yield from _table(
        (
            "operation",
            "implementation",
            "device",
            "evidence",
            "cases",
            "passed",
            "refused",
            "failed",
            "worst",
            "in",
        ),
        _totals(report),
    )
    yield from (f"* {evidence}: {EVIDENCE[evidence]}" for evidence in _evidence(report.targets))
    yield ""
    if report.not_covered:
        yield from (*report.not_covered, "")
    for operation in report.operations:
        columns = report.columns(operation)
        yield from (
            f"## {operation}",
            "",
            "Of each group the worst, and how many were refused (r) or failed (f):",
            "",
        )
        yield from _table(
            ("group", "cases", *map(str, columns)),
            [
                (
                    name,
                    str(len(cases)),
                    *(
                        _summary([c[str(t)] for c in cases.values() if str(t) in c])
                        for t in columns
                    ),
                )
                for name, cases in report.groups(operation).items()
            ],
        )
        nearest = [
            (
                str(t),
                o.case.name,
                ratio(o.verdict.worst),
                o.detail.partition("]")[0] + "]" if o.verdict.where else "",
            )
            for t in columns
            for o in worst(report.of(t), WORST)
            if o.verdict is not None
        ]
        if nearest:
            yield from _table(
                ("implementation", "its worst cases", "error/tolerance", "where"), nearest
            )
    if refused := refusals(report.outcomes):
        yield from ("## Refused, with the reason given", "")
        yield from (
            f"* {operation} on {who}, {n} case(s): {why}" for operation, who, why, n in refused
        )
        yield ""
    if report.bad:
        yield from ("## Failed", "")
        for o in report.bad:
            yield from (
                f"### {o.case.name} on {o.backend} {o.implementation}",
                "",
                "```",
                o.detail.rstrip(),
                "```",
                "",
            )


def _totals(report: Report) -> Iterator[tuple[str, ...]]:
    for t in report.targets:
        for r in rows(report.of(t)):
            yield (
                r.operation,
                str(t),
                str(t.device),
                t.device.evidence,
                str(r.cases),
                str(r.passed),
                str(r.refused),
                str(r.failed),
                ratio(r.worst),
                r.worst_case,
            )


def _evidence(targets: Sequence[Target]) -> Iterable[str]:
    return dict.fromkeys(t.device.evidence for t in targets if t.device.evidence in EVIDENCE)


def _summary(outcomes: Sequence[Outcome]) -> str:
    judged = [o.verdict.worst for o in outcomes if o.verdict is not None]
    refused = sum(o.status == "refused" for o in outcomes)
    failed = sum(o.status in ("failed", "error") for o in outcomes)
    notes = [f"{n} {letter}" for n, letter in ((refused, "r"), (failed, "f")) if n]
    return ", ".join([ratio(max(judged)) if judged else "–", *notes])


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for line in lines:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
    yield ""
