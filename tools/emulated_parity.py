"""Chosen parity cases on every emulated AMD device, and the page that says what came of it.

    python tools/emulated_parity.py           run them and show the page
    python tools/emulated_parity.py --write   … and write docs/parity/amd-emulated.md
    python tools/emulated_parity.py --arch gfx942 --case '*pages*'
    python tools/emulated_parity.py --keep FILE --write   append to FILE, do not run what it has

Needs hiprtc (see tools/get-hiprtc.sh) and KERNELSEAM_TINYGRAD. The cases are those of
emulated_cases.py; `kernelseam parity --device rocm:INDEX` runs all there are. Exit status 1 if a
case does not pass.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from emulated_cases import GROUPS, SHARED, Group
from kernelseam.contract import EMULATED, ArchRow, Device
from kernelseam.oracle.check import Verdict
from kernelseam.parity.matrix import matrix
from kernelseam.parity.report.summary import last_line
from kernelseam.parity.running.run import Outcome, Target, run_case, targets
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case
from kernelseam_rocm_emulator import Emulation, start

PAGE = Path(__file__).parent.parent / "docs" / "parity" / "amd-emulated.md"

ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1201")
"""Of the page: one of each instruction set and its tiles."""

INTRODUCTION = """\
# AMD kernels, emulated

No AMD GPU has run these kernels. hiprtc compiled them, and an emulator of AMD's instructions ran the very code objects
that it made. What they computed was held against the float64 oracle, as on every device
([accuracy](../accuracy.md)).

This page is made by `python tools/emulated_parity.py --write`; [emulation](../emulation.md) says how it works."""  # noqa: E501

NOTES = """\
A kernel is a code object; it counts where it runs first. A case's seconds hold the compiler's, and the emulator's first
sight of each instruction, which it compiles too."""  # noqa: E501

LIMITS = """\
## What this does not show

* **Waits and races.** Waves of a block run one after another, each up to the next barrier, and every load is complete
  at once. A missing wait, and nearly every missing barrier, has no effect here.
* **Timing.** Seconds are those of a program on the host. They say nothing of the hardware.
* **Inside a matrix instruction.** Products of halves are computed by our own patches: exactly, with one rounding at the
  end, and by IEEE's rules for inf, NaN and subnormals. The hardware's order of summation and its roundings are not
  shown. That inf and NaN agree here shows what the kernels do with them; what the instructions do with them is taken
  from the documents, not from a device.
* **Transcendental functions.** exp2 and log2 are the host's. The hardware's are less exact, and flush subnormals.
* **Memory order and caches.** Stores are visible at once, to every block.
* **Reads beyond a block's shared memory** give zeros, as on the device, and are not reported. Writes there, and any
  access outside device memory, end the launch with an error.
* **Some instructions** are missing: atomics that return a value (CDNA, RDNA 4; sums of 32-bit integers are there), generic pointers to
  private memory, and on gfx11 to shared memory, sparse products, buffer instructions on gfx12. A kernel that has one
  fails its test.
* **Faults that were not found yet.** The emulator gave wrong results for instructions of these kernels before they were
  patched, and may do so for others. The self-test holds what is known.
* **Other archs.** gfx90a is compiled only. gfx1200's kernels are gfx1201's, instruction for instruction; gfx1151 has the instruction
  set and tiles of gfx1100. Both run 25 chosen cases, gfx1200 5 of 8 bits more, in `tests/parity/test_emulated.py`."""  # noqa: E501


@dataclass(frozen=True)
class Part:
    """What came of one operation, on one implementation of it and one device."""

    device: Device
    what: str
    outcomes: tuple[Outcome, ...]
    kernels: int
    """Code objects that no part before had on this device."""

    @property
    def failed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.status != "passed"]

    def cells(self) -> tuple[str, ...]:
        """A row of the page's table."""
        worst, name = max(
            ((o.verdict.worst, o.case.name) for o in self.outcomes if o.verdict), default=(0.0, "")
        )
        passed = len(self.outcomes) - len(self.failed)
        seconds = sum(o.seconds for o in self.outcomes)
        return (
            self.device.arch,
            self.what,
            str(len(self.outcomes)),
            str(passed),
            str(self.kernels),
            f"{worst:.2f}",
            name,
            f"{seconds:.0f}",
        )


