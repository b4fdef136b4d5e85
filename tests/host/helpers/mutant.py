"""A bug planted in the device sources: where, what stands there instead, which parity case kills it
and how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kernelseam.contract import SourceBundle

TESTS = Path(__file__).parents[2]
ARCHS = ("host", "host-registers")
BUILDS = ("thread", "address", "contracted")
"""How the host compiles, beside plain: as executable.BUILDS has it."""


@dataclass(frozen=True)
class Mutant:
    """One bug. Run "plain" as the matrix runs the case, or in another of the host platform's
    builds."""

    name: str
    place: str
    """Where the words are: the start of the include names of the files to look in."""
    find: str
    """The words, of which white space counts as any white space; they must be there exactly
    once."""
    plant: str
    """What stands there instead."""
    case: str
    """The parity case that kills it."""
    reported: str
    """Regular expression, found in what the verdict says, or the whole of what a sanitizer or the
    launch reports."""
    what: str
    """What is wrong with it."""
    build: str = "plain"
    """How it is compiled: one of executable.BUILDS. What is planted for "contracted" does no harm
    in "plain"."""
    archs: tuple[str, ...] = ARCHS
    """Where it does harm. On the other archs of the host it does none."""
    implementation: str = "shared"
    """Whose kernels they are."""

    def found(self, files: Mapping[str, str]) -> list[tuple[str, int, int]]:
        """(file, start, end) of every place where the words are."""
        words = re.compile(r"\s+".join(re.escape(w) for w in self.find.split()))
        return [
            (name, m.start(), m.end())
            for name in sorted(files)
            if name.startswith(self.place)
            for m in words.finditer(files[name])
        ]

    def planted(self, files: Mapping[str, str]) -> dict[str, str]:
        """The files with the bug in one of them. Raises LookupError unless the words are there
        exactly once."""
        places = self.found(files)
        if len(places) != 1:
            where = ", ".join(name for name, *_ in places) or "nowhere"
            raise LookupError(
                f"mutant {self.name} ({self.what}): its words must be once in {self.place}*, they "
                f"are {where}: {self.find!r}. The source has changed: change its lines in "
                "tests/*/mutants/*.txt so that it plants the same bug in what stands there now"
            )
        ((name, start, end),) = places
        return {**files, name: files[name][:start] + self.plant + files[name][end:]}

    def __call__(self, made: SourceBundle) -> SourceBundle:
        """The bundle with the bug, where the words are in it: others may be launched beside it."""
        if not self.found(dict(made.files)):
            return made
        return replace(made, files=tuple(sorted(self.planted(dict(made.files)).items())))


SANITIZED = (
    "attention-bf16-64",
    "attention-bf16-128",
    "gemm-f16-nt",
    "gemm-bf16-tn",
    "gemm-f32-nn-unaligned",
    "gemm-f64-tn",
    "gemm-f32-nn-pointers",
    "gemm-f32-nn-k-0-beta-half",
    "gemm-f16-nt-35-of-16x16x16",
    "gemm-f16-nt-pointers-bias-residual",
    "gemm-f32-nn-sum-bias-residual",
    "qkv-projection-f16-rotary-halves",
    "qkv-projection-bwd-bf16-bias",
    "output-projection-bwd-f32-bias",
    "attention-f16-64-causal-65x65",
    "attention-bf16-128-causal-nan-in-hidden-v",
    "attention-f32-64-causal",
    "attention-f16-192v128",
    "attention-f16-64-odd",
    "attention-f16-64-pages-1-full",
    "attention-f16-64-causal-split-sinks",
    "attention-f16-64-causal-sequences-everything",
    "attention-bf16-576v512-causal-1-query-mqa",
    "attention-bwd-f16-64-causal-mqa-5",
    "attention-bwd-f32-64-causal-bias-window",
    "attention-bwd-bf16-192v256-causal",
    "attention-bwd-f16-64-causal-sequences-everything",
    "attention-bwd-f16-64-causal-any-order",
    "attention-bwd-f16-64-sequences-of-q-bias-any-order",
)
"""Cases that cover the sources, in which sanitizers find nothing: what they report of a mutant is
the bug."""

SANITIZED_UNFUSED = ("attention-f16-64-7x63", "attention-f32-64-causal")
"""The same of the unfused attention."""

SANITIZED_DECODE = (
    "attention-f16-64-split-batches",
    "attention-f16-64-split-pages",
    "attention-f16-64-causal-split-sinks",
    "attention-bf16-128-causal-nan-in-hidden-v",
)
"""The same of the kernel for few queries."""

CONTRACTED = (
    "attention-f16-64-everything",
    "attention-bf16-128-everything",
    "attention-f16-64-causal-sequences-everything",
    "attention-f16-64-bias",
    "attention-f16-64-bias-nan",
    "attention-f16-64-bias-f32-holes",
    "attention-f16-64-bias-f32-voids",
    "attention-f16-64-bias-f32-low",
    "attention-f16-64-bias-f32-lowest",
    "attention-f32-64-bias",
    "attention-f16-64-causal-alibi-gqa",
    "attention-f16-64-softcap-30-extreme",
    "attention-f16-64-causal-split-sinks",
    "attention-bwd-f16-64-everything",
    "attention-bwd-f16-64-bias-f32-voids",
    "attention-bwd-f32-64-causal-bias-window",
    "attention-bwd-f16-80v48-any-order-everything",
    "gemm-f16-nt-bias-residual",
    "gemm-f32-nn-sum-bias-residual",
    "qkv-projection-f16-rotary-halves",
)
"""Cases that pass where products are fused with sums: what takes a product for a number of its own
shows in them."""

GEMM, ATTENTION, DECODE = "gemm/", "attention/", "attention/decode"
"""Where to look: a folder's files, or those whose names start so."""

