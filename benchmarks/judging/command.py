"""Runs the judges and writes their page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.judging import flash_attention, gym, onnx, samples_of_torch
from benchmarks.judging.case import Case, verdict

JUDGES: Mapping[str, tuple[str, Callable[[], Iterator[Case]]]] = {
    "flash-attention": ("FlashAttention's tests", flash_attention.cases),
    "torch": ("torch's samples of SDPA", samples_of_torch.cases),
    "onnx": ("ONNX's Attention", onnx.cases),
    "attention-gym": ("attention-gym's and FlexAttention's functions", gym.cases),
}

INTRODUCTION = """# Judges from outside

Problems of other projects' tests, by their names, shapes and formulas and none of their code, computed by kernelseam on NumPy
and held against float64: `python -m benchmarks judges`. The rule is FlashAttention's own: the largest error of a result may
be twice that of the same formula in the problem's dtype, that of a gradient three times, and what one more rounding costs.

Batches are cut to one or two entries, and of parameters that a test multiplies with one another each is taken in turn, as are head
dims beside 20,000 keys and more.
Dropout is not had here and not asked for. Not in these lists: FlashAttention's tests of packed qkv, whose formula is
that of `test_flash_attn_output`, caches that are appended to, rotary embeddings within attention,
returned probabilities. The lists are in
[benchmarks/judging](https://github.com/kernelseam/kernelseam/tree/main/benchmarks/judging).
"""  # noqa: E501


@dataclass(frozen=True)
class Outcome:
    """A case's verdict; None where it passed."""

    judge: str
    case: Case
    failure: str | None


def outcomes(
    judges: Sequence[str], only: Sequence[str] = (), most: int | None = None
) -> Iterator[Outcome]:
    """The judges' cases by name, of up to ``most`` scores."""
    for judge in judges:
        for case in JUDGES[judge][1]():
            wanted = not only or any(fnmatch(case.name, pattern) for pattern in only)
            if wanted and (most is None or case.elements <= most):
                yield Outcome(judge, case, verdict(case))


def page(found: Sequence[Outcome]) -> str:
    """The page: counts by judge and test, and every failure by name."""
    lines = [INTRODUCTION, "| judge | test | cases | pass |", "|---|---|---|---|"]
    counts: dict[tuple[str, str], list[bool]] = {}
    for x in found:
        test = x.case.name.partition("[")[0].partition(":")[0]
        if x.judge in ("onnx", "attention-gym"):
            test = "test_attention_…" if x.judge == "onnx" else _kind(x.case)
        counts.setdefault((JUDGES[x.judge][0], test), []).append(x.failure is None)
    for (judge, test), passed in counts.items():
        lines.append(f"| {judge} | `{test}` | {len(passed)} | {sum(passed)} |")
    failed = [x for x in found if x.failure is not None]
    lines += ["", f"{len(found)} cases, {len(failed)} fail.", ""]
    if failed:
        lines += ["| fails | why |", "|---|---|"]
        lines += [f"| `{x.case.name}` | {_one_line(x.failure)} |" for x in failed]
    return "\n".join(lines).rstrip() + "\n"


def _kind(case: Case) -> str:
    if case.name.startswith("test_flex_attention"):
        return "test_flex_attention"
    return "attn_gym.mods" if case.score_mod is not None else "attn_gym.masks"


def _one_line(text: str | None) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def run(judges: Sequence[str], only: Sequence[str], most: int | None, report: Path | None) -> int:
    """Print failures as they are found and the counts; 1 where there are any."""
    found = []
    for outcome in outcomes(judges or tuple(JUDGES), only, most):
        found.append(outcome)
        if outcome.failure is not None:
            print(f"FAILED {outcome.case.name}: {outcome.failure}", flush=True)
    failed = sum(x.failure is not None for x in found)
    print(f"{len(found)} cases, {failed} fail")
    if report is not None:
        report.write_text(page(found), encoding="utf-8")
    return int(failed > 0)
