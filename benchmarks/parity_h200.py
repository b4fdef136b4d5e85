"""The parity matrix on a GPU: all binaries compiled in parallel, then every case, then a report.

    python -m benchmarks.parity_h200 --report docs/parity/h200.md --report docs/parity/h200.html
    compute-sanitizer --tool memcheck python -m benchmarks.parity_h200 --separate --covering
    --implementation shared

The first compiles, and hands over to ``kernelseam parity``; ``--workers`` processes make data and
judge results, while this one alone uses the GPU. ``--operation`` and ``--filter`` split it, where
time is short.

``--separate`` runs the cases itself, for checkers: each operand is an allocation of its own that
ends with its last element, taken from the driver and not from a pool, so that every access past an
end is seen. It has no workers, and compiles nothing ahead, since a checker would slow that down:
run it with ``--compile-only`` and the same cases first. ``--covering`` takes the first case of
every spec of a choice that has every value of every option with each dtype. ``--many-tiles``, with
``--separate``, takes those of tests/gpu/helpers/fast_cases.py instead of the matrix's: for kernels
whose blocks stay, of which each then meets several tiles. Exit status 1 where a case failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from kernelseam.cli.main import main as kernelseam
from kernelseam.contract import Device
from kernelseam.dispatch import find_device
from kernelseam.errors import DeviceError
from kernelseam.parity.matrix import matrix
from kernelseam.parity.report import summary
from kernelseam.parity.running.pipeline import LIMIT, run_all
from kernelseam.parity.running.run import Outcome, targets
from kernelseam.parity.running.workers import cores
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case

from benchmarks import precompile

OPERATIONS = tuple(dict.fromkeys(c.operation for c in matrix()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", metavar="BACKEND:INDEX")
    parser.add_argument(
        "--filter", default="", metavar="PART[,PART…]", help="only cases whose name contains a part"
    )
    parser.add_argument(
        "--operation", action="append", choices=OPERATIONS, help="only this one; may be given again"
    )
    parser.add_argument("--implementation", help="only this one")
    parser.add_argument(
        "--covering", action="store_true", help="only a choice that covers all specs"
    )
    parser.add_argument(
        "--many-tiles", action="store_true", help="with --separate: other cases, of many tiles"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="compile into the cache, and run nothing"
    )
    parser.add_argument(
        "--separate", action="store_true", help="an allocation an operand, for memory checkers"
    )
    parser.add_argument(
        "--report",
        action="append",
        default=[],
        metavar="FILE",
        help=".md or .html; may be repeated",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="with --separate: name each case before it runs"
    )
    parser.add_argument(
        "--workers", type=int, default=max(cores() - 1, 1), help="processes. [one a core, but one]"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help="of a case's stage. [300]"
    )
    arguments = parser.parse_args(argv)

    start = time.perf_counter()
    device = find_device(arguments.device)
    if arguments.many_tiles and not (arguments.separate or arguments.compile_only):
        parser.error("--many-tiles is for --separate, or to compile for it")
    known = many_tiles(arguments.filter) if arguments.many_tiles else matrix(arguments.filter)
    cases = [c for c in known if c.operation in (arguments.operation or OPERATIONS)]
    if arguments.covering:
        cases = precompile.choice(cases, device)
    if arguments.separate and not arguments.compile_only:
        return separate(cases, device, arguments.implementation, arguments.verbose)
    units = precompile.units(cases, device, arguments.implementation)
    wrong = precompile.compile_all(units, device) if units else []
    seconds = time.perf_counter() - start
    print(
        f"{len(cases)} cases, {len(units)} binaries in {seconds:.0f} s",
        *wrong,
        sep="\n",
        flush=True,
    )
    if arguments.compile_only:
        return int(bool(wrong))
    options = {
        "--report": arguments.report,
        "--implementation": [arguments.implementation or ""],
        "--workers": [str(arguments.workers)],
        "--limit": [str(arguments.limit)],
    }
    if len(cases) < len(matrix()):
        options["--case"] = [c.name for c in cases]
    chosen = [x for name, values in options.items() for v in values if v for x in (name, v)]
    try:
        kernelseam(["parity", "--device", arguments.device, *chosen])
    finally:
        print(f"all in {time.perf_counter() - start:.0f} s")


def many_tiles(pattern: str) -> list[Case]:
    """The cases of tests/gpu/helpers/fast_cases.py, chosen as ``matrix`` chooses."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "gpu" / "helpers"))
    from fast_cases import CASES

    parts = [p.strip() for p in pattern.split(",") if p.strip()]
    return [c for c in CASES.values() if not parts or any(p in c.name for p in parts)]


def separate(cases: list[Case], device: Device, implementation: str | None, verbose: bool) -> int:
    """Run cases with every operand in an allocation of its own."""
    without_pools()
    wanted = [
        t for t in targets(plugins(), device=device) if implementation in (None, t.implementation)
    ]
    print(f"{device}: {device.name}", f"{len(cases)} cases", sep="\n", flush=True)
    start, outcomes = time.perf_counter(), list[Outcome]()
    try:
        for case in cases:
            if verbose:
                print(case.name, flush=True)
            for outcome in run_all([case], wanted, separate=True):
                outcomes.append(outcome)
                if outcome.status in summary.FAILED:
                    print(
                        f"{outcome.status}: {case.name} on {outcome.implementation}: "
                        f"{outcome.detail}",
                        flush=True,
                    )
    except DeviceError as e:
        print(e)
    print(summary.table(summary.rows(outcomes)))
    count = Counter(o.status for o in outcomes)
    print(f"{dict(count)} in {time.perf_counter() - start:.0f} s")
    return int(count["failed"] + count["error"] > 0 or not outcomes)


def without_pools() -> None:
    """Let every allocation be one of the driver's."""
    try:
        import cupy
    except ImportError:
        return
    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)


if __name__ == "__main__":
    sys.exit(main())
