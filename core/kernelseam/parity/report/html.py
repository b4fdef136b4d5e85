"""A report as one self-contained HTML page: totals, then cases by operation and group.

Rows are cases, columns implementations; colour shows error over tolerance, which each cell also
gives as text. Without scripts only the filter is missing. ``page.html`` is
the template, a Jinja one with autoescape; the style and the script lie beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kernelseam.parity.report.summary import (
    EVIDENCE,
    FAILED,
    Report,
    last_line,
    ratio,
    refusals,
    rows,
)
from kernelseam.parity.running.run import Outcome, Target

BINS = (
    ("zero", 0.0, "exact"),
    ("low", 0.25, "to ¼"),
    ("mid", 0.5, "to ½"),
    ("high", 0.75, "to ¾"),
    ("edge", 1.0, "to 1"),
)
"""CSS class, largest error over tolerance, and legend of the cells that passed."""
SHOWN = 8
"""The number of failures shown in full above the matrix."""
STATES = {**{name: text for name, _, text in BINS}, "failed": "failed", "refused": "refused"}


def html(report: Report) -> str:
    from jinja2 import (  # imported only where a page is made
        Environment,
        PackageLoader,
        StrictUndefined,
    )

    pages = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters |= {"last_line": last_line, "ratio": ratio, "state": state, "status": status}
    return pages.get_template("page.html").render(
        report=report,
        evidences=EVIDENCE,
        outcomes_of=outcomes_of,
        refusals=refusals(report.outcomes),
        rows=rows,
        shown=SHOWN,
        state_counts=state_counts,
        states=STATES,
    )


def state(o: Outcome) -> str:
    """The CSS class of an outcome, a key of STATES."""
    if o.status == "refused":
        return "refused"
    if o.status in FAILED or o.verdict is None:
        return "failed"
    at = o.verdict.worst
    return next(name for name, limit, _ in BINS if at <= limit)


def status(o: Outcome) -> str:
    """Passed, refused or failed: an error counts as failed."""
    return "failed" if o.status in FAILED else o.status


def state_counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """The number of outcomes in each state that occurs, in the order of STATES."""
    count = Counter(map(state, outcomes))
    return {s: count[s] for s in STATES if count[s]}


def outcomes_of(
    cases: Mapping[str, Mapping[str, Outcome]], target: Target | None = None
) -> list[Outcome]:
    """The outcomes of a group's cases on one target, or on all."""
    return [
        o
        for by_target in cases.values()
        for key, o in by_target.items()
        if target is None or key == str(target)
    ]
