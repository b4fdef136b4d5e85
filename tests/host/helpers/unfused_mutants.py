"""Bugs planted in the softmax between the unfused attention's two products, as in mutants.py."""

from __future__ import annotations

from mutant import BEYOND, WRONG, Mutant

PLACE = "attention/softmax.h"


def _mutant(
    name: str, find: str, plant: str, case: str, reported: str, what: str, build: str = "plain"
) -> Mutant:
    return Mutant(
        name, PLACE, find, plant, case, reported, what, build, implementation="gemm-softmax-gemm"
    )


UNFUSED_ATTENTIONS = (
    _mutant(
        "softmax-lanes-not-rescaled",
        "= sum * fade(top, now) + share * fade(other, now)",
        "+= share",
        "attention-f16-64-climbing",
        WRONG,
        "sums of lanes are added whatever maxima they are relative to",
    ),
    _mutant(
        "softmax-sink-of-every-lane",
        "Config::SINKS && lane() == 0",
        "Config::SINKS",
        "attention-f16-64-sinks",
        WRONG,
        "a sink counts once a lane",
    ),
    _mutant(
        "softmax-row-too-many",
        "if (index >= total) return;",
        "",
        "attention-f16-64-7x63",
        BEYOND,
        "warps without a row of their own take those behind the last",
        "address",
    ),
)
