"""Bugs planted in NVIDIA's device sources, each run on a GPU until a parity case shows it.

    python -m benchmarks.platform_mutants --device cuda:0 --report docs/parity/h200-mutants.md
    python -m benchmarks.platform_mutants --place sm90/ --seconds 120
    python -m benchmarks.platform_mutants --compile-only --arch sm_90a

The bugs are in tests/gpu/mutants/*.txt, with the case that each is tried on first; then come
the other bugs' cases, then those of fast_cases.py there with their bits over REPEATS launches on
two streams, for kernels of one arch; then the first case of every spec of a covering choice. Every
bug is compiled and run by a process of its own, so that none can harm another: ``--workers`` of
them at once. What a case needs is compiled before its time counts: a process in which a case then
takes longer than ``--hang`` seconds ends itself, which ends its kernel. The sources as they are
pass all of those first cases, or no result counts; and again after a process
has hung. ``--compile-only`` needs no GPU: it compiles each bug's first case. ``--seconds`` is for
all. Exit status 1 where a bug was not seen (but those that may go
unseen, which say why), did not compile or was not tried. A bug that a test finds without a GPU,
which the report then names, may go unseen.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernelseam.contract import Device
from kernelseam.dispatch import find_device
from kernelseam.parity.running.workers import cores
from kernelseam.plugins import plugins

from benchmarks import mutant_hunt
from benchmarks.mutant_hunt import CONTROL, FEW, Seen

if TYPE_CHECKING:
    from mutant import Mutant

HUNG = "Timeout ("
"""How the watchdog's last words begin."""


def ask(
    name: str,
    device: Device,
    cache: str,
    end: float,
    hang: float = 10.0,
    chosen: Iterable[str] = (),
) -> Seen:
    """``hunt`` in a process of its own."""
    left = end - time.monotonic()
    if left <= 0:
        return Seen(name, 0, trouble="there was no time to try it")
    line = [
        sys.executable,
        "-m",
        "benchmarks.platform_mutants",
        "--child",
        name,
        "--device",
        f"{device.backend}:{device.index}",
    ]
    line += ["--hang", str(hang), *(x for other in chosen for x in ("--only", other))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KERNELSEAM_CACHE_DIR": f"{cache}/{name}",
    }
    # the cores are the others'
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            [*line, "--seconds", str(0.9 * left)],
            capture_output=True,
            text=True,
            timeout=left,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Seen(name, 0, trouble=f"no answer within {left:.0f} s")
    lines = done.stdout.strip().splitlines()
    if not lines or (done.returncode and HUNG not in done.stderr):
        return Seen(
            name, 0, trouble=f"its process ended with {done.returncode}: {done.stderr[-300:]}"
        )
    return Seen(**json.loads(lines[-1]))


def page(results: Iterable[Seen], device: Device, command: str) -> str:
    """What became of every bug, as a table."""
    toolchain, seen = plugins().backend(device.backend).toolchain, {s.name: s for s in results}
    assert toolchain is not None
    control, bugs = seen[CONTROL], [s for s in seen.values() if s.name != CONTROL]
    names = {s.name for s in bugs}
    first = mutant_hunt.first_cases([m for m in mutant_hunt.MUTANTS if m.name in names])
    lines = [
        "# Bugs planted in NVIDIA's device sources",
        "",
        f"{sum(s.as_it_should for s in bugs)} of {len(bugs)} were seen by a parity case. The "
        "sources as they are "
        f"passed {control.passed} of {len(first)} cases, each of which a bug names as the first "
        "that it is tried on" + (f"; {_why(control)}." if not control.as_it_should else "."),
        "",
        f"* device: {device}, {device.name}, {toolchain.compiler()}",
        f"* command: `{command}`",
        "",
        "| bug | what is wrong | the case that showed it | its message | passed before |",
        "|---|---|---|---|---|",
    ]
    what = {m.name: m.what for m in mutant_hunt.MUTANTS}
    lines += [
        f"| {s.name} | {what[s.name]} | {s.case or '–'} | "
        f"{_cell(s.finding if s.case else _why(s))} | {s.passed} |"
        for s in bugs
    ]
    return "\n".join(lines) + "\n"


