"""Reports: what they count, what their pages say, and that a page needs nothing but itself."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from kernelseam.contract import Device
from kernelseam.oracle.check import Verdict
from kernelseam.parity.matrix import named
from kernelseam.parity.report import summary
from kernelseam.parity.report.html import html, state
from kernelseam.parity.report.markdown import markdown
from kernelseam.parity.report.summary import Report
from kernelseam.parity.running.run import Outcome, Target
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case

GOOD = Target(
    Device("one", 0, "a1", "One <1>", evidence="measured"), "plain", "gemm", builtin=False
)
BAD = Target(Device("two", 1, "b2", "Two", evidence="emulated"), "odd", "gemm", builtin=False)
ALONE = Target(GOOD.device, "flash", "attention", builtin=False)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1\n    '
    "launch()\nDeviceError: said 719\n"
)


def outcome(
    case: str | Case,
    target: Target,
    worst: float | None = None,
    *,
    refusal: str | None = None,
    error: str | None = None,
) -> Outcome:
    verdict = None
    if worst is not None:
        verdict = Verdict(
            worst <= 1,
            worst,
            (0, 1),
            9,
            f"C[0, 1] is 5, the oracle says 4: error/tolerance {worst:.3g}",
        )
    result = named(case) if isinstance(case, str) else case
    return Outcome(
        result,
        target.device.backend,
        target.implementation,
        verdict,
        refusal,
        error,
        0.5,
        refusal is not None,
    )


OUTCOMES = (
    outcome("gemm-f16-nn", GOOD, 0.5),
    outcome("gemm-f16-nn", BAD, 3.2),
    outcome("gemm-f16-nt", GOOD, 0.0),
    outcome("gemm-f16-nt", BAD, refusal="takes no <b>B</b> | none"),
    outcome("gemm-f16-nt-gaps", GOOD, 0.8),
    outcome("gemm-f16-nt-gaps", BAD, error=TRACEBACK),
    outcome("attention-f16-64", ALONE, 0.004),
)
FULL = Report(
    OUTCOMES,
    (GOOD, BAD, ALONE),
    [("kernelseam", "1.2"), ("device two:1", "b2 & more")],
    "kernelseam parity --case 'g*'",
    ["two has no implementation of attention: its 1 case(s) were not run."],
)
GREEN = Report([o for o in OUTCOMES if o.backend == "one"], (GOOD, ALONE))


# ---------------------------------------------------------------- counts


def test_rows_count_what_happened() -> None:
    good, bad, alone = summary.rows(OUTCOMES)
    assert (good.implementation, good.cases, good.passed, good.refused, good.failed) == (
        "plain",
        3,
        3,
        0,
        0,
    )
    assert (good.worst, good.worst_case, good.seconds) == (0.8, "gemm-f16-nt-gaps", 1.5)
    assert (bad.backend, bad.cases, bad.passed, bad.refused, bad.failed) == ("two", 3, 0, 1, 2)
    assert (bad.worst, bad.worst_case) == (3.2, "gemm-f16-nn")
    lines = summary.table([good, bad, alone]).splitlines()
    assert lines[0].split()[:3] == ["operation", "backend", "implementation"]
    assert lines[2].split() == [
        "gemm",
        "two",
        "odd",
        "3",
        "0",
        "1",
        "2",
        "3.200",
        "gemm-f16-nn",
        "1.5",
    ]
    assert FULL.count() == {"passed": 4, "refused": 1, "failed": 2}
    assert summary.rows([]) == []


def test_a_report_passes_where_something_ran_and_nothing_failed() -> None:
    assert GREEN.passed and not FULL.passed
    assert not Report((), ()).passed


def test_groups_are_headings_of_the_cases() -> None:
    assert {name: list(cases) for name, cases in FULL.groups("gemm").items()} == {
        "dtypes and shapes": ["gemm-f16-nn", "gemm-f16-nt"],
        "strides and layouts": ["gemm-f16-nt-gaps"],
    }
    without = replace(named("gemm-f16-nn"), group="")
    assert list(Report([outcome(without, GOOD, 0.1)], (GOOD,)).groups("gemm")) == ["cases"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-5, "<0.001"),
        (0.0042, "0.004"),
        (0.25, "0.25"),
        (0.994, "0.99"),
        (0.9997, "0.999"),
        (1.0, "1.000"),
        (1.0001, "1.001"),
        (3.276, "3.28"),
        (12345.0, "1.23e+04"),
        (math.inf, "∞"),
    ],
)
def test_a_ratio_never_looks_like_what_it_is_not(value: float, text: str) -> None:
    assert summary.ratio(value) == text


def test_one_line_of_a_traceback_is_what_was_raised() -> None:
    assert summary.last_line(TRACEBACK) == "DeviceError: said 719"
    assert summary.last_line("one\ntwo") == "one" and summary.last_line("") == ""


def test_what_is_not_covered_is_reported() -> None:
    cases = [named(n) for n in ("gemm-f16-nn", "attention-f16-64", "attention-f16-64-ramp")]
    assert summary.not_covered(cases, [GOOD, BAD, ALONE]) == [
        "two has no implementation of attention: its 2 case(s) were not run."
    ]
    assert summary.not_covered(cases[:1], [GOOD, BAD]) == []


def test_facts_name_versions_devices_and_no_date() -> None:
    known = plugins()
    device = known.backend("numpy").runtime.devices()[0]
    actual = dict(summary.facts(known, [Target(device, "numpy", "gemm", builtin=True)]))
    assert re.fullmatch(r"\d+\.\d+\.\d+, contract \d+", actual["kernelseam"])
    assert actual["device numpy:0"] == f"cpu, {device.name}, host"
    assert "plugin reference" in actual and "NumPy" in actual["Python"]
    assert not re.search(r"20\d\d-\d\d", " ".join(actual.values()))


# ---------------------------------------------------------------- Markdown


def test_markdown_says_it_all() -> None:
    text = markdown(FULL)
    assert "4 passed, 1 refused with a reason, 2 failed." in text
    assert "* device two:1: b2 & more\n* command: `kernelseam parity --case 'g*'`" in text
    assert (
        "| gemm | two-odd | two:1 (b2, emulated) | emulated | 3 | 0 | 1 | 2 | 3.2 | gemm-f16-nn |"
        in text
    )
    assert "| dtypes and shapes | 2 | 0.50 | 3.2, 1 r, 1 f |" in text
    assert "| strides and layouts | 1 | 0.80 | –, 1 f |" in text
    assert "| one-plain | gemm-f16-nt-gaps | 0.80 | C[0, 1] |" in text
    assert "* gemm on two odd, 1 case(s): takes no <b>B</b> | none\n" in text
    assert (
        "### gemm-f16-nt-gaps on two odd\n\n```\nTraceback" in text
        and "DeviceError: said 719\n```" in text
    )
    assert "two has no implementation of attention" in text
    for line in text.splitlines():
        if line.startswith("| gemm"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 11, line


def test_markdown_of_a_green_matrix_lists_nothing_that_is_not_there() -> None:
    text = markdown(GREEN)
    assert "Failed" not in text and "Refused" not in text and "emulated" not in text
    assert "4 passed, 0 refused with a reason, 0 failed." in text
    assert "## Failed" not in markdown(Report((), ()))


# ---------------------------------------------------------------- HTML


class Page(HTMLParser):
    """Elements in order, checked to be closed; text of the rows of the case tables; attributes that
    load."""

    VOID = ("meta", "col", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[tuple[str, str]]] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        result = dict(attrs)
        self.attributes.append(result)
        self.loads += [
            f"{tag} {n}" for n in ("src", "href", "srcset", "data", "action") if n in result
        ]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append((result.get("class") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.text.append(data)
        if "td" in self.open or "th" in self.open:
            name, text = self.rows[-1][-1]
            self.rows[-1][-1] = (name, text + data)

    def row(self, name: str) -> list[tuple[str, str]]:
        (result,) = (r[1:] for r in self.rows if r and r[0][1] == name)
        return result


def test_cells_say_in_text_what_their_colour_says() -> None:
    page = Page(html(FULL))
    assert page.row("gemm-f16-nn") == [("mid", "0.50"), ("failed", "✗ 3.2")]
    assert page.row("gemm-f16-nt") == [
        ("zero", "0"),
        ("refused", "refused: takes no <b>B</b> | none"),
    ]
    assert page.row("gemm-f16-nt-gaps") == [("edge", "0.80"), ("failed", "✗ error")]
    assert page.row("attention-f16-64") == [("low", "0.004")]
    reasons = [r[0][1] for r in page.rows if len(r) == 1]
    assert reasons == [
        "two odd: C[0, 1] is 5, the oracle says 4: error/tolerance 3.2",
        "two odd: DeviceError: said 719",
    ]


def test_the_page_opens_with_totals_and_what_failed() -> None:
    page = Page(html(FULL))
    text = " ".join("".join(page.text).split())
    assert "Parity: one, two 2 failed 4 cases 7 results 4 passed 1 refused 2 failed" in text
    assert "two has no implementation of attention" in text
    row = next(r for r in page.rows if len(r) == 8 and r[1][1].startswith("odd two"))
    assert row[1][1] == "odd two emulated b2, Two"
    assert [cell for _, cell in row[2:7]] == ["3", "0", "1", "2", "3.2"]
    labels = [a["aria-label"] for a in page.attributes if a.get("role") == "img"]
    assert labels == ["1 exact, 1 to ½, 1 to 1", "2 failed, 1 refused", "1 to ¼"]
    assert "Failed: 2" in text and "Traceback (most recent call last)" in text
    assert "kernelseam parity --case 'g*'" in text
    open_groups = [a for a in page.attributes if a.get("class") == "group" and "open" in a]
    assert len(open_groups) == 2, "what has failures is open"


def test_a_green_page_says_so() -> None:
    text = html(GREEN)
    assert "All passed" in text and 'class="failures"' not in text and "open>" not in text
    assert "None failed" in html(Report([*GREEN.outcomes, OUTCOMES[3]], (GOOD, BAD, ALONE)))


def test_many_failures_leave_the_matrix_in_sight() -> None:
    many = Report(
        [outcome(replace(named("gemm-f16-nn"), name=f"gemm-{i}"), BAD, 2.0) for i in range(30)],
        (BAD,),
    )
    assert "and 22 more" in html(many)


def test_a_page_needs_nothing_but_itself() -> None:
    text = html(FULL)
    assert Page(text).loads == []
    assert not re.search(r"https?:|url\(|@import|\bimport\b|fetch\(|\beval\b", text)
    assert "One &lt;1&gt;" in text and "b2 &amp; more" in text and "no <b>B</b>" not in text
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text


def test_no_name_closes_a_tag_or_an_attribute() -> None:
    device = Device("x", 0, '"><script>', "<!--", evidence='it\'s "so"')
    strange = Target(device, "'><b", "gemm", builtin=False)
    actual = [
        outcome("gemm-f16-nn", strange, 0.5),
        outcome("gemm-f16-nt", strange, refusal="</td>"),
    ]
    text = html(Report(actual, (strange,), [("<i>", "</dd>")], "a && b", ["<hr>"]))
    page = Page(text)
    assert text.count("<script>") == 1 and "<!--" not in text and "<hr>" not in text
    assert ("refused", "refused: </td>") in page.row("gemm-f16-nt")
    assert [r[1][1] for r in page.rows if len(r) == 8 and r[0][1] == "gemm"] == [
        '\'><b x it\'s "so" "><script>, <!--'
    ]
    assert {a.get("title") for a in page.attributes} >= {"", actual[0].detail}


def test_a_case_that_one_implementation_did_not_run_has_a_cell() -> None:
    page = Page(html(Report(OUTCOMES[:3], (GOOD, BAD))))
    assert page.row("gemm-f16-nt") == [("zero", "0"), ("nothing", "not run")]


@pytest.mark.parametrize(
    ("worst", "name"),
    [
        (0.0, "zero"),
        (0.25, "low"),
        (0.2501, "mid"),
        (0.5, "mid"),
        (0.75, "high"),
        (1.0, "edge"),
        (1.01, "failed"),
        (math.inf, "failed"),
    ],
)
def test_colours_are_bins_of_the_ratio(worst: float, name: str) -> None:
    assert state(outcome("gemm-f16-nn", GOOD, worst)) == name


def test_colours_contrast_with_their_text() -> None:
    """Contrast of text on each cell's colour, by the formula of WCAG 2: at least 4.5, light and
    dark."""
    style = re.search(r"<style>\n(.*?)</style>", html(GREEN), re.DOTALL)
    assert style is not None

    def luminance(colour: str) -> float:
        colour = colour if len(colour) == 6 else "".join(2 * c for c in colour)
        parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    schemes = re.findall(r":root \{(.*?)\}", style[1], re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): #([0-9a-f]{3,6});", scheme))
        for background in ("paper", "panel", "zero", "low", "mid", "high", "edge"):
            assert contrast(colours["ink"], colours[background]) >= 4.5, background
        assert contrast(colours["on-failed"], colours["failed"]) >= 4.5
        for text in ("faint", "failed", "accent", "good"):
            assert contrast(colours[text], colours["paper"]) >= 4.5, text
        assert contrast(colours["faint"], colours["refused"]) >= 4.5
