"""Random attentions, gradients and merges against the oracle: masks × layouts × dtypes × ragged sizes × strides.

    python benchmarks/random_attention.py --device cuda:0 --problems 2000 --seed 1

Draws at most ``--specs`` specs, compiles all that they need in parallel, then runs problems of them with extents,
strides, gaps, lengths, pages and data of their own. What lies beyond every end and in every gap is NaN; each problem
runs twice and must give the same bits. What fails is printed with its number (``--only NUMBER`` runs it alone) and as
the case that it is, which belongs into the matrix. Workers are processes: one whose device is lost is replaced.
``--workers 0`` runs in this process, for checkers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ahead
import drawing
import numpy as np
from drawing import Kind

from kernelseam.dispatch import find_device
from kernelseam.parity.cases import AttentionCase, BackwardCase, Case
from kernelseam.parity.run import Target, run_case, targets
from kernelseam.plugins import plugins


@dataclass(frozen=True)
class Problems:
    """All that a run may draw: problem i is the same in every process."""

    seed: int
    specs: int

    def kinds(self) -> list[Kind]:
        return drawing.kinds(np.random.default_rng(self.seed), self.specs)

    def draw(self, i: int, kinds: list[Kind]) -> tuple[Kind, Case]:
        kind = kinds[i % len(kinds)]
        return kind, drawing.draw(kind, f"random-{self.seed}-{i}", np.random.default_rng((self.seed, i)))


@dataclass(frozen=True)
class Result:
    """What became of a problem."""

    number: int
    status: str
    worst: float
    detail: str
    seconds: float


def target_of(device: str, implementation: str | None, operation: str) -> Target | None:
    """The implementation of an operation on a device: that of the name, else the core's own."""
    found = [t for t in targets(plugins(), device=find_device(device)) if t.operation == operation]
    if implementation is not None:
        return next((t for t in found if t.implementation == implementation), None)
    return next((t for t in found if t.implementation in ("shared", "numpy")), None)


class Runner:
    """Runs problems by number."""

    def __init__(self, problems: Problems, device: str, implementation: str | None) -> None:
        self._problems, self._kinds = problems, problems.kinds()
        self._targets = {k.operation: target_of(device, implementation, k.operation) for k in self._kinds}

    def __call__(self, i: int) -> Result:
        _, case = self._problems.draw(i, self._kinds)
        target = self._targets[case.operation]
        if target is None:
            return Result(i, "refused", 0.0, f"nothing computes {case.operation}", 0.0)
        outcome = run_case(case, target)
        worst = 0.0 if outcome.verdict is None else outcome.verdict.worst
        return Result(i, outcome.status, worst, outcome.detail, outcome.seconds)


def _work(problems: Problems, device: str, implementation: str | None, numbers: Any, results: Any) -> None:
    """A worker: until there are no more numbers, or the device is lost."""
    run = Runner(problems, device, implementation)
    while (i := numbers.get()) is not None:
        results.put((os.getpid(), i, None))
        found = run(i)
        results.put((os.getpid(), i, found))
        if found.status == "error" and not device.startswith("numpy"):
            break
    results.close()
    results.join_thread()


def parallel(
    problems: Problems, device: str, implementation: str | None, wanted: list[int], workers: int
) -> Iterator[Result]:
    """Results as they come. A worker that is gone is replaced; what it was at has failed."""
    context = multiprocessing.get_context("spawn")
    numbers, results = context.Queue(), context.Queue()
    for i in [*wanted, *[None] * workers]:
        numbers.put(i)
    arguments = (problems, device, implementation, numbers, results)
    team: list[Any] = []
    at: dict[int, int] = {}
    left = set(wanted)
    try:
        while left:
            try:
                worker, i, found = results.get(timeout=1)
            except queue.Empty:
                for dead in [p for p in team if not p.is_alive()]:
                    team.remove(dead)
                    if (i := at.pop(dead.pid, None)) in left:
                        left.discard(i)
                        yield Result(i, "error", 0.0, f"its process ended with {dead.exitcode}", 0.0)
                while len(team) < min(workers, len(left)):
                    team.append(context.Process(target=_work, args=arguments, daemon=True))
                    team[-1].start()
                continue
            at[worker] = i
            if found is not None:
                del at[worker]
                left.discard(i)
                yield found
    finally:
        for p in team:
            p.join(5)
            if p.is_alive():
                p.terminate()


