"""Bugs planted in NVIDIA's platform header, each run on a GPU until a parity case shows it.

    python benchmarks/platform_mutants.py --device cuda:0 --report docs/parity/h200-mutants.md
    python benchmarks/platform_mutants.py --compile-only --arch sm_90a

The bugs are in tests/gpu/nvidia_mutants.py, with the case that each is tried on first; then come the other bugs' cases,
then the first case of every spec of a covering choice. Every bug is compiled and run by a process of its own, so that
none can harm another: ``--workers`` of them at once. The header as it is passes all of those first cases, or nothing
that is said of the bugs counts. ``--compile-only`` needs no GPU: it compiles each bug's first case. ``--seconds`` is
for all. Exit status 1 where a bug was not seen, did not compile or was not tried.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ahead

from kernelseam.contract import Device, DeviceLimits
from kernelseam.dispatch import find_device
from kernelseam.errors import CompileError
from kernelseam.kernels.kernel import bundle
from kernelseam.parity import report
from kernelseam.parity.cases import Case, matrix, named
from kernelseam.parity.run import Target, run_case
from kernelseam.parity.workers import cores
from kernelseam.plugins import plugins

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "host"), str(TESTS / "gpu")]

from mutant import Mutant  # noqa: E402
from nvidia_mutants import MUTANTS  # noqa: E402

CONTROL = "none"
"""The name of the header as it is, among the bugs."""
UNITS = 132
"""Multiprocessors of the GPU that is compiled for where there is none: on them depends how a problem is divided."""


@dataclass(frozen=True)
class Seen:
    """What became of a bug: the case that showed it and how, or why none did."""

    name: str
    passed: int
    """Cases that did not show it."""
    case: str = ""
    said: str = ""
    trouble: str = ""
    """Why it counts for nothing."""

    @property
    def as_it_should(self) -> bool:
        """Whether a bug was seen, or the header as it is passed everything."""
        return not self.trouble and bool(self.case) == (self.name != CONTROL)


def first_cases() -> list[str]:
    """Every case that a bug names, once."""
    return list(dict.fromkeys(m.case for m in MUTANTS))


def mutant_named(name: str) -> Mutant | None:
    """None: the header as it is."""
    return None if name == CONTROL else {m.name: m for m in MUTANTS}[name]


def plant(mutant: Mutant | None, backend: str) -> None:
    """From now on this process compiles the platform with the bug."""
    toolchain = plugins().backend(backend).toolchain
    assert toolchain is not None
    files = dict(type(toolchain).platform_files(toolchain, toolchain.archs[0]))  # not what was planted before
    changed = files if mutant is None else mutant.planted(files)

    def platform_files(arch: str) -> Mapping[str, str]:
        return changed

    toolchain.platform_files = platform_files  # type: ignore[method-assign]


# ---------------------------------------------------------------- a process


def cases_of(mutant: Mutant | None, device: Device) -> Iterator[Case]:
    """The cases that a bug is tried on, the likeliest first."""
    names = first_cases()
    if mutant is not None:
        names = list(dict.fromkeys([mutant.case, *names]))
    yield from map(named, names)
    if mutant is not None:
        yield from (c for c in ahead.choice(matrix(), device) if c.name not in names)


def hunt(mutant: Mutant | None, device: Device, end: float) -> Seen:
    """Run case after case until one shows the bug, or until ``end`` on the monotonic clock."""
    name, passed = mutant.name if mutant else CONTROL, 0
    for case in cases_of(mutant, device):
        if time.monotonic() > end:
            return Seen(name, passed, trouble="there was no time for the other cases")
        o = run_case(case, Target(device, "shared", case.operation, own=True))
        if o.error and f"{CompileError.__name__}: " in o.error:
            log = o.error.partition(f"{CompileError.__name__}: ")[2]
            return Seen(name, passed, trouble=f"it does not compile: {log}")
        if o.status in report.BAD:
            return Seen(name, passed, case.name, o.detail.strip().splitlines()[-1])
        passed += o.status == "passed"
    return Seen(name, passed)


# ---------------------------------------------------------------- this process


def ask(name: str, device: Device, cache: str, end: float) -> Seen:
    """``hunt`` in a process of its own."""
    left = end - time.monotonic()
    if left <= 0:
        return Seen(name, 0, trouble="there was no time to try it")
    line = [sys.executable, __file__, "--child", name, "--device", f"{device.backend}:{device.index}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KERNELSEAM_CACHE_DIR": f"{cache}/{name}"}
    try:
        done = subprocess.run(
            [*line, "--seconds", str(0.9 * left)], capture_output=True, text=True, timeout=left, env=environment
        )
    except subprocess.TimeoutExpired:
        return Seen(name, 0, trouble=f"no answer within {left:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return Seen(name, 0, trouble=f"its process ended with {done.returncode}: {done.stderr[-300:]}")
    return Seen(**json.loads(lines[-1]))


def compiled(mutant: Mutant, arch: str, backend: str) -> str:
    """Whether the kernels of a bug's first case compile to other binaries with it: "" or why not. Needs no GPU."""
    toolchain = plugins().backend(backend).toolchain
    assert toolchain is not None
    limits = DeviceLimits(UNITS, toolchain.arch_row(arch).shared_bytes_per_block, 1 << 36)
    found = ahead.units([named(mutant.case)], Device(backend, 0, arch, limits=limits), "shared")
    binaries = []
    try:
        for change in (mutant, None):
            plant(change, backend)
            # Not from the cache: there a binary has its key, which is of the sources' texts.
            made = [bundle(half, spec, tile, toolchain, arch) for half, spec, tile in found]
            binaries.append([toolchain.compile(b, arch) for b in made])
    except CompileError as e:
        return f"{mutant.name}: {e}"
    return f"{mutant.name}: it changes nothing in {mutant.case}" if binaries[0] == binaries[1] else ""


