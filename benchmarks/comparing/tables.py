"""Records as lines and as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from benchmarks.comparing.results import (
    BACK_TO_BACK,
    COPY,
    FLUSHED,
    HOST,
    OURS,
    PEER,
    WITHOUT,
    Record,
    Timed,
    means,
)

NONE = "–"


def number(x: float | None, digits: str = ".2f") -> str:
    return NONE if x is None else format(x, digits)


def short(us: float | None) -> str:
    """µs with three or four digits."""
    return (
        NONE
        if us is None
        else f"{us:.0f}"
        if us >= 1000
        else f"{us:.1f}"
        if us >= 10
        else f"{us:.2f}"
    )


def cell(record: Record, ours: Timed, other: Timed) -> str:
    """The other's time over ours: back to back, then flushed."""
    return " / ".join(f"{r:.2f}" for r in record.ratios(ours, other).values()) or NONE


def line(record: Record) -> str:
    """A row as it is printed when it is there."""
    if why := said(record):
        word, _, reason = why.partition(": ")
        return f"{word} {record.suite}/{record.name}: {reason}"
    parts = []
    for ours in record.of(OURS):
        times = " / ".join(f"{short(ours.median(way))}" for way in ours.us)
        rate = (
            f" {record.operations / t / 1e6:.0f} TFLOP/s"
            if record.operations and (t := first(ours))
            else ""
        )
        others = "".join(
            f", {o.name} {' / '.join(short(o.median(way)) for way in ours.us)} µs "
            f"({cell(record, ours, o)} of ours)"
            for role in (PEER, WITHOUT, COPY)
            for o in record.of(role)
        )
        error = f", error {ours.error:.1e} ({ours.worst:.2f})" if ours.error is not None else ""
        missed = "".join(f" BELOW: {m}" for m in record.beyond(ours))
        parts.append(f"{ours.name} [{ours.implementation}] {times} µs{rate}{others}{error}{missed}")
    graph = " (graph)" if record.captured else ""
    return (
        f"{record.suite}/{record.name}{graph}: " + "; ".join(parts) + f"  [{record.seconds:.1f} s]"
    )


def said(record: Record) -> str:
    """Of a row without times, why it has none."""
    if record.failure:
        return f"FAILED: {record.failure}"
    return f"UNSUPPORTED: {record.unsupported}" if record.unsupported else ""


def first(timed: Timed) -> float | None:
    """The median of the way that comes first."""
    return next((timed.median(way) for way in timed.us), None)


def table(records: Sequence[Record]) -> list[str]:
    """One suite's, a line for each way of ours."""
    whole = [r for r in records if not r.failure]
    ways = list(dict.fromkeys(way for r in whole for t in r.of(OURS) for way in t.us))
    device = BACK_TO_BACK in ways
    others = {
        role: list(dict.fromkeys(t.name for r in whole for t in r.of(role)))
        for role in (PEER, WITHOUT, COPY)
    }
    columns = ["row", "implementation", *(f"µs, {way}" for way in ways)]
    columns += ["TFLOP/s", "GB/s"] if device else []
    columns += [f"{n} / ours" for names in others.values() for n in names]
    columns += ["best peer / ours, the less"] if others[PEER] else []
    columns += ["error", "error / tolerance"] if device else []
    limited = any(r.limits for r in whole)
    columns += ["at most, µs"] if limited else []
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for record in records:
        if why := said(record):
            lines.append(f"| {record.name} | {why.replace('|', '/')} |" + " |" * (len(columns) - 2))
            continue
        named = {t.name: t for t in record.timed}
        for ours in record.of(OURS):
            cells = [
                record.name,
                ours.implementation or NONE,
                *(short(ours.median(way)) for way in ways),
            ]
            if device:
                us = ours.median(BACK_TO_BACK)
                cells += [
                    number(record.operations / us / 1e6 if us else None, ".0f"),
                    number(record.bytes / us / 1e3 if us else None, ".0f"),
                ]
            cells += [
                cell(record, ours, named[n]) if n in named else NONE
                for names in others.values()
                for n in names
            ]
            if others[PEER]:
                counted = record.counted(ours)
                bold = "**" if record.beyond(ours) and counted is not None else ""
                cells.append(f"{bold}{number(counted)}{bold}")
            if device:
                cells += [number(ours.error, ".1e"), number(ours.worst)]
            if limited:
                cells.append(
                    ", ".join(f"{way} {limit:g}" for way, limit in record.limits.items()) or NONE
                )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def head(environment: dict[str, Any]) -> list[str]:
    """What was measured on, in a few lines."""
    device, versions = (
        environment.get("device", {}),
        environment.get("device", {}).get("versions", {}),
    )
    facts = [str(device.get("name", "?"))]
    facts += [f"driver {device['driver']}"] if "driver" in device else []
    facts += [f"{device['power_limit_w']:.0f} W"] if "power_limit_w" in device else []
    facts += [f"{name} {version}" for name, version in versions.items() if version != "None"]
    lines = [", ".join(facts) + "."]
    if ceilings := environment.get("ceilings"):
        lines.append(
            f"Ceilings: a copy {ceilings['copy_gbs']:.0f} GB/s (read and written), cuBLAS 8192³ "
            "bf16 "
            f"{ceilings['cublas_tflops']:.0f} TFLOP/s."
        )
    return lines


