"""A sample of other projects' tests, on NumPy; and that the judge can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is missing: the judges' formulas are its")
from benchmarks import judging  # noqa: E402
from benchmarks.judging import command  # noqa: E402


@pytest.mark.parametrize(
    ("judge", "most", "step"),
    [("flash-attention", 200_000, 19), ("torch", 10_000, 5), ("onnx", 10_000, 8)]
    + [("attention-gym", 100_000, 6)],
)
def test_a_sample_passes(judge: str, most: int, step: int) -> None:
    cases = [c for c in command.JUDGES[judge][1]() if c.elements <= most][::step]
    assert len(cases) >= 5
    assert [(c.name, why) for c in cases if (why := judging.case.verdict(c))] == []


def test_names_are_of_one_case_each() -> None:
    names = [c.name for _, cases in command.JUDGES.values() for c in cases()]
    assert len(names) == len(set(names)) == 782


def test_another_formula_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is a hundredth off, a key too many, a gradient that is not had."""
    (case,) = [c for c in judging.onnx.cases() if c.name == "test_attention_4d"]
    computed = judging.case.computed

    def with_other(**changed: object) -> str | None:
        other = replace(case, **changed)
        monkeypatch.setattr(judging.case, "computed", lambda c, *x: computed(other, *x))
        return judging.case.verdict(case)

    assert with_other() is None
    assert "away from float64" in (with_other(scale=0.357) or "")
    assert "away from float64" in (with_other(causal="bottom right") or "")
    assert "InvalidValue: softcap" in (with_other(softcap=-1.0) or "")


def test_the_page_counts_and_names_failures() -> None:
    cases = list(judging.onnx.cases())[:3]
    found = [command.Outcome("onnx", c, None if i else "a | b\nc") for i, c in enumerate(cases)]
    lines = command.page(found).splitlines()
    assert "| ONNX's Attention | `test_attention_…` | 3 | 2 |" in lines
    assert "3 cases, 1 fail." in lines
    assert lines[-1] == f"| `{cases[0].name}` | a \\| b c |"
