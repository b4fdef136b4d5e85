"""Chosen parity cases on every emulated AMD device, and the page that says what came of it.

    python tools/emulated_parity.py            run them and show the table
    python tools/emulated_parity.py --write    … and write docs/parity/amd-emulated.md

Needs hiprtc (see tools/get-hiprtc.sh) and KERNELSEAM_TINYGRAD. The cases are few enough that an arch needs some 20
kernels; `kernelseam parity --device rocm:INDEX` runs all. Exit status 1 if a case does not pass.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelseam.contract import EMULATED, Device
from kernelseam.parity.cases import named
from kernelseam.parity.run import Outcome, Target, run_case, targets
from kernelseam.plugins import plugins

PAGE = Path(__file__).parent.parent / "docs" / "parity" / "amd-emulated.md"

CASES = (
    # Transposes and dtypes, whole and ragged.
    "gemm-f16-nn", "gemm-f16-nt", "gemm-f16-tn", "gemm-f16-tt", "gemm-bf16-nn", "gemm-f32-nn", "gemm-f64-nn",
    "gemm-f16-nt-integers", "gemm-bf16-nn-ragged-65x129x7", "gemm-f16-nt-ragged-17x65x257", "gemm-f16-nt-to-f32",
    # Lists of addresses; rows that allow no wide access; gaps; scalars.
    "gemm-f16-nt-pointers", "gemm-f16-nt-unaligned", "gemm-f16-nt-gaps", "gemm-f16-nn-alpha-beta",
    # What is not a number, too large or too small.
    "gemm-f16-nt-nan-in-a", "gemm-f16-nt-inf-minus-inf", "gemm-bf16-nn-nan-in-b", "gemm-f16-nt-subnormal",
    "gemm-f16-nt-overflow",
    # Head dims and dtypes.
    "attention-f16-32", "attention-f16-64-ramp", "attention-f16-128", "attention-f16-192v128", "attention-f16-256",
    "attention-bf16-128-causal-ramp", "attention-f32-64", "attention-f32-64-causal-ramp",
    # Masks, extents, grouped heads, strides.
    "attention-f16-64-causal-130x130-ramp", "attention-f16-64-causal-7x129", "attention-f16-64-causal-masked-rows",
    "attention-f16-64-gqa-6-2", "attention-f16-64-bshd-to-bhsd", "attention-f16-64-odd", "attention-f16-64-no-keys",
    # Scores and values that are infinite or no numbers.
    "attention-f16-64-extreme", "attention-f16-64-minus-inf-holes", "attention-f16-64-nan-in-v",
    "attention-f16-64-causal-nan-in-hidden-v", "attention-bf16-128-causal-nan-in-hidden-k",
)

INTRODUCTION = """\
# AMD kernels, emulated

No AMD GPU has run these kernels. hiprtc compiled them, and an emulator of AMD's instructions ran the very code objects
that it made. What they computed was held against the float64 oracle, as on every device
([accuracy](../accuracy.md)).

This page is made by `python tools/emulated_parity.py --write`; [emulation](../emulation.md) says how it works."""

LIMITS = """\
## What this does not show

* **Waits and races.** Waves of a block run one after another, each up to the next barrier, and every load is complete
  at once. A missing wait, and nearly every missing barrier, has no effect here.
* **Timing.** Seconds are those of a program on the host. They say nothing of the hardware.
* **Inside a matrix instruction.** Products of halves are computed by our own mends: exactly, with one rounding at the
  end, and by IEEE's rules for inf, NaN and subnormals. The hardware's order of summation and its roundings are not
  shown. That inf and NaN agree here shows what the kernels do with them; what the instructions do with them is taken
  from the documents, not from a device.
* **Transcendental functions.** exp2 and log2 are the host's. The hardware's are less exact, and flush subnormals.
* **Memory order and caches.** Stores are visible at once, to every block.
* **Reads beyond a block's shared memory** give zeros, as on the device, and are not reported. Writes there, and any
  access outside device memory, end the launch with an error.