EXPLAINED = (
    "Contestants take turns, after the card is warm; medians. Ratios are the other's time over "
    f"ours, {BACK_TO_BACK} / "
    f"with the L2 cache {FLUSHED} before each launch ({HOST}: the host's time of a call); the "
    "less counts. Bold: below "
    "its target. Errors are ‖result − float64‖ / ‖float64‖ of a part, and the largest over its "
    "tolerance."
)


def page(environment: dict[str, Any], records: Sequence[Record]) -> list[str]:
    """A run as Markdown."""
    lines = [*head(environment), "", EXPLAINED]
    by_suite = means(records)
    for suite, rows in groupby(records, key=lambda r: r.suite):
        lines += ["", f"## {suite}", "", *table(list(rows))]
        for name, ratio in by_suite.get(suite, {}).items():
            lines += ["", f"Geometric mean of the ratio that counts, {name}: **{ratio:.3f}**"]
        if below := _below(r for r in records if r.suite == suite):
            lines += ["", *(f"- {text}" for text in below)]
        refused = {(n, why) for r in records if r.suite == suite for n, why in r.refused.items()}
        lines += [""] * bool(refused) + [f"- {name}: {why}" for name, why in sorted(refused)]
    return lines


def summary(records: Sequence[Record]) -> list[str]:
    """What a run ends with: means, and all that is wrong or below its target."""
    lines = []
    for suite, by in means(records).items():
        ratios = [
            x
            for r in records
            if r.suite == suite and not r.failure
            for t in r.of(OURS)[:1]
            if (x := r.counted(t)) is not None
        ]
        shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in by.items())
        lines.append(
            f"{suite}: geometric mean {shown}; least {min(ratios):.2f} of {len(ratios)} rows"
        )
    unsupported = sum(bool(r.unsupported) for r in records)
    counts = [f"{failures(records)} failed"] + [f"{unsupported} unsupported"] * bool(unsupported)
    return (
        lines
        + _below(records)
        + [line(r) for r in records if said(r)]
        + [f"{len(records)} rows, {', '.join(counts)}"]
    )


def _below(records: Iterable[Record]) -> list[str]:
    """Rows that miss their targets."""
    return [
        f"BELOW {r.suite}/{r.name} {ours.name}: {'; '.join(missed)}"
        for r in records
        for ours in r.of(OURS)
        if not r.failure and (missed := r.beyond(ours))
    ]


def failures(records: Iterable[Record]) -> int:
    return sum(bool(r.failure) for r in records)
