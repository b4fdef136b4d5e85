"""A bug planted in the device sources: where, what stands there instead, which parity case kills it
and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kernelseam.contract import SourceBundle


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
    archs: tuple[str, ...] = ("host", "host-registers")
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
                f"are {where}: {self.find!r}. The source has changed: change this row of "
                "tests/*/*mutants.py so that it plants the same bug in what stands there now"
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

# Where to look: a folder's files, or one file.
GEMM, ATTENTION, BASE, SIMT = "gemm/", "attention/", "tile/base.h", "tile/simt.h"
FORWARD, DECODE = "attention/forward.h", "attention/decode"
START = "attention/start.h"
HOST, WARPS = "platform.h", "host/warps.h"

# What kills: words of verdicts, and what sanitizers call it.
WRONG = r"error/tolerance (?!inf)"
NOT_EXACT = r"tolerance 0: error/tolerance inf"
NAN, INFINITE = r" is nan, the oracle says -?\d", r" is -inf, the oracle says -?\d"
FINITE = r" is -?\d\S*, the oracle says (nan|-inf)"
STRAY = r"bytes outside the output changed"
UNTOUCHED = r"hold the initial canary: never written, or computed from memory outside the operands"
RACE, BEYOND = "data race", "heap-buffer-overflow"
DIRECT, REGISTERS = ("host",), ("host-registers",)