KILLERS = {
    "WRONG": r"error/tolerance (?!inf)",
    "NOT_EXACT": r"tolerance 0: error/tolerance inf",
    "NAN": r" is nan, the oracle says -?\d",
    "INFINITE": r" is -inf, the oracle says -?\d",
    "FINITE": r" is -?\d\S*, the oracle says (nan|-inf)",
    "STRAY": r"bytes outside the output changed",
    "UNTOUCHED": (
        "hold the initial canary: never written, or computed from memory outside the operands"
    ),
    "RACE": "data race",
    "BEYOND": "heap-buffer-overflow",
}
"""Words of verdicts, and what sanitizers call it."""
ORDER = "order: "
"""Before a rule that is broken."""


def mutants(*files: str) -> tuple[Mutant, ...]:
    """The bugs of text files below tests/, in order. Each is written so:

        name: what is wrong with it
          PLACE CASE [arch …] [build] [implementation][: what reports it]
          - the words
          + what stands there instead, in any number of lines

    What reports it may have names of ``KILLERS`` between "|". A line that begins with "#" is a
    heading. Raises ValueError for other lines.
    """
    return tuple(m for file in files for m in _bugs(TESTS / file))


def _bugs(file: Path) -> Iterator[Mutant]:
    lines = [x for x in file.read_text(encoding="utf-8").splitlines() if x and x[0] != "#"]
    starts = [i for i, line in enumerate(lines) if line[0] != " "]
    for first, behind in zip(starts, [*starts[1:], len(lines)], strict=True):
        name, _, what = lines[first].partition(": ")
        where, _, reported = lines[first + 1].partition(": ")
        place, case, *words = where.split()
        changed = lines[first + 2 : behind]
        kinds = "".join(line[2] for line in changed)
        if not what or not re.fullmatch(r"-+\+*", kinds):
            raise ValueError(f"{file}: {name} is not written as mutants() says")
        find, plant = ("\n".join(x[4:] for x in changed if x[2] == kind) for kind in "-+")
        archs = tuple(w for w in words if w in ARCHS)
        build = next((w for w in words if w in BUILDS), "plain")
        owner = [w for w in words if w not in (*ARCHS, *BUILDS)]
        yield Mutant(
            name,
            place,
            find,
            plant,
            case,
            "|".join(KILLERS.get(part, part) for part in reported.split("|")),
            what,
            build,
            archs or ARCHS,
            *owner,
        )
