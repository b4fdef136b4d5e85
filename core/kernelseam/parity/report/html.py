"""A report as one page of HTML that needs nothing else: totals, then cases by operation and group.

Rows are cases, columns implementations, colour is error over tolerance. Everything that colour says
a cell says in text, too. Without scripts the page lacks nothing but its filter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources

from kernelseam.parity.report.summary import BAD, EVIDENCE, Report, last_line, ratio, refusals, rows
from kernelseam.parity.running.run import Outcome, Target

BINS = (
    ("zero", 0.0, "exact"),
    ("low", 0.25, "to ¼"),
    ("mid", 0.5, "to ½"),
    ("high", 0.75, "to ¾"),
    ("edge", 1.0, "to 1"),
)
"""Class, largest error over tolerance, and its name in the legend, of what passed."""
SHOWN = 8
"""Failures above the matrix, which are seen without a click."""
STATES = {**{name: text for name, _, text in BINS}, "failed": "failed", "refused": "refused"}


def html(report: Report) -> str:
    """The page."""
    folder = resources.files("kernelseam.parity.report")
    style, script = ((folder / f"page.{end}").read_text("utf-8") for end in ("css", "js"))
    title = f"Parity: {', '.join(dict.fromkeys(t.device.backend for t in report.targets))}"
    matrix = (line for operation in report.operations for line in _operation(report, operation))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            *_head(report, title),
            *_totals(report),
            *_legend(report),
            *_failures(report),
            *_toolbar(),
            *matrix,
            *_refusals(report),
            *_facts(report),
            "</main>",
            f"<script>\n{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def state(o: Outcome) -> str:
    """The class of an outcome, a key of STATES."""
    if o.status == "refused":
        return "refused"
    if o.status in BAD or o.verdict is None:
        return "failed"
    at = o.verdict.worst
    return next(name for name, limit, _ in BINS if at <= limit)


# ---------------------------------------------------------------- above the cases


def _head(report: Report, title: str) -> Iterator[str]:
    count = report.count()
    cases = len({o.case.name for o in report.outcomes})
    verdict = ("good", "All passed") if report.passed else ("bad", f"{count['failed']} failed")
    if report.passed and count["refused"]:
        verdict = ("good", "None failed")
    yield (
        f'<header class="page"><h1>{escape(title)} <span class="verdict '
        f'{verdict[0]}">{verdict[1]}</span></h1>'
    )
    yield '<ul class="counts">'
    for number, what in (
        (cases, "cases"),
        (len(report.outcomes), "results"),
        *((count[what], what) for what in ("passed", "refused", "failed")),
    ):
        yield f'<li class="{what}{"" if number else " none"}"><b>{number}</b> {what}</li>'
    yield "</ul>"
    yield (
        "<p>Every implementation computes every case on the same data, and each element is held "
        "against a float64 "
        "oracle. A number is the case's largest <em>error over tolerance</em>: at most 1 "
        "passes.</p>"
    )
    yield from (f'<p class="notice">{escape(sentence)}</p>' for sentence in report.not_covered)
    yield "</header>"


def _totals(report: Report) -> Iterator[str]:
    yield '<section aria-labelledby="totals"><h2 id="totals">Implementations</h2>'
    yield (
        '<table class="totals"><thead><tr><th scope="col">operation</th><th '
        'scope="col">implementation</th>'
    )
    yield from (
        f'<th scope="col" class="n">{x}</th>'
        for x in ("cases", "passed", "refused", "failed", "worst")
    )
    yield (
        '<th scope="col" class="share">all cases, by error over tolerance</th></tr></thead><tbody>'
    )
    for t in (t for operation in report.operations for t in report.columns(operation)):
        found = report.of(t)
        for r in rows(found):
            bad = ' class="n bad"' if r.failed else ' class="n"'
            yield (
                f'<tr><th scope="row">{escape(r.operation)}</th><td>{_who(t)} {_where(t)}</td>'
                f'<td class="n">{r.cases}</td><td class="n">{r.passed}</td><td '
                f'class="n">{r.refused}</td>'
                f'<td{bad}>{r.failed}</td><td class="n" '
                f'title="{escape(r.worst_case)}">{ratio(r.worst)}</td>'
                f'<td class="share">{_bar(found)}</td></tr>'
            )
    yield "</tbody></table></section>"


def _who(t: Target) -> str:
    return (
        f'<b>{escape(t.implementation)}</b> <span class="faint">{escape(t.device.backend)}</span>'
    )


def _where(t: Target) -> str:
    d = t.device
    name = f"{d.arch}, {d.name}" if d.name else d.arch
    return f'{_chip(d.evidence)} <span class="device">{escape(name)}</span>'


def _chip(evidence: str) -> str:
    known = evidence if evidence in EVIDENCE else "other"
    return (
        f'<span class="chip {known}" '
        f'title="{escape(EVIDENCE.get(evidence, ""))}">{escape(evidence)}</span>'
    )


def _bar(outcomes: Sequence[Outcome]) -> str:
    count = Counter(state(o) for o in outcomes)
    said = ", ".join(f"{count[s]} {text}" for s, text in STATES.items() if count[s])
    parts = "".join(f'<i class="{s}" style="flex-grow:{count[s]}"></i>' for s in STATES if count[s])
    return (
        f'<span class="bar" role="img" aria-label="{escape(said)}" '
        f'title="{escape(said)}">{parts}</span>'
    )


def _legend(report: Report) -> Iterator[str]:
    yield '<dl class="legend"><div><dt>Colour</dt><dd>'
    for name, text in STATES.items():
        sign = "✗ " if name == "failed" else ""
        yield f'<span class="key {name}">{sign}{text}</span>'
    yield "</dd></div><div><dt>Evidence</dt><dd>"
    for evidence in dict.fromkeys(t.device.evidence for t in report.targets):
        yield (
            f'<span class="meaning">{_chip(evidence)} '
            f"{escape(EVIDENCE.get(evidence, 'as the plugin says'))}</span>"
        )
    yield "</dd></div></dl>"


def _failures(report: Report) -> Iterator[str]:
    if not report.bad:
        return
    yield (
        '<section aria-labelledby="failed" class="failures"><h2 id="failed">Failed: '
        f"{len(report.bad)}</h2>"
    )
    first, rest = report.bad[:SHOWN], report.bad[SHOWN:]
    yield from map(_failure, first)
    if rest:
        yield f"<details><summary>and {len(rest)} more</summary>"
        yield from map(_failure, rest)
        yield "</details>"
    yield "</section>"


def _failure(o: Outcome) -> str:
    who = f"<b>{escape(o.case.name)}</b> on {escape(o.backend)} {escape(o.implementation)}"
    detail = o.detail.strip()
    if "\n" not in detail:
        return f"<p>{who}: {escape(detail)}</p>"
    return (
        f"<details><summary>{who}: "
        f"{escape(last_line(detail))}</summary><pre>{escape(detail)}</pre></details>"
    )


def _toolbar() -> Iterator[str]:
    yield '<form class="toolbar" role="search" aria-label="Filter the cases" hidden>'
    yield (
        '<label>Cases <input type="search" placeholder="part of a name" autocomplete="off"></label>'
    )
    yield '<fieldset><legend class="hidden">Which outcomes</legend>'
    for i, name in enumerate(("all", "passed", "refused", "failed")):
        checked = "" if i else " checked"
        yield (
            f'<label><input type="radio" name="state" value="{name if i else ""}"{checked}> '
            f"{name}</label>"
        )
    yield '</fieldset><button type="button" data-open="1">Open all</button>'
    yield '<button type="button" data-open="">Close all</button></form>'


# ---------------------------------------------------------------- the cases


def _operation(report: Report, operation: str) -> Iterator[str]:
    columns, groups = report.columns(operation), report.groups(operation)
    yield (
        f'<section class="operation" aria-label="{escape(operation)}" '
        f'style="--columns:{len(columns)}">'
    )
    yield f'<div class="grid head"><h2>{escape(operation)} <span class="faint">'
    yield f"{sum(map(len, groups.values()))} cases</span></h2>"
    yield from (f"<div>{_who(t)}<br>{_where(t)}</div>" for t in columns)
    yield "</div>"
    for name, cases in groups.items():
        yield from _group(name, cases, columns)
    yield "</section>"


def _group(
    name: str, cases: Mapping[str, Mapping[str, Outcome]], columns: Sequence[Target]
) -> Iterator[str]:
    broken = any(o.status in BAD for found in cases.values() for o in found.values())
    yield f'<details class="group"{" open" if broken else ""}><summary class="grid">'
    yield f'<span class="name">{escape(name)} <span class="faint">{len(cases)}</span></span>'
    for t in columns:
        yield _overview([found[str(t)] for found in cases.values() if str(t) in found])
    yield '</summary><table><colgroup><col class="case">'
    yield '<col class="cell">' * len(columns)
    yield '</colgroup><thead class="hidden"><tr><th scope="col">case</th>'
    yield from (
        f'<th scope="col">{escape(t.implementation)} on {escape(t.device.backend)}</th>'
        for t in columns
    )
    yield "</tr></thead><tbody>"
    for case, found in cases.items():
        states = " ".join(sorted({_status(o) for o in found.values()}))
        yield f'<tr data-states="{states}"><th scope="row">{escape(case)}</th>'
        yield from (_cell(found.get(str(t))) for t in columns)
        yield "</tr>"
        yield from (_why(o, len(columns) + 1) for o in found.values() if o.status in BAD)
    yield "</tbody></table></details>"


def _status(o: Outcome) -> str:
    return "failed" if o.status in BAD else o.status


def _overview(outcomes: Sequence[Outcome]) -> str:
    """The worst of a group, how many were refused or failed, and a square a case."""
    judged = [o.verdict.worst for o in outcomes if o.verdict is not None and o.status == "passed"]
    count = Counter(_status(o) for o in outcomes)
    said = [f'<b class="bad">✗ {count["failed"]} failed</b>'] if count["failed"] else []
    said += [f"<b>{ratio(max(judged))}</b>"] if judged else []
    said += [f'<span class="faint">{count["refused"]} refused</span>'] if count["refused"] else []
    squares = "".join(f'<i class="{state(o)}"></i>' for o in outcomes)
    strip = f'<span class="strip" aria-hidden="true">{squares}</span>'
    return f'<span class="overview"><span>{" · ".join(said)}</span>{strip}</span>'


def _cell(o: Outcome | None) -> str:
    if o is None:
        return '<td class="nothing">not run</td>'
    if o.status == "refused":
        return f'<td class="refused"><span class="reason">refused: {escape(o.detail)}</span></td>'
    if o.status in BAD:
        return (
            '<td class="failed">✗ '
            f"{ratio(o.verdict.worst) if o.verdict is not None else o.status}</td>"
        )
    assert o.verdict is not None
    said = ratio(o.verdict.worst) if o.verdict.checked else "empty result"
    return f'<td class="{state(o)}" title="{escape(o.detail)}">{said}</td>'


def _why(o: Outcome, width: int) -> str:
    text = f"<b>{escape(o.backend)} {escape(o.implementation)}</b>: {escape(last_line(o.detail))}"
    return f'<tr class="why"><td colspan="{width}">{text}</td></tr>'


# ---------------------------------------------------------------- below the cases


def _refusals(report: Report) -> Iterator[str]:
    found = refusals(report.outcomes)
    if not found:
        return
    yield '<section aria-labelledby="refused"><h2 id="refused">Refused, with the reason given</h2>'
    yield (
        '<table class="plain"><thead><tr><th scope="col">operation</th><th '
        'scope="col">implementation</th>'
    )
    yield '<th scope="col" class="n">cases</th><th scope="col">reason</th></tr></thead><tbody>'
    for operation, who, why, n in found:
        yield (
            f"<tr><td>{escape(operation)}</td><td>{escape(who)}</td><td "
            f'class="n">{n}</td><td>{escape(why)}</td></tr>'
        )
    yield "</tbody></table></section>"


def _facts(report: Report) -> Iterator[str]:
    found: Iterable[tuple[str, str]] = [
        *report.facts,
        *([("command", report.command)] if report.command else []),
    ]
    yield '<footer aria-labelledby="about"><h2 id="about">What ran</h2><dl class="facts">'
    yield from (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in found
    )
    yield "</dl></footer>"