def page(found: Iterable[Seen], device: Device, command: str) -> str:
    """What became of every bug, as a table."""
    toolchain, seen = plugins().backend(device.backend).toolchain, {s.name: s for s in found}
    assert toolchain is not None
    control, bugs = seen[CONTROL], [s for s in seen.values() if s.name != CONTROL]
    lines = [
        "# Bugs planted in NVIDIA's platform header", "",
        f"{sum(s.as_it_should for s in bugs)} of {len(bugs)} were seen by a parity case. The header as it is passed "
        f"{control.passed} of {len(first_cases())} cases, each of which a bug names as the first that it is tried on"
        + (f"; {_why(control)}." if not control.as_it_should else "."), "",
        f"* device: {device}, {device.name}, {toolchain.compiler()}", f"* command: `{command}`", "",
        "| bug | what is wrong | the case that showed it | what that said | passed before |", "|---|---|---|---|---|",
    ]
    what = {m.name: m.what for m in MUTANTS}
    lines += [
        f"| {s.name} | {what[s.name]} | {s.case or '–'} | {_cell(s.said or _why(s))} | {s.passed} |" for s in bugs
    ]
    return "\n".join(lines) + "\n"


def _why(seen: Seen) -> str:
    return seen.trouble or (f"{seen.case}: {seen.said}" if seen.case else "no case showed it")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", metavar="BACKEND:INDEX")
    parser.add_argument("--only", action="append", choices=[m.name for m in MUTANTS], help="may be repeated")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all. [120]")
    parser.add_argument("--workers", type=int, default=max(cores() - 1, 1), help="processes. [one a core, but one]")
    parser.add_argument("--report", type=Path, metavar="FILE", help="a page in markdown")
    parser.add_argument("--compile-only", action="store_true", help="compile each bug's first case, and run nothing")
    parser.add_argument("--arch", default="sm_90a", help="for --compile-only. [sm_90a]")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    start = time.monotonic()
    end = start + arguments.seconds
    chosen = [m for m in MUTANTS if m.name in (arguments.only or [x.name for x in MUTANTS])]

    if arguments.compile_only:
        wrong = [w for m in chosen if (w := compiled(m, arguments.arch, arguments.device.partition(":")[0]))]
        print(f"{len(chosen) - len(wrong)} of {len(chosen)} compile for {arguments.arch}", *wrong, sep="\n")
        return int(bool(wrong))
    device = find_device(arguments.device)
    if arguments.child:
        mutant = mutant_named(arguments.child)
        plant(mutant, device.backend)
        print(json.dumps(asdict(hunt(mutant, device, end))), flush=True)
        os._exit(0)  # a context that a bug has lost would fail once more where it cleans up

    found: list[Seen] = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(arguments.workers) as pool:
        one = partial(_told, device=device, cache=cache, end=end)
        found += pool.map(one, [CONTROL, *(m.name for m in chosen)])
    if arguments.report:
        command = f"python benchmarks/platform_mutants.py {' '.join(given if given is not None else sys.argv[1:])}"
        arguments.report.write_text(page(found, device, command), encoding="utf-8")
    good = sum(s.as_it_should for s in found if s.name != CONTROL)
    print(f"{good} of {len(chosen)} bugs were seen, in {time.monotonic() - start:.0f} s")
    return int(not all(s.as_it_should for s in found))


def _told(name: str, **options: Any) -> Seen:
    seen = ask(name, **options)
    print(f"{'as it should' if seen.as_it_should else 'NOT AS IT SHOULD'}: {name}: {_cell(_why(seen))}", flush=True)
    return seen


if __name__ == "__main__":
    sys.exit(main())
