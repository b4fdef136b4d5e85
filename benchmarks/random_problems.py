"""Random problems against the oracle: options × layouts × dtypes × ragged sizes × strides.

    python -m benchmarks.random_problems --family attention --device cuda:0 --problems 2000 --seed 1
    python -m benchmarks.random_problems --family products --device cuda:0

Of attentions, gradients and merges, or of batched GEMMs, projections and their gradients
(``drawing``); with ``--implementation``, of specs that it takes. Draws ``--specs`` specs, compiles
all that they need in parallel, then runs problems of them with extents, strides, gaps, lengths,
pages and data of their own. What lies beyond every end and in every gap is NaN; each problem runs
twice and must give the same bits. What fails is printed with its number (``--only NUMBER`` runs it
alone) and as the case that it is, which belongs into the matrix.

This process alone uses the device; ``--workers`` others make data and judge results (0: this one
does, for checkers). No stage of a problem takes more than ``--limit`` seconds: a worker that dies
or hangs costs its problem alone, a device that hangs or is lost ends the run, naming the problem.
Exit status 1 where one failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kernelseam.contract import Device
from kernelseam.dispatch import find_device
from kernelseam.errors import DeviceError
from kernelseam.parity.report import summary
from kernelseam.parity.running.pipeline import run_all
from kernelseam.parity.running.run import Outcome, Target, targets
from kernelseam.parity.running.workers import cores
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case

from benchmarks import precompile
from benchmarks.drawing import FAMILIES, Family, Kind
from benchmarks.precompile import problem_of

DRAWN = 200
"""Where an implementation is named: specs that are drawn for each one that is kept."""


@dataclass(frozen=True)
class Problem:
    """One of those drawn: that of a number is the same in every run of a seed."""

    number: int
    kind: Kind
    case: Case


@dataclass(frozen=True)
class Result:
    """What became of a problem."""

    problem: Problem
    outcome: Outcome

    @property
    def worst(self) -> float:
        """Error over tolerance."""
        return 0.0 if self.outcome.verdict is None else self.outcome.verdict.worst

    @property
    def features(self) -> Iterator[str]:
        """What the problem is about, for the summary."""
        yield from self.problem.kind.features
        yield from self.problem.kind.about(self.problem.case)


def draw(
    family: Family,
    seed: int,
    specs: int,
    numbers: list[int],
    takes: Callable[[Case], bool] | None = None,
) -> list[Problem]:
    """The problems of these numbers; with ``takes``, of specs of which it takes a first problem."""
    kinds = family.kinds(np.random.default_rng(seed), specs * (DRAWN if takes else 1))
    if takes is not None:
        rng = np.random.default_rng(seed)
        those = (k for k in kinds if takes(k.draw("random-attempt", rng)))
        kinds = list(itertools.islice(those, specs))
        if not kinds:
            raise SystemExit(f"of {DRAWN * specs} specs that were drawn none is taken")
    drawn = []
    for i in numbers:
        kind = kinds[i % len(kinds)]
        drawn.append(
            Problem(i, kind, kind.draw(f"random-{seed}-{i}", np.random.default_rng((seed, i))))
        )
    return drawn


def taken_by(implementation: str, device: Device) -> Callable[[Case], bool]:
    """Whether an implementation of that name supports a case."""

    def takes(case: Case) -> bool:
        known = plugins().registry.implementations_of(case.operation, device.backend)
        those = [i for i in known if i.name == implementation]
        return any(i.supports(problem_of(case, device), device) is None for i in those)

    return takes


def chosen(device: Device, implementation: str | None) -> list[Target]:
    """The implementations of that name, else the shared kernels or the reference: one an
    operation."""
    names = ("shared", "numpy") if implementation is None else (implementation,)
    return [t for t in targets(plugins(), device=device) if t.implementation in names]


def run(
    problems: list[Problem], targets: list[Target], workers: int, limit: float
) -> Iterator[Result]:
    """Results in the problems' order. Raises DeviceError."""
    known = {p.case.name: p for p in problems}
    for o in run_all([p.case for p in problems], targets, workers=workers, limit=limit):
        yield Result(known[o.case.name], o)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, required=True, help="of operations")
    parser.add_argument("--device", default="cuda:0", metavar="BACKEND:INDEX")
    parser.add_argument(
        "--implementation", help="by name; else the shared kernels, or the reference"
    )
    parser.add_argument("--problems", type=int, default=1000)
    defaults = ", ".join(f"{f.specs} of {name}" for name, f in FAMILIES.items())
    parser.add_argument("--specs", type=int, help=f"how many. [{defaults}]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=int, metavar="NUMBER", help="this problem alone, with its case"
    )
    parser.add_argument(
        "--workers", type=int, default=max(cores() - 1, 1), help="processes. [one a core, but one]"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="SECONDS", help="of a problem's stage. [120]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here")
    arguments = parser.parse_args(argv)

    start = time.perf_counter()
    device = find_device(arguments.device)
    numbers = [arguments.only] if arguments.only is not None else list(range(arguments.problems))
    family = FAMILIES[arguments.family]
    specs = arguments.specs or family.specs
    targets = chosen(device, arguments.implementation)
    if not targets:
        parser.error(
            f"{device} has no implementation {arguments.implementation or 'shared or numpy'}"
        )
    takes = None
    if arguments.implementation is not None:
        takes = taken_by(arguments.implementation, device)
    problems = draw(family, arguments.seed, specs, numbers, takes)
    cases = [p.case for p in problems]
    print(
        f"{len(problems)} problems of {len({p.kind for p in problems})} specs, seed "
        f"{arguments.seed}, on {device}, "
        f"{arguments.workers} workers",
        *summary.not_covered(cases, targets),
        sep="\n",
        flush=True,
    )
    if arguments.only is not None:
        print(cases[0])
    units = precompile.units(cases, device, arguments.implementation or "shared")
    wrong = precompile.compile_all(units, device, None if arguments.workers else 1) if units else []
    print(
        f"{len(units)} binaries after {time.perf_counter() - start:.0f} s",
        *wrong,
        sep="\n",
        flush=True,
    )

    results, lost = list[Result](), ""
    try:
        for r in run(problems, targets, arguments.workers, arguments.limit):
            results.append(r)
            if r.outcome.status in summary.FAILED:
                print(
                    f"{r.outcome.status} {r.problem.number}: {r.outcome.detail}\n    "
                    f"{r.problem.case}",
                    flush=True,
                )
            if len(results) % 200 == 0:
                print(f"{len(results)} done, {time.perf_counter() - start:.0f} s", flush=True)
    except DeviceError as e:
        lost = str(e)
    seconds = time.perf_counter() - start
    print(by_feature(results), *filter(None, [lost]), sep="\n")
    count = Counter(r.outcome.status for r in results)
    print(
        f"{dict(count)} of {len(problems)} in {seconds:.0f} s; plans, launches and copies took "
        f"{sum(r.outcome.computing for r in results):.0f} s, data and verdicts "
        f"{sum(r.outcome.seconds - r.outcome.computing for r in results):.0f} s of their processes"
    )
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {
                    "family": arguments.family,
                    "seed": arguments.seed,
                    "specs": specs,
                    "device": str(device),
                    "name": device.name,
                    "binaries": len(units),
                    "not compiled": wrong,
                    "seconds": seconds,
                    "lost": lost,
                    "results": [
                        {
                            "number": r.problem.number,
                            "status": r.outcome.status,
                            "worst": r.worst,
                            "detail": r.outcome.detail,
                            "seconds": r.outcome.seconds,
                            "features": list(r.features),
                        }
                        for r in results
                    ],
                }
            ),
            encoding="utf-8",
        )
    return int(bool(lost or wrong) or any(count[x] for x in summary.FAILED) or not count["passed"])


def by_feature(results: list[Result]) -> str:
    """A line a feature, and one a reason to refuse."""
    groups: dict[str, list[Result]] = {}
    for r in results:
        for f in ("all", *r.features):
            groups.setdefault(f, []).append(r)
    lines = [
        (
            f"{'':28}{'problems':>9}{'refused':>9}{'failed':>8}{'worst error/tolerance':>23}  of "
            "problem"
        )
    ]
    for name in ("all", *sorted(set(groups) - {"all"})):
        group = groups.get(name, [])
        count = Counter(r.outcome.status for r in group)
        worst = max(group, key=lambda r: r.worst, default=None)
        bad, top = (
            sum(count[x] for x in summary.FAILED),
            f"{worst.worst:23.3f}  {worst.problem.number}" if worst else "",
        )
        lines.append(f"{name:28}{len(group):9}{count['refused']:9}{bad:8}{top}")
    refusals = Counter(r.outcome.detail for r in results if r.outcome.status == "refused")
    return "\n".join([*lines, *(f"refused {n}: {why}" for why, n in refusals.items())])


if __name__ == "__main__":
    sys.exit(main())
