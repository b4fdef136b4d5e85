r"""Minutes of everything at once: random problems by the ten thousand, threads and streams,
launches by the million, memory that runs out, an error that sticks.

    python -m benchmarks.soak --device cuda:0 --out soak
    python -m benchmarks.soak --device numpy:0 --problems 200 --specs 20 --launches 1000 \
        --seconds 60 --out soak

Stages, each with its part of ``--seconds``, what is left over going to the last:

* a sticky error: a child process launches over an unallocated address; all its later calls must
report it;
* launches: one bound product, ``--launches`` times;
* operations: functions on arrays, ``--operations`` times, each with a new result;
* no memory left: results that fit nowhere, a full device; bound calls go on, and everything when
there is memory;
* binaries: all that the rest launches, compiled in parallel into the cache;
* threads and streams: ``--threads`` threads with ``--streams`` streams each launch mixed calls, and
every byte must be
  what the same call gave alone;
* random problems: ``--problems`` of ``--specs`` specs as random_problems.py draws them, three of
five attentions, their
  gradients and merges, the rest products and projections. ``--workers`` processes make, launch and
  judge them, each with a context of its own on the device.

After each stage the device has as much free memory as before, but for the kernels that were loaded.
``--out`` is a folder for soak.json and soak.md, which are written anew after each stage. Exit
status 1 where anything was wrong or did not come to its end in time.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from kernelseam.contract import Device
from kernelseam.dispatch import find_device
from kernelseam.parity.running.workers import cores
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case

from benchmarks import precompile
from benchmarks.drawing import FAMILIES
from benchmarks.random_problems import draw
from benchmarks.soaking import (
    MODULES,
    PIECE,
    Clock,
    Soaked,
    exhausted,
    is_host,
    mixed,
    problems,
    repeats,
    stage,
    sticky,
)

PARTS = {"launches": 0.10, "operations": 0.10, "no memory left": 0.10, "binaries": 0.35}
"""Of the time for all, at most."""
SETTLE = 10.0
"""Seconds that a driver has to take back what a process held that ended."""
SHOWN = 20
"""Findings of a stage that the page has in full."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", metavar="BACKEND:INDEX")
    parser.add_argument(
        "--implementation", help="by name; else the shared kernels, or the reference"
    )
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="for all stages together. [540]"
    )
    parser.add_argument("--problems", type=int, default=30_000)
    parser.add_argument("--specs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4, help="of a thread. [4]")
    parser.add_argument(
        "--mixed", type=int, default=64, help="different calls of threads and streams. [64]"
    )
    parser.add_argument(
        "--mixed-seconds", type=float, default=60.0, help="of threads and streams. [60]"
    )
    parser.add_argument(
        "--workers", type=int, default=max(cores() - 1, 1), help="processes; 0: this one alone"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for soak.json and soak.md")
    arguments = parser.parse_args(argv)

    clock, start = Clock.of(arguments.seconds), time.monotonic()
    device = find_device(arguments.device)
    implementation = arguments.implementation or (
        "numpy" if device.backend == "numpy" else "shared"
    )
    batches = problems.batches(arguments.problems, arguments.specs, arguments.seed)
    workers = arguments.workers
    print(f"{device}: {device.name}, {implementation}, {workers} workers", flush=True)

    def part(name: str) -> Clock:
        return clock.within(PARTS[name] * arguments.seconds)

    def error(soaked: Soaked) -> None:
        if is_host(device):
            soaked.absent = "no error of the host's sticks"
            return
        answer = sticky.ask(device, implementation)
        soaked.figures |= {name: said["message"] for name, said in answer["said"].items()}
        soaked.wrong += sticky.faults(answer)

    def binaries(soaked: Soaked) -> None:
        until = part("binaries")
        compiled = problems.binaries(batches, device, implementation, workers, until)
        soaked.figures["binaries"] = len(compiled)
        if compiled and workers:  # else each is compiled when it is launched
            soaked.wrong += precompile.compile_all(compiled, device, workers, seconds=until.left)

    def threads(soaked: Soaked) -> None:
        cases = _some(arguments.mixed, arguments.specs, arguments.seed)
        known = mixed.known(cases, device, implementation, soaked)
        until = clock.within(arguments.mixed_seconds)
        mixed.run(
            soaked, known, device, implementation, arguments.threads, arguments.streams, until
        )

    stages: list[tuple[str, Callable[[Soaked], None], int]] = [
        ("a sticky error", error, PIECE),
        (
            "launches",
            lambda s: repeats.launches(s, device, implementation, arguments.launches, part(s.name)),
            MODULES,
        ),
        (
            "operations",
            lambda s: repeats.operations(
                s, device, implementation, arguments.operations, part(s.name)
            ),
            MODULES,
        ),
        (
            "no memory left",
            lambda s: exhausted.run(s, device, implementation, part(s.name)),
            MODULES,
        ),
        ("binaries", binaries, PIECE),
        ("threads and streams", threads, MODULES),
        (
            "random problems",
            lambda s: problems.run(s, batches, device, implementation, workers, clock),
            PIECE,
        ),
    ]
    done: list[Soaked] = []
    for name, work, keeps in stages:
        done.append(stage(name, device, work, keeps, settle=SETTLE))
        last = done[-1]
        print(
            f"{last.status}: {name} in {last.seconds:.0f} s: {_figures(last)}",
            *last.wrong[:SHOWN],
            sep="\n",
            flush=True,
        )
        if arguments.out:
            write(arguments.out, done, device, argv if argv is not None else sys.argv[1:])
    bad = [s.name for s in done if s.wrong]
    print(
        f"{'wrong: ' + ', '.join(bad) if bad else 'nothing was wrong'}; all in "
        f"{time.monotonic() - start:.0f} s"
    )
    return int(bool(bad))


def _some(count: int, specs: int, seed: int) -> list[Case]:
    """So many of the random problems, of different kinds."""
    chosen: list[Case] = []
    for family in FAMILIES:
        kinds, share = (max(n * problems.SHARES[family] // 100, 1) for n in (specs, count))
        numbers = np.unique(np.linspace(0, kinds - 1, min(share, kinds)).astype(int))
        chosen += [p.case for p in draw(FAMILIES[family], seed, kinds, [int(n) for n in numbers])]
    return chosen


def write(folder: Path, done: list[Soaked], device: Device, given: list[str]) -> None:
    """All that is known, for programs and for people."""
    folder.mkdir(parents=True, exist_ok=True)
    toolchain = plugins().backend(device.backend).toolchain
    facts = {
        "device": str(device),
        "name": device.name,
        "compiler": toolchain.compiler() if toolchain else "",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": f"soak.py {' '.join(given)}",
    }
    stages = [
        {
            "stage": s.name,
            "status": s.status,
            "seconds": round(s.seconds, 1),
            "figures": s.figures,
            "wrong": s.wrong,
            "not run because": s.absent,
        }
        for s in done
    ]
    (folder / "soak.json").write_text(
        json.dumps({**facts, "stages": stages}, indent=1), encoding="utf-8"
    )
    lines = [
        "# Soak",
        "",
        *(f"* {name}: {value}" for name, value in facts.items() if value),
        "",
        "| stage | became | s | figures |",
        "|---|---|---|---|",
        *(f"| {s.name} | {s.status} | {s.seconds:.0f} | {s.absent or _figures(s)} |" for s in done),
    ]
    for s in done:
        if s.wrong:
            lines += [
                "",
                f"## Wrong: {s.name}",
                "",
                *(f"* {' '.join(w.split())[:500]}" for w in s.wrong[:SHOWN]),
            ]
            lines += (
                [f"* and {len(s.wrong) - SHOWN} more, in soak.json"] if len(s.wrong) > SHOWN else []
            )
    (folder / "soak.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _figures(soaked: Soaked) -> str:
    """In one line."""

    def shown(value: int | float | str) -> str:
        return (
            value.replace("|", "/")
            if isinstance(value, str)
            else f"{value:.3f}".rstrip("0").rstrip(".")
            if isinstance(value, float)
            else f"{value:,}"
        )

    return "; ".join(f"{name}: {shown(value)}" for name, value in soaked.figures.items())


if __name__ == "__main__":
    sys.exit(main())
