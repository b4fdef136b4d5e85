"""Bugs planted in NVIDIA's device sources, each run on a GPU until a parity case shows it.

    python -m benchmarks.platform_mutants --device cuda:0 --report docs/parity/h200-mutants.md
    python -m benchmarks.platform_mutants --place sm90/ --seconds 120
    python -m benchmarks.platform_mutants --compile-only --arch sm_90a

The bugs are in tests/gpu/helpers/*_mutants.py, with the case that each is tried on first; then come
the other bugs' cases, then those of fast_cases.py there with their bits over REPEATS launches on
two streams, for kernels of one arch; then the first case of every spec of a covering choice. Every
bug is compiled and run by a process of its own, so that none can harm another: ``--workers`` of
them at once. What a case needs is compiled before its time counts: a process in which a case then
takes longer than ``--hang`` seconds ends itself, which ends its kernel. The sources as they are
pass all of those first cases, or nothing that is said of the bugs counts; and again after a process
has hung. ``--compile-only`` needs no GPU: it compiles each bug's first case. ``--seconds`` is for
all. Exit status 1 where a bug was not seen (but those that may go unseen, which say why), did not
compile or was not tried.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kernelseam.contract import Device, DeviceLimits
from kernelseam.dispatch import find_device
from kernelseam.errors import CompileError, DeviceError, SlowBinary, Unsupported
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.kernel import build, bundle
from kernelseam.parity.cases.case import Case
from kernelseam.parity.matrix import matrix, named
from kernelseam.parity.report import summary
from kernelseam.parity.running.run import Target, run_case
from kernelseam.parity.running.workers import cores
from kernelseam.plugins import plugins

from benchmarks import precompile

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "host" / "helpers"), str(TESTS / "gpu" / "helpers")]

import fast_cases  # noqa: E402
import nvidia_mutants  # noqa: E402
import sm90_mutants  # noqa: E402
from mutant import Mutant  # noqa: E402

MUTANTS = (*nvidia_mutants.MUTANTS, *sm90_mutants.MUTANTS)
LUCK = sm90_mutants.LUCK

CONTROL = "none"
"""The name of the sources as they are, among the bugs."""
REPEATS = 60
"""Launches whose bits are compared, on each of two streams."""
FEW = 6
"""Cases for a bug that may go unseen, and for the sources as they are in one process."""
HUNG = "Timeout ("
"""How the watchdog's last words begin."""
UNITS = 132
"""Multiprocessors of the GPU that is compiled for where there is none: on them depends how a
problem is divided."""


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
        """Whether a bug was seen, or the sources as they are passed everything."""
        return not self.trouble and bool(self.case) == (self.name != CONTROL)

    @property
    def may_pass(self) -> bool:
        """Whether it is a bug that a GPU need not show, and passed all there was."""
        return self.name in LUCK and not (self.trouble or self.case)


def case_named(name: str) -> Case:
    """A case of the matrix or of fast_cases.py; raises KeyError."""
    return fast_cases.CASES.get(name) or named(name)


Tried = tuple[str, Case]
"""An implementation and a case."""


def first_cases(chosen: Iterable[Mutant] | None = None) -> list[Tried]:
    """What the bugs name, once each."""
    pairs = dict.fromkeys(
        (m.implementation, m.case) for m in (MUTANTS if chosen is None else chosen)
    )
    return [(implementation, case_named(case)) for implementation, case in pairs]


def mutant_named(name: str) -> Mutant | None:
    """None: the header as it is."""
    return None if name == CONTROL else {m.name: m for m in MUTANTS}[name]


def plant(mutant: Mutant | None, backend: str) -> None:
    """From now on this process compiles the backend's device sources with the bug."""
    registered = plugins().backend(backend)
    toolchain = registered.toolchain
    assert toolchain is not None
    # not what was planted before
    files = dict(type(toolchain).platform_files(toolchain, toolchain.archs[0]))
    changed = files if mutant is None else mutant.planted(files)

    def platform_files(arch: str) -> Mapping[str, str]:
        return changed

    toolchain.platform_files = platform_files  # type: ignore[method-assign]
    for definition in _with_sources(KernelDefinition):
        original = _ORIGINALS.setdefault(definition, definition.__dict__["sources"])

        def sources(self: Any, original: Any = original) -> Mapping[str, str]:
            return {name: changed.get(name, text) for name, text in original(self).items()}

        definition.sources = sources


