"""``kernelseam parity``: every case on every implementation, compared with the oracle; optionally
a report."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelseam.cli import shapes
from kernelseam.cli.output import emit_json, heading, table
from kernelseam.cli.progress import working
from kernelseam.contract import Device
from kernelseam.dispatch import find_device, preferred_backend
from kernelseam.errors import DeviceError, InvalidValue, UnknownName
from kernelseam.parity.matrix import matrix
from kernelseam.parity.report import summary
from kernelseam.parity.report.html import html
from kernelseam.parity.report.markdown import markdown
from kernelseam.parity.report.summary import Report, last_line
from kernelseam.parity.running.pipeline import LIMIT, run_all
from kernelseam.parity.running.run import Outcome, Target, targets
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case

PAGES: dict[str, Callable[[Report], str]] = {".html": html, ".md": markdown}
SHOWN_REASONS = 20


def run(
    backend: Annotated[
        str | None, typer.Option(help="numpy, or that of a plugin. [every one with a device]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="BACKEND:INDEX. [a backend's first]")] = None,
    operation: Annotated[
        str | None, typer.Option(help="Only cases of this operation. [all]")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="Only cases with matching names; may be given again. [all]"
        ),
    ] = None,
    implementation: Annotated[str | None, typer.Option(help="By name. [all]")] = None,
    pages: Annotated[
        list[Path] | None,
        typer.Option(
            "--report", metavar="FILE", help="Write a page, .html or .md; may be given again."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=0, help="Processes that make inputs and check results; 0: only this one. [0]"
        ),
    ] = 0,
    limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="With --workers: time limit of each stage of a case. [300]"
        ),
    ] = LIMIT,
    json: shapes.Json = False,
) -> None:
    """The parity matrix: cases x implementations against a float64 oracle."""
    _check_pages(pages or [])
    if not limit > 0:
        raise InvalidValue(
            "limit", limit, "must be a positive number of seconds", f"Leave it out: it is {LIMIT:g}"
        )
    cases = _cases(operation, case or [])
    with working("looking for devices"):
        chosen = _targets(backend, device)
    chosen = _chosen(chosen, cases, implementation)
    options: dict[str, list[str | None]] = {
        "backend": [backend],
        "device": [device],
        "operation": [operation],
        "case": [*(case or [])],
        "implementation": [implementation],
        "report": [p.name for p in pages or []],
    }
    command = [
        x
        for name, values in options.items()
        for v in values
        if v is not None
        for x in (f"--{name}", v)
    ]
    outcomes: list[Outcome] = []
    left_out = summary.not_covered(cases, chosen)
    with _progress(
        sum(t.operation == c.operation for c in cases for t in chosen), quiet=json
    ) as show:
        try:
            for outcome in run_all(cases, chosen, workers=workers, limit=limit):
                outcomes.append(outcome)
                show(outcome)
        except DeviceError as e:
            left_out.append(str(e))
    report = Report(
        outcomes,
        chosen,
        summary.facts(plugins(), chosen),
        shlex.join(["kernelseam", "parity", *command]),
        left_out,
    )
    for page in pages or []:
        page.write_text(PAGES[page.suffix](report), encoding="utf-8")
    if json:
        emit_json(_data(report))
    else:
        _show(report, pages or [])
    if not report.passed:
        raise typer.Exit(1)


# ---------------------------------------------------------------- selection


def _check_pages(pages: list[Path]) -> None:
    for page in pages:
        if page.suffix not in PAGES:
            raise InvalidValue(
                "report", page, f"must end with {' or '.join(PAGES)}", "Name such a file"
            )
        if page.is_dir() or not page.parent.is_dir():
            raise InvalidValue(
                "report", page, "must be a file in a folder that exists", "Make the folder first"
            )
        place = page if page.exists() else page.parent
        if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            raise InvalidValue("report", page, "must be writable", "Name another place")


def _cases(operation: str | None, patterns: list[str]) -> list[Case]:
    """The selected cases. Raises InvalidValue if an operation or a pattern matches none."""
    every = matrix()
    operations = list(dict.fromkeys(c.operation for c in every))
    if operation is not None:
        shapes.one_of("operation", operation, *operations)
        every = [c for c in every if c.operation == operation]
    for p in patterns:
        if not any(fnmatchcase(c.name, p) for c in every):
            raise InvalidValue(
                "case",
                p,
                f"is the name of none of {len(every)} cases, such as {every[0].name}",
                "With * it stands for a part: '*-causal-*'",
            )
    return [c for c in every if not patterns or any(fnmatchcase(c.name, p) for p in patterns)]


def _targets(backend: str | None, name: str | None) -> list[Target]:
    """Targets of the named device or backend, else of all. Raises UnknownName."""
    device: Device | None = None
    if name is not None:
        device = find_device(name)
        if backend not in (None, device.backend):
            raise InvalidValue("backend", backend, f"the device is {device}", "Name one of the two")
    elif (backend := preferred_backend(backend)) is not None:
        find_device(backend=backend)
    return targets(plugins(), backend, device)


def _chosen(available: list[Target], cases: list[Case], implementation: str | None) -> list[Target]:
    """The targets that have cases and match ``implementation``. Raises UnknownName if there are
    none."""
    operations = list(dict.fromkeys(c.operation for c in cases))
    matching = [t for o in operations for t in available if t.operation == o]
    chosen = [t for t in matching if implementation in (None, t.implementation)]
    if not chosen:
        names = ", ".join(dict.fromkeys(t.implementation for t in matching)) or "none"
        raise UnknownName(
            "implementation",
            "any" if implementation is None else implementation,
            f"must be one of {names} for {', '.join(operations)} here",
            "See `kernelseam doctor`, which lists what each backend has",
        )
    return chosen


# ---------------------------------------------------------------- output


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[Outcome], None]]:
    """Report outcomes: on a terminal a progress bar and failures, else a line each; with ``quiet``
    only the elapsed time."""
    if quiet:
        with working(f"running the matrix: {total} outcomes"):
            yield lambda outcome: None
    elif sys.stdout.isatty():
        with _bar(total) as show:
            yield show
    else:
        width, done = len(str(total)), 0

        def line(o: Outcome) -> None:
            nonlocal done
            done += 1
            print(f"[{done:{width}}/{total}] {_line(o)}", flush=True)

        yield line


def _line(o: Outcome) -> str:
    ratio = summary.ratio(o.verdict.worst) if o.verdict is not None else ""
    reason = "" if o.status == "passed" else f": {last_line(o.detail)}"
    return f"{o.status:<7} {ratio:>6}  {o.case.name} on {o.backend}-{o.implementation}{reason}"


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Outcome], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", style="dim", markup=False),
    )
    count = dict.fromkeys(("passed", "refused", "failed"), 0)
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=total, count="")

        def advance(o: Outcome) -> None:
            count["failed" if o.status in summary.FAILED else o.status] += 1
            if o.status in summary.FAILED:
                progress.console.print(Text(_line(o), style="red"))
            counts = " ".join(f"{n} {what}" for what, n in count.items() if n)
            progress.update(task, advance=1, description=o.case.name, count=counts)

        yield advance


def _show(report: Report, pages: list[Path]) -> None:
    if sys.stdout.isatty():
        _show_by_operation(report)
    else:
        print(summary.table(summary.rows(report.outcomes)))
    computing = sum(o.computing for o in report.outcomes)
    print(
        f"plans, launches and copies: {computing:.1f} s; data and verdicts: "
        f"{sum(o.seconds for o in report.outcomes) - computing:.1f} s"
    )
    refused = summary.refusals(report.outcomes)
    for operation, who, reason, n in refused[:SHOWN_REASONS]:
        heading(f"{who} refused {n} case(s) of {operation}: {reason}")
    if len(refused) > SHOWN_REASONS:
        print(f"… and {len(refused) - SHOWN_REASONS} more reasons: see --report")
    for o in report.bad:
        heading(f"FAILED {o.case.name} on {o.backend}-{o.implementation}: {last_line(o.detail)}")
    for sentence in report.not_covered:
        heading(sentence)
    for page in pages:
        print(f"report: {page}")


def _show_by_operation(report: Report) -> None:
    """A table per operation, for terminals: one of all would be wider than 80 columns."""
    rows = summary.rows(report.outcomes)
    for operation in report.operations:
        heading(operation)
        table(
            (
                *("  backend", "implementation", "cases", "passed", "refused", "failed"),
                *("worst", "s", "in"),
            ),
            [
                (
                    f"  {r.backend}",
                    r.implementation,
                    *(str(n) for n in (r.cases, r.passed, r.refused, r.failed)),
                    f"{r.worst:.3f}",
                    f"{r.seconds:.1f}",
                    r.worst_case,
                )
                for r in rows
                if r.operation == operation
            ],
        )
    print("worst: the largest error over tolerance, in the case that is named")


def _data(report: Report) -> dict[str, Any]:
    """The report as JSON data."""
    return {
        "passed": report.passed,
        "command": report.command,
        "facts": dict(report.facts),
        "not_covered": report.not_covered,
        "implementations": [
            {
                **vars(row),
                "device": str(t.device),
                "arch": t.device.arch,
                "name": t.device.name,
                "evidence": t.device.evidence,
            }
            for t in report.targets
            for row in summary.rows(report.of(t))
        ],
        "cases": [
            {
                "case": o.case.name,
                "operation": o.case.operation,
                "group": o.case.group,
                "backend": o.backend,
                "implementation": o.implementation,
                "status": o.status,
                "detail": o.detail,
                "seconds": o.seconds,
                "computing": o.computing,
                "worst": None if o.verdict is None else o.verdict.worst,
            }
            for o in report.outcomes
        ],
    }
