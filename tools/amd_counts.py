"""What AMD's kernels cost by count: docs/amd-counts.csv, of what is compiled, and
docs/parity/amd-counts.md, of what ran on emulated devices.

    python tools/amd_counts.py             compile what every run of the tests does; show what
                                           differs from the table, and what is worse
    python tools/amd_counts.py --all       … what the slow tests do, too
    python tools/amd_counts.py --write     … and write the table, and the page of launches
    python tools/amd_counts.py --run       launches alone, to the screen
    python tools/amd_counts.py --run --case 'gemm-f16-nt*' --arch gfx950 --loop
                                           some of them, or of the parity matrix's cases; and what
                                           their hot loops are made of; --implementation names
                                           another than the shared kernels
    python tools/amd_counts.py --self-test count kernels whose counts are known
    python tools/amd_counts.py --run -- attention --heads 1 --seq-len 256 --causal
                                           whatever the command line can say

The table needs hiprtc and no device; launches need the emulator too (docs/emulation.md). Exit
status 1 where a kernel of the table is worse: its matrix share fell by more than three points, or a
loop moves more registers between the files.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from fnmatch import fnmatchcase

import amd_count_table as table
import kernel_table
from kernelseam.plugins import plugins
from kernelseam_rocm_emulator import devices
from kernelseam_rocm_emulator.counting import model, report, selftest
from kernelseam_rocm_emulator.emulation import recorded

PAGE = table.TABLE.parent / "parity" / "amd-counts.md"
_LONG = "attention --batch 1 --heads 1 --seq-len 256 --kv-seq-len 768"
_FEW = (
    "attention --batch 1 --heads 8 --kv-heads 1 --seq-len 1 --kv-seq-len 1024 --head-dim 128 "
    "--dtype bfloat16 --paged"
)
PRESETS = {
    "attention-d128": f"{_LONG} --head-dim 128 --dtype bfloat16",
    "attention-d64": f"{_LONG} --head-dim 64",
    "gradients-d128": (
        "attention --batch 1 --heads 1 --seq-len 256 --head-dim 128 --dtype bfloat16 --backward"
    ),
    "decode-d128": f"{_FEW} --implementation decode",
    "split-d128": f"{_FEW} --implementation shared",
    "gemm-nt": "gemm --m 256 --n 256 --k 256 --b-transposed",
    "gemm-nn": "gemm --m 256 --n 256 --k 256",
}
"""Commands by name: the page's launches. float16 where no dtype is named."""

# ---------------------------------------------------------------- what is compiled


def compare(archs: Collection[str], everything: bool, write: bool) -> list[str]:
    """Compile, show what differs, and perhaps write the table; what is worse."""
    backend = plugins().backend("rocm")
    assert backend.toolchain is not None
    before, after, left = table.read(), dict[table.Key, table.Counts](), set[table.Key]()
    for arch in archs:
        known = list(table.chosen(backend, arch))
        for b in known:
            tiles = b.often + b.rarely * everything
            after.update(table.counts_of(backend.toolchain, arch, b.covered, tiles))
        left |= set() if everything else kernel_table.left_out(arch, known)
        print(f"{arch}: {sum(key[0] == arch for key in after)} kernels with matrix instructions")
    removed = {key for key in before if key[0] in archs and key not in after and key not in left}
    for key in sorted({*after, *removed}):
        was, now = before.get(key), after.get(key)
        if before and was != now:
            print(f"  {' | '.join(key)}: {was or 'new'} -> {now or 'gone'}")
    if write:
        kept = {key: row for key, row in before.items() if key not in removed}
        table.TABLE.write_text(table.written({**kept, **after}), encoding="utf-8")
    return table.worse(before, after, left)


# ---------------------------------------------------------------- what ran


def launches(cases: Mapping[str, Sequence[str]], archs: Sequence[str]) -> Iterator[report.Row]:
    """Rows of what each command launched on each emulated arch."""
    from kernelseam.cli.main import app

    indices = {d.arch: d.index for d in plugins().backend("rocm").runtime.devices()}
    for case, command in cases.items():
        for arch in archs:
            with recorded() as recording, redirect_stdout(io.StringIO()):
                app([*command, "--backend", f"rocm:{indices[arch]}"], standalone_mode=False)
            yield from (report.Row(case, counted) for counted in recording.launches)