def _why(seen: Seen) -> str:
    unseen = seen.finding or "no case showed it"
    if seen.may_pass:
        unseen += f", which may be: {mutant_hunt.LUCK[seen.name]}"
    return seen.trouble or (f"{seen.case}: {seen.finding}" if seen.case else unseen)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", metavar="BACKEND:INDEX")
    parser.add_argument(
        "--only",
        action="append",
        choices=[m.name for m in mutant_hunt.MUTANTS],
        help="may be repeated",
    )
    parser.add_argument(
        "--place", default="", metavar="START", help="only bugs in files whose names start so"
    )
    parser.add_argument(
        "--hang",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="of a case, compiled ahead. [10]",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="for all. [120]")
    parser.add_argument(
        "--workers", type=int, default=max(cores() - 1, 1), help="processes. [one a core, but one]"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="a page in markdown")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile each bug's first case, and run nothing"
    )
    parser.add_argument("--arch", default="sm_90a", help="for --compile-only. [sm_90a]")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    end = start + arguments.seconds
    chosen = [
        m
        for m in mutant_hunt.MUTANTS
        if m.name in (arguments.only or [x.name for x in mutant_hunt.MUTANTS])
        and m.place.startswith(arguments.place)
    ]

    if arguments.compile_only:
        wrong = [
            w
            for m in chosen
            if (w := mutant_hunt.compiled(m, arguments.arch, arguments.device.partition(":")[0]))
        ]
        print(
            f"{len(chosen) - len(wrong)} of {len(chosen)} compile for {arguments.arch}",
            *wrong,
            sep="\n",
        )
        return int(any(w.partition(":")[0] not in mutant_hunt.LUCK for w in wrong))
    device = find_device(arguments.device)
    if arguments.child:
        mutant = mutant_hunt.mutant_named(arguments.child)
        mutant_hunt.plant(mutant, device.backend)
        print(
            json.dumps(
                asdict(mutant_hunt.hunt(mutant, device, end, arguments.hang, chosen, _print))
            ),
            flush=True,
        )
        os._exit(0)  # a context that a bug has lost would fail once more where it cleans up

    results: list[Seen] = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(arguments.workers) as pool:

        def one(name: str, chosen: Sequence[str] = ()) -> Seen:
            return _printed(name, device, cache, end, arguments.hang, chosen)

        controls = [pool.submit(one, CONTROL, chosen=names) for names in _shares(chosen)]
        results += pool.map(one, [m.name for m in chosen])
        results.insert(0, _together([c.result() for c in controls]))
        if hung := [s.name for s in results if "does not come back" in s.finding]:
            names = _shares(chosen)[0]
            again = _printed(CONTROL, device, cache, end, arguments.hang, names)
            print(f"after {', '.join(hung)} had hung: {_cell(_why(again))}")
            if not again.as_it_should:
                results[0] = again
    if arguments.report:
        command = (
            "python -m benchmarks.platform_mutants "
            f"{' '.join(argv if argv is not None else sys.argv[1:])}"
        )
        arguments.report.write_text(page(results, device, command), encoding="utf-8")
    good, lucky = (
        sum(s.as_it_should for s in results if s.name != CONTROL),
        sum(s.may_pass for s in results),
    )
    left = f", {lucky} may go unseen" * (lucky > 0)
    print(f"{good} of {len(chosen)} bugs were seen{left}, in {time.monotonic() - start:.0f} s")
    return int(not all(s.as_it_should or s.may_pass for s in results))


def _shares(chosen: Iterable[Mutant]) -> list[list[str]]:
    """Bugs that name all first cases between them, FEW a share."""
    first = list({(m.implementation, m.case): m.name for m in reversed(list(chosen))}.values())
    return [first[i : i + FEW] for i in range(0, len(first), FEW)]


def _together(controls: Iterable[Seen]) -> Seen:
    """One answer of several processes'."""
    seen = list(controls)
    wrong = next((s for s in seen if not s.as_it_should), Seen(CONTROL, 0))
    return replace(wrong, passed=sum(s.passed for s in seen))


def _print(seen: Seen) -> None:
    print(json.dumps(asdict(seen)), flush=True)


def _printed(
    name: str, device: Device, cache: str, end: float, hang: float, chosen: Iterable[str]
) -> Seen:
    seen = ask(name, device, cache, end, hang, chosen)
    how = (
        "as it should"
        if seen.as_it_should
        else "as it may"
        if seen.may_pass
        else "NOT AS IT SHOULD"
    )
    print(f"{how}: {name}: {_cell(_why(seen))}", flush=True)
    return seen


if __name__ == "__main__":
    sys.exit(main())