* **Some instructions** are missing: atomics that return a value (CDNA), generic pointers to private memory, and on
  gfx11 to shared memory, sparse products, buffer instructions on gfx12. A kernel that has one fails its test.
* **Faults nobody has found yet.** The emulator gave wrong results for instructions of these kernels before they were
  mended, and may do so for others. The self-test holds what is known.
* **gfx90a** is compiled only."""


@dataclass(frozen=True)
class Part:
    """What came of one operation on one device."""

    device: Device
    operation: str
    outcomes: tuple[Outcome, ...]
    kernels: int

    @property
    def failed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.status != "passed"]

    def cells(self) -> tuple[str, ...]:
        """A row of the page's table."""
        worst, name = max(((o.verdict.worst, o.case.name) for o in self.outcomes if o.verdict), default=(0.0, ""))
        passed = len(self.outcomes) - len(self.failed)
        seconds = sum(o.seconds for o in self.outcomes)
        return (
            self.device.arch, self.operation, str(len(self.outcomes)), str(passed), str(self.kernels), f"{worst:.2f}",
            name, f"{seconds:.0f}",
        )


HEAD = ("arch", "operation", "cases", "passed", "kernels", "worst error/tolerance", "in", "seconds, emulated")


def run(device: Device) -> Iterator[Part]:
    """Every case on a device, an operation at a time."""
    from kernelseam_rocm import emulation

    used = emulation.required().used
    cases = [named(name) for name in CASES]
    for operation in dict.fromkeys(c.operation for c in cases):
        (target,) = (
            t for t in targets(device=device) if t.operation == operation and t.implementation == "shared"
        )
        before = len(used)
        outcomes = tuple(_told(run_case(c, target), target) for c in cases if c.operation == operation)
        yield Part(device, operation, outcomes, len(used) - before)


def _told(outcome: Outcome, target: Target) -> Outcome:
    why = "" if outcome.status == "passed" else f": {outcome.detail}"
    print(f"{target.device.arch} {outcome.case.name}: {outcome.status} ({outcome.seconds:.1f} s){why}", flush=True)
    return outcome


def page(parts: Sequence[Part], facts: Sequence[tuple[str, str]]) -> str:
    """The page in Markdown."""
    lines = [INTRODUCTION, "", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += ["| " + " | ".join(p.cells()) + " |" for p in parts]
    for p in parts:
        for o in p.failed:
            lines += ["", f"**{o.case.name} on {p.device.arch}: {o.status}**", "", "```", o.detail.rstrip(), "```"]
    lines += ["", "A case's seconds hold the emulator's first sight of each instruction, which it compiles.", ""]
    lines += ["## With", ""]
    lines += [f"* {name}: {value}" for name, value in facts]
    lines += ["", "## The cases", "", ", ".join(f"`{name}`" for name in CASES), "", LIMITS]
    return "\n".join(lines) + "\n"


def versions(device: Device) -> list[tuple[str, str]]:
    """What the results came from."""
    from kernelseam_rocm import emulation

    toolchain = plugins().backend(device.backend).toolchain
    assert toolchain is not None
    folder = emulation.required().checkout.folder
    commit = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    return [
        ("compiler", toolchain.compiler()),
        ("emulator", f"tinygrad's test tree, commit {commit.stdout.strip()[:10] or 'unknown'}, with our mends"),
        ("Python", platform.python_version()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    devices = [d for d in plugins().backend("rocm").runtime.devices() if d.evidence == EMULATED]
    if not devices:
        print("no emulated devices: see `kernelseam doctor`", file=sys.stderr)
        return 1
    parts = [part for device in devices for part in run(device)]
    text = page(parts, versions(devices[0]))
    if options.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(any(p.failed for p in parts))


if __name__ == "__main__":
    sys.exit(main())