def split(commands: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Commands as words."""
    return {name: command.split() for name, command in commands.items()}


def parity_launches(
    globs: Sequence[str], archs: Sequence[str], implementation: str
) -> Iterator[report.Row]:
    """Rows of what cases of the parity matrix launched on an implementation: their own shapes, on
    the tiles of a device of one compute unit."""
    from kernelseam.parity.matrix import matrix
    from kernelseam.parity.running.run import run_case, targets

    cases = [c for c in matrix() if any(fnmatchcase(c.name, g) for g in globs)]
    devices = [d for d in plugins().backend("rocm").runtime.devices() if d.arch in archs]
    for device in devices:
        every = targets(device=device)
        named = {t.operation: t for t in every if t.implementation == implementation}
        for case in (c for c in cases if c.operation in named):
            with recorded() as recording:
                outcome = run_case(case, named[case.operation])
            if outcome.status != "passed":
                print(f"{case.name} on {device.arch}: {outcome.status}", file=sys.stderr)
            yield from (report.Row(case.name, counted) for counted in recording.launches)


INTRODUCTION = """\
# AMD kernels, counted

No AMD GPU has run these kernels. hiprtc compiled them, an emulator of AMD's instructions ran the
code objects, and what ran was counted. Made by `python tools/amd_counts.py --write`;
[emulation](../emulation.md) says how launches are emulated, and
[amd-counts.csv](../amd-counts.csv) holds the counts of what was only compiled.

**[C]** counted: exact for the problem that ran. **[M]** modelled: the table below, applied to
counts. **[G]** in that table: a guess. The figures rank changes to a kernel. They are no seconds,
and no promise of any.

## The hot loop, one iteration of a wave

Cycles of the matrix unit, of the vector unit, of the issue of all else, and clocks of LDS. Share:
the part of all cycles in which a SIMD's matrix unit works, if nothing ever waited; with one wave
nothing but LDS overlaps, with two all units do (on RDNA not matrix and vector). GEMM is float16
with a tile of the largest size, attention-d64 float16, the others bfloat16; of the gradients the
first launch makes those of keys and values, the second those of queries. decode-d128 and split-d128
are the same problem, 8 heads of a query over 1024 keys, by `decode` and by the kernel that splits
keys over blocks: there a wave's step has 16 rows, too, but others than the first wave's are empty.
"""

LAUNCHES = """
## Launches

Instructions that all waves executed [C], bytes that lanes asked for [C], and the lines of 128
bytes that were touched over as few as hold those bytes [C].
"""

MODEL = """
## The model

An instruction without a row of its own takes the cycles of its issue. LDS serves the lanes of a
phase in one clock, if each bank has one word of 4 bytes to give; its clocks are shared by the SIMDs
of a compute unit. A load straight to LDS takes the clocks of writes without conflicts, too (a
guess).
"""

LIMITS = """
## What this does not show

* **Latency and waits.** A loop that waits for memory, for LDS or for a product's result takes
  longer than its cycles.
* **Caches, TLBs, the order of memory requests, clocks under load, several blocks that compete.**
* **Dual issue** on RDNA, and co-issue of scalar instructions on CDNA beyond what two waves
  overlap.
* **Ways that did not run.** The counts are those of these problems: whole tiles, no mask. In
  amd-counts.csv, where nothing ran, the loop's way is chosen: see `compiled` in
  `counting/iteration.py`.
* **Whether the sources of the model are right.** Each entry says where it is from.
"""


def page(rows: Sequence[report.Row], compiler: str) -> str:
    """docs/parity/amd-counts.md."""
    loops = [cells for row in rows if (cells := row.loop_cells()) is not None]
    lines = [INTRODUCTION, *report.table(report.LOOP_HEAD, loops), LAUNCHES]
    lines += report.table(report.LAUNCH_HEAD, (row.launch_cells() for row in rows))
    lines += [MODEL, *report.table(report.MODEL_HEAD, report.model_rows()), LIMITS]
    lines += ["## With", "", f"* compiler: {compiler}", ""]
    lines += [f"* {name}: `kernelseam {command}`" for name, command in PRESETS.items()]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the command


def show(rows: Iterable[report.Row], loops: bool) -> None:
    """Launches as they end."""
    for row in rows:
        cells = row.loop_cells()
        if cells is not None:
            print("\n".join(f"{h}: {c}" for h, c in zip(report.LOOP_HEAD, cells, strict=True)))
        for head, cell in list(zip(report.LAUNCH_HEAD, row.launch_cells(), strict=True))[
            0 if cells is None else 3 :
        ]:
            print(f"{head}: {cell}")
        if loops:
            print("\n".join(row.details()))
        print(flush=True)


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, other = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--arch", action="append", choices=list(model.UNITS))
    parser.add_argument("--case", action="append", metavar="GLOB")
    parser.add_argument("--implementation", default="shared", metavar="NAME")
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args(own)
    emulated = [a for a in options.arch or model.UNITS if a in devices.UNITS]
    # A device of one compute unit takes a large problem's tiles for a small one.
    devices.UNITS.update({a: (1, clock) for a, (_, clock) in devices.UNITS.items()})
    if options.self_test:
        failures = [f for arch in emulated for f in selftest.failures(arch)]
        print("\n".join(failures) or f"passed on {', '.join(emulated)}")
        return int(bool(failures))
    if options.run or other:
        globs = options.case or ["*"]
        presets = {n: c for n, c in PRESETS.items() if any(fnmatchcase(n, g) for g in globs)}
        show(launches({"given": other} if other else split(presets), emulated), options.loop)
        if options.case and not other:
            rows = parity_launches(options.case, emulated, options.implementation)
            show(rows, options.loop)
        return 0
    said = compare(options.arch or model.UNITS, options.all, options.write)
    print("\n".join(said))
    if options.write and not options.arch:
        found_launches = list(launches(split(PRESETS), emulated))
        toolchain = plugins().backend("rocm").toolchain
        assert toolchain is not None
        PAGE.write_text(page(found_launches, toolchain.compiler()), encoding="utf-8")
    return int(bool(said) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
