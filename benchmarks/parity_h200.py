"""The parity matrix on every backend that has a device here: a table, and a report in Markdown.

    python benchmarks/parity_h200.py --output parity.md
    compute-sanitizer --tool memcheck python benchmarks/parity_h200.py --separate --filter f16-64,f16-nt

``--separate`` gives each operand an allocation of its own that ends with its last element, taken from the driver and
not from a pool: so a memory checker sees every access past an end. Run once without it first, so that all binaries are
in the cache. Exit status 1 where a case failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from kernelseam.parity import report
from kernelseam.parity.cases import matrix
from kernelseam.parity.markdown import markdown
from kernelseam.parity.run import Outcome, run_all, targets
from kernelseam.plugins import plugins


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", metavar="PART[,PART…]", help="only cases whose name contains a part")
    parser.add_argument("--operation", choices=("attention", "gemm"))
    parser.add_argument("--backend", help="only this one")
    parser.add_argument("--implementation", help="only this one")
    parser.add_argument("--separate", action="store_true", help="an allocation an operand, for memory checkers")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="write the report here")
    parser.add_argument("--verbose", action="store_true", help="name each case before it runs")
    arguments = parser.parse_args()

    found = plugins()
    for failure in found.failures:
        print(f"kept out: {failure.plugin} at {failure.stage}: {failure.message}")
    devices = [f"{d}: {d.name}" for d in found.devices()]
    wanted = [
        t for t in targets(found, arguments.backend) if arguments.implementation in (None, t.implementation)
    ]
    cases = matrix(arguments.filter, arguments.operation)
    if arguments.separate:
        without_pools()
    print(*devices, *(f"{t} ({t.operation})" for t in wanted), f"{len(cases)} cases", sep="\n", flush=True)

    start, outcomes = time.perf_counter(), list[Outcome]()
    for case in cases:
        if arguments.verbose:
            print(case.name, flush=True)
        for outcome in run_all([case], wanted, separate=arguments.separate):
            outcomes.append(outcome)
            if outcome.status in ("failed", "error"):
                where = f"{outcome.backend} {outcome.implementation}"
                print(f"{outcome.status}: {case.name} on {where}: {outcome.detail}", flush=True)
    print(report.table(report.rows(outcomes)))
    for operation, who, why, n in report.refusals(outcomes):
        print(f"refused by {who}, {n} case(s) of {operation}: {why}")
    count = Counter(o.status for o in outcomes)
    print(f"{dict(count)} in {time.perf_counter() - start:.0f} s")
    if arguments.output:
        made = report.Report(outcomes, wanted, report.facts(found, wanted), "", report.not_covered(cases, wanted))
        arguments.output.write_text(markdown(made), encoding="utf-8")
    return 1 if count["failed"] + count["error"] or not outcomes else 0


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