_ORIGINALS: dict[Any, Any] = {}
"""Kernel definitions' own ``sources``, as they were before the first bug."""


def _with_sources(definition: Any) -> Iterator[Any]:
    """The classes with a ``sources`` of their own: definitions of kernels that only others launch
    (the backward's rows and sums) are not among a backend's kernels."""
    if "sources" in definition.__dict__:
        yield definition
    for below in definition.__subclasses__():
        yield from _with_sources(below)


# ---------------------------------------------------------------- a process


def cases_of(
    mutant: Mutant | None, device: Device, chosen: Iterable[Mutant] | None = None
) -> Iterator[Tried]:
    """What a bug is tried on, the likeliest first; what the sources as they are have to pass."""
    if mutant is None:
        yield from first_cases(chosen)
        return
    mine, own = mutant.implementation, case_named(mutant.case)
    names = [own.name]
    yield mine, own
    for implementation, case in first_cases():
        if implementation == mine and case.name not in names and case.operation == own.operation:
            names.append(case.name)
            yield mine, case
        if mutant.name in LUCK and len(names) == FEW:
            return
    for case in precompile.choice(matrix(), device):
        if case.name not in names:
            yield mine, case


def hunt(
    mutant: Mutant | None,
    device: Device,
    end: float,
    hang: float = 0.0,
    chosen: Iterable[Mutant] | None = None,
    tell: Callable[[Seen], None] = lambda seen: None,
) -> Seen:
    """Run case after case until one shows the bug, or until ``end`` on the monotonic clock.

    Before each, ``tell`` what became of the bug if the process ends there: with ``hang``, that many
    seconds later.
    """
    name, passed = mutant.name if mutant else CONTROL, 0
    if (
        mutant is not None
        and name in LUCK
        and "changes nothing" in compiled(mutant, device.arch, device.backend)
    ):
        return Seen(name, 0)
    for implementation, case in cases_of(mutant, device, chosen):
        if time.monotonic() > end:
            return Seen(name, passed, trouble="there was no time for the other cases")
        steps = [partial(_verdict, case, device, implementation)]
        if case.name in fast_cases.CASES and device.backend == "cuda":
            steps.append(partial(_repeats, case, device, implementation))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowBinary)
            if trouble := _compiled_ahead(case, device, implementation):
                return Seen(name, passed, trouble=f"it does not compile: {trouble}")
            for step in steps:
                tell(Seen(name, passed, case.name, f"it does not come back within {hang:g} s"))
                if hang:
                    # needs no lock that a hung call may hold
                    faulthandler.dump_traceback_later(hang, exit=True)
                try:
                    said = step()
                finally:
                    faulthandler.cancel_dump_traceback_later()
                if said:
                    return Seen(name, passed, case.name, said)
        passed += said is not None
    return Seen(name, passed)


def _compiled_ahead(case: Case, device: Device, implementation: str) -> str:
    """Compile what the case launches into the cache: "" or why it does not."""
    toolchain = plugins().backend(device.backend).toolchain
    assert toolchain is not None
    try:
        for kernel, spec, tile in precompile.units([case], device, implementation):
            build(kernel, spec, tile, toolchain, device.arch)
    except CompileError as e:
        return e.log
    return ""


def _verdict(case: Case, device: Device, implementation: str) -> str | None:
    """What shows a bug; "" for nothing, None for a case that is refused."""
    o = run_case(
        case, Target(device, implementation, case.operation, builtin=implementation == "shared")
    )
    if o.status in summary.FAILED:
        return o.detail.strip().splitlines()[-1]
    return "" if o.status == "passed" else None


def _repeats(case: Case, device: Device, implementation: str) -> str | None:
    """The same of the bits of many launches."""
    from bound_case import unlike

    try:
        unlike_first = unlike(case, device, implementation, REPEATS)
    except Unsupported:
        return None
    except Exception as e:
        # Launch failures are raised by our driver calls, or by CuPy's; any other error is this
        # script's.
        if not isinstance(e, DeviceError) and type(e).__name__ != "CUDARuntimeError":
            raise
        return f"{type(e).__name__}: {e}"
    return (
        f"{unlike_first} of {2 * REPEATS} launches over the same inputs have other bits than the "
        "first" * (unlike_first > 0)
    )