def features(kind: Kind, case: Case) -> Iterator[str]:
    """What a problem is about, for the summary."""
    yield from kind.features
    forward = case.forward if isinstance(case, BackwardCase) else case
    if isinstance(forward, AttentionCase):
        flags = {
            "grouped heads": forward.kv_heads < forward.num_heads, "ramp": forward.ramp,
            "few queries": forward.S_q <= 8, "more than 300 keys": forward.S_k > 300,
            "extreme or climbing scores": forward.data != "normal",
            "repeated operands": bool(forward.k.broadcast or forward.v.broadcast),
        }
        yield from (name for name, there in flags.items() if there)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", metavar="BACKEND:INDEX")
    parser.add_argument("--implementation", help="by name; else the shared kernels, or the reference")
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--specs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this problem alone, with its case")
    parser.add_argument("--workers", type=int, help="processes; 0: none but this. [one a core]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here")
    arguments = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # of the workers, each of which has a core

    start = time.perf_counter()
    problems = Problems(arguments.seed, arguments.specs)
    kinds = problems.kinds()
    wanted = [arguments.only] if arguments.only is not None else list(range(arguments.problems))
    drawn = {i: problems.draw(i, kinds) for i in wanted}
    workers = ahead.cores() if arguments.workers is None else arguments.workers
    print(f"{len(wanted)} problems of {len({k for k, _ in drawn.values()})} specs, seed {arguments.seed}, "
          f"on {arguments.device}", flush=True)
    if arguments.only is not None:
        print(drawn[arguments.only][1])

    device = find_device(arguments.device)
    found = ahead.units([c for _, c in drawn.values()], device, arguments.implementation or "shared")
    wrong = ahead.compile_all(found, device, workers or 1) if found else []
    print(f"{len(found)} binaries after {time.perf_counter() - start:.0f} s", *wrong, sep="\n", flush=True)

    run = Runner(problems, arguments.device, arguments.implementation) if not workers else None
    came = (run(i) for i in wanted) if run else parallel(
        problems, arguments.device, arguments.implementation, wanted, min(workers, len(wanted))
    )
    results: list[Result] = []
    for r in came:
        results.append(r)
        if r.status in ("failed", "error"):
            last = r.detail.strip().splitlines()[-1] if r.status == "error" else r.detail
            print(f"{r.status} {r.number}: {last}\n    {drawn[r.number][1]}", flush=True)
        if len(results) % 200 == 0:
            print(f"{len(results)} done, {time.perf_counter() - start:.0f} s", flush=True)
    bad = report(results, drawn)
    print(f"{dict(Counter(r.status for r in results))} in {time.perf_counter() - start:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({
            "seed": arguments.seed, "specs": arguments.specs, "device": str(device), "name": device.name,
            "binaries": len(found), "not compiled": wrong, "seconds": time.perf_counter() - start,
            "results": [{**vars(r), "features": list(features(*drawn[r.number]))} for r in results],
        }), encoding="utf-8")
    return int(bad > 0 or bool(wrong) or not any(r.status == "passed" for r in results))


def report(results: list[Result], drawn: dict[int, tuple[Kind, Case]]) -> int:
    """Print a line a feature; how many failed."""
    groups: dict[str, list[Result]] = {}
    for r in results:
        for f in ("all", *features(*drawn[r.number])):
            groups.setdefault(f, []).append(r)
    print(f"{'':28}{'problems':>9}{'refused':>9}{'failed':>8}{'worst error/tolerance':>23}  of problem")
    for name in ("all", *sorted(set(groups) - {"all"})):
        group = groups.get(name, [])
        count = Counter(r.status for r in group)
        worst = max(group, key=lambda r: r.worst, default=None)
        bad, top = count["failed"] + count["error"], "" if worst is None else f"{worst.worst:23.3f}  {worst.number}"
        print(f"{name:28}{len(group):9}{count['refused']:9}{bad:8}{top}")
    for (why, n) in Counter(r.detail for r in results if r.status == "refused").items():
        print(f"refused {n}: {why}")
    return sum(r.status in ("failed", "error") for r in results)


if __name__ == "__main__":
    sys.exit(main())