HEAD = (
    "arch",
    "operation",
    "cases",
    "passed",
    "kernels",
    "worst error/tolerance",
    "in",
    "seconds, emulated",
)


def emulation() -> Emulation:
    """What runs the kernels."""
    emulator = start()
    assert isinstance(emulator, Emulation), emulator
    return emulator


@cache
def cases() -> dict[str, Case]:
    """Every parity case by its name."""
    return {c.name: c for c in matrix()}


def by_operation(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups by their operation, and the implementation where that has a name."""
    by_name: dict[str, list[Group]] = {}
    for group in groups:
        (operation,) = {cases()[name].operation for name in group.cases}
        what = (
            operation
            if group.implementation == SHARED
            else f"{operation} as {group.implementation}"
        )
        by_name.setdefault(what, []).append(group)
    return by_name


@dataclass(frozen=True)
class Ran:
    """A case that ran, and the digests of its code objects."""

    outcome: Outcome
    kernels: frozenset[str]


class Kept:
    """Outcomes in a file, a line each, so that a run that was ended can go on. Those of other
    kernels than today's are the caller's to delete."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._ran: dict[tuple[str, str, str], Ran] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._read(json.loads(line))

    def _read(self, row: dict[str, Any]) -> None:
        verdict = row["verdict"]
        outcome = Outcome(
            cases()[row["case"]],
            "rocm",
            row["implementation"],
            verdict and Verdict(**{**verdict, "where": tuple(verdict["where"])}),
            row["refusal"],
            row["error"],
            row["seconds"],
            row["may_refuse"],
        )
        key = row["arch"], row["case"], row["implementation"]
        self._ran[key] = Ran(outcome, frozenset(row["kernels"]))

    def get(self, case: Case, target: Target) -> Ran | None:
        return self._ran.get((target.device.arch, case.name, target.implementation))

    def add(self, target: Target, ran: Ran) -> None:
        if self._path is None:
            return
        o = ran.outcome
        row = {
            "arch": target.device.arch,
            "case": o.case.name,
            "implementation": o.implementation,
            "verdict": o.verdict
            and {
                "passed": bool(o.verdict.passed),
                "worst": float(o.verdict.worst),
                "where": [int(i) for i in o.verdict.where],
                "checked": int(o.verdict.checked),
                "message": o.verdict.message,
            },
            "refusal": o.refusal,
            "error": o.error,
            "seconds": o.seconds,
            "may_refuse": o.may_refuse,
            "kernels": sorted(ran.kernels),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def run(device: Device, groups: Sequence[Group], kept: Kept) -> Iterator[Part]:
    """Every case of the groups on a device, an operation at a time."""
    toolchain = plugins().backend(device.backend).toolchain
    assert toolchain is not None
    groups = taken(groups, toolchain.arch_row(device.arch))
    known = set[str]()
    by_name = {(t.operation, t.implementation): t for t in targets(device=device)}
    for what, its in by_operation(groups).items():
        before = len(known)
        wanted = [(cases()[name], group.implementation) for group in its for name in group.cases]
        ran = [_reported(case, by_name[case.operation, name], kept) for case, name in wanted]
        known.update(*(r.kernels for r in ran))
        yield Part(device, what, tuple(r.outcome for r in ran), len(known) - before)


def taken(groups: Sequence[Group], row: ArchRow) -> list[Group]:
    """The groups without those of dtypes of 8 bits that the arch does not convert."""
    return [g for g in groups if g.stored is None or g.stored in row.fp8_dtypes]


def _reported(case: Case, target: Target, kept: Kept) -> Ran:
    ran = kept.get(case, target)
    if ran is None:
        used = emulation().used
        used.clear()
        outcome = run_case(case, target)
        ran = Ran(outcome, frozenset(digest for _, digest in used))
        kept.add(target, ran)
    o = ran.outcome
    why = "" if o.status == "passed" else f": {last_line(o.detail)}"
    print(f"{target.device.arch} {case.name}: {o.status} ({o.seconds:.1f} s){why}", flush=True)
    return ran


def chosen(globs: Sequence[str]) -> tuple[Group, ...]:
    """The groups with those of their cases alone that one of the globs matches; of no globs,
    all."""
    if not globs:
        return GROUPS
    kept = (
        replace(g, names=" ".join(n for n in g.cases if any(fnmatchcase(n, p) for p in globs)))
        for g in GROUPS
    )
    return tuple(g for g in kept if g.cases)


def page(parts: Sequence[Part], groups: Sequence[Group], facts: Sequence[tuple[str, str]]) -> str:
    """The page in Markdown."""
    lines = [INTRODUCTION, "", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += ["| " + " | ".join(p.cells()) + " |" for p in parts]
    for p in parts:
        for o in p.failed:
            what = f"{o.case.name}, {o.implementation}, on {p.device.arch}: {o.status}"
            lines += ["", f"**{what}**", "", "```", o.detail.rstrip(), "```"]
    lines += ["", NOTES, ""]
    lines += ["## With", ""]
    lines += [f"* {name}: {value}" for name, value in facts]
    lines += ["", "## The cases", "", *covered(groups), "", LIMITS]
    return "\n".join(lines) + "\n"


def covered(groups: Sequence[Group]) -> Iterator[str]:
    """The table of what the cases are there for."""
    yield from ("| operation | variant | cases |", "|---|---|---|")
    for what, its in by_operation(groups).items():
        for i, group in enumerate(its):
            names = ", ".join(f"`{name}`" for name in group.cases)
            yield f"| {what if i == 0 else ''} | {group.about} | {names} |"


def versions(device: Device) -> list[tuple[str, str]]:
    """What the results came from."""
    toolchain = plugins().backend(device.backend).toolchain
    assert toolchain is not None
    emulator = f"tinygrad's test tree, commit {_commit(emulation().checkout.folder)}"
    return [
        ("kernels", f"commit {_commit(PAGE.parent)}"),
        ("compiler", toolchain.compiler()),
        ("emulator", f"{emulator}, with our patches"),
        ("Python", platform.python_version()),
    ]


def _commit(folder: Path) -> str:
    """What a checkout stands at."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    said = subprocess.run(command, capture_output=True, text=True)
    return said.stdout.strip()[:10] or "unknown"


def main() -> int:
    devices = [d for d in plugins().backend("rocm").runtime.devices() if d.evidence == EMULATED]
    if not devices:
        print("no emulated devices: see `kernelseam doctor`", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument(
        "--arch",
        action="append",
        choices=[d.arch for d in devices],
        help="only this one, which need not be on the page; repeatable",
    )
    parser.add_argument(
        "--case", action="append", metavar="GLOB", help="only cases of such names; repeatable"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="append each outcome, and take from there what it has",
    )
    options = parser.parse_args()
    if options.write and (options.arch or options.case):
        parser.error(
            "the page is about all its archs and cases: --write goes with neither --arch nor --case"
        )
    groups = chosen(options.case or ())
    if not groups:
        parser.error(f"no case here has such a name: {', '.join(options.case)}")
    kept = Kept(options.keep)
    wanted = [d for d in devices if d.arch in (options.arch or ARCHS)]
    parts = [part for d in wanted for part in run(d, groups, kept)]
    text = page(parts, groups, versions(devices[0]))
    if options.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(any(p.failed for p in parts))


if __name__ == "__main__":
    sys.exit(main())