# ---------------------------------------------------------------- this process


def ask(
    name: str,
    device: Device,
    cache: str,
    end: float,
    hang: float = 15.0,
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


def compiled(mutant: Mutant, arch: str, backend: str) -> str:
    """Whether the kernels of a bug's first case compile to other binaries with it: "" or why not.
    Needs no GPU."""
    toolchain = plugins().backend(backend).toolchain
    assert toolchain is not None
    limits = DeviceLimits(UNITS, toolchain.arch_row(arch).shared_bytes_per_block, 1 << 36)
    units = precompile.units(
        [case_named(mutant.case)], Device(backend, 0, arch, limits=limits), mutant.implementation
    )
    binaries = []
    try:
        for change in (None, mutant):
            plant(change, backend)
            # Not from the cache: there a binary has its key, which is of the sources' texts.
            bundles = [bundle(kernel, spec, tile, toolchain, arch) for kernel, spec, tile in units]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SlowBinary)
                binaries.append([toolchain.compile(b, arch) for b in bundles])
    except CompileError as e:
        return f"{mutant.name}: {e}"
    return (
        f"{mutant.name}: it changes nothing in {mutant.case}" if binaries[0] == binaries[1] else ""
    )


def page(results: Iterable[Seen], device: Device, command: str) -> str:
    """What became of every bug, as a table."""
    toolchain, seen = plugins().backend(device.backend).toolchain, {s.name: s for s in results}
    assert toolchain is not None
    control, bugs = seen[CONTROL], [s for s in seen.values() if s.name != CONTROL]
    names = {s.name for s in bugs}
    first = first_cases([m for m in MUTANTS if m.name in names])
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
        "| bug | what is wrong | the case that showed it | what that said | passed before |",
        "|---|---|---|---|---|",
    ]
    what = {m.name: m.what for m in MUTANTS}
    lines += [
        f"| {s.name} | {what[s.name]} | {s.case or '–'} | {_cell(s.said or _why(s))} | {s.passed} |"
        for s in bugs
    ]
    return "\n".join(lines) + "\n"


def _why(seen: Seen) -> str:
    unseen = (
        f"no case showed it, which may be: {LUCK[seen.name]}"
        if seen.may_pass
        else "no case showed it"
    )
    return seen.trouble or (f"{seen.case}: {seen.said}" if seen.case else unseen)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", metavar="BACKEND:INDEX")
    parser.add_argument(
        "--only", action="append", choices=[m.name for m in MUTANTS], help="may be repeated"
    )
    parser.add_argument(
        "--place", default="", metavar="START", help="only bugs in files whose names start so"
    )
    parser.add_argument(
        "--hang",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="of a case, compiled ahead. [15]",
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
        for m in MUTANTS
        if m.name in (arguments.only or [x.name for x in MUTANTS])
        and m.place.startswith(arguments.place)
    ]

    if arguments.compile_only:
        wrong = [
            w
            for m in chosen
            if (w := compiled(m, arguments.arch, arguments.device.partition(":")[0]))
        ]
        print(
            f"{len(chosen) - len(wrong)} of {len(chosen)} compile for {arguments.arch}",
            *wrong,
            sep="\n",
        )
        return int(any(w.partition(":")[0] not in LUCK for w in wrong))
    device = find_device(arguments.device)
    if arguments.child:
        mutant = mutant_named(arguments.child)
        plant(mutant, device.backend)
        print(
            json.dumps(asdict(hunt(mutant, device, end, arguments.hang, chosen, _print))),
            flush=True,
        )
        os._exit(0)  # a context that a bug has lost would fail once more where it cleans up

    results: list[Seen] = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(arguments.workers) as pool:
        one = partial(_told, device=device, cache=cache, end=end, hang=arguments.hang)
        controls = [pool.submit(one, CONTROL, chosen=names) for names in _shares(chosen)]
        results += pool.map(one, [m.name for m in chosen])
        results.insert(0, _together([c.result() for c in controls]))
        if hung := [s.name for s in results if "does not come back" in s.said]:
            again = _together([one(CONTROL, chosen=names) for names in _shares(chosen)[:1]])
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


def _told(name: str, **options: Any) -> Seen:
    seen = ask(name, **options)
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
