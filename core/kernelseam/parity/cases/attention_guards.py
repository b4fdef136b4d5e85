"""Attention cases for a softmax that keeps a row's reference from the first block of keys on, and
looks at sums.

Any softmax must pass them. Blocks of such a one, of 64 or 128 keys, go from the last key to the
first, so scores rise towards key 0 here: a weight passes 2^15 over a kept reference, or 1e30,
beyond which sums do not serve to scale by, or what float32 holds; or the first scores are all −inf.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelseam.parity.cases.attention_case import AttentionCase, case
from kernelseam.parity.cases.common import INF, NAN, Plant

KINDS = ("f16-64", "f16-128", "bf16-64", "bf16-128")
HIDING = ("f16-64-causal", "bf16-128-causal")
GROWTH = {"sums": 30.0, "far": 78.0, "infinite": 300.0}
"""A jump of the scores, e^30 = 2^43, e^78 = 2^112 and more than float32 holds."""


def guards() -> Iterator[AttentionCase]:
    """Every way into the rare branch of ``sm90/attention/softmax.h``, and what is left of small
    weights."""
    for kind in KINDS:
        shape = {"S_q": 150, "S_k": 600, "batch": 1}
        for name, by in GROWTH.items():
            # A jump in the middle; and one key, which is in the last block and not in a first
            # thread's part of it.
            yield case(kind, f"rises-{name}", steps=((0, by), (333, 0.0)), **shape)
            yield case(
                kind, f"rises-{name}-at-the-end", steps=((0, 0.0), (5, by), (6, 0.0)), **shape
            )
        # In the block that comes first, and in the one after it.
        yield case(kind, "falls-infinite", steps=((0, 0.0), (595, 300.0), (597, 0.0)), **shape)
        yield case(kind, "rises-sums-early", steps=((0, 0.0), (505, 30.0), (510, 0.0)), **shape)
        # Seven jumps of 2^17: over one reference their sum is beyond 2^112.
        yield case(
            kind,
            "rises-again-and-again",
            steps=tuple((80 * i, 12.0 * (7 - i)) for i in range(8)),
            **shape,
        )
        yield case(kind, "from-nothing", steps=((0, 0.0), (300, -INF)), **shape)
    for kind, every, S_k in (
        ("f16-64", 24, 600),
        ("f16-128", 24, 700),
        ("bf16-64", 5, 380),
        ("f16-64", 7, 300),
    ):
        for name, by in GROWTH.items():
            yield case(
                kind,
                f"rises-{name}-every-{every}",
                steps=((0, 0.0), (70, by), (77, 0.0)),
                steps_every=every,
                S_q=200,
                S_k=S_k,
                batch=1,
            )
    for kind in HIDING:
        shape = {"S_q": 300, "S_k": 420, "batch": 1}
        for name, by in GROWTH.items():
            # The last keys, which hide from some rows; then the open ones before all diagonals.
            yield case(kind, f"rises-{name}", steps=((0, by), (65, 0.0)), **shape)
            yield case(
                kind, f"rises-{name}-twice", steps=((0, 2 * by), (50, by), (330, 0.0)), **shape
            )
        # Few rows see anything but −inf in blocks that hide keys.
        yield case(kind, "from-nothing", steps=((0, 0.0), (150, -INF)), **shape)
        yield case(kind, "stays-then-rises", steps=((0, 40.0), (100, 5.0), (390, 0.0)), **shape)
    for kind in ("f16-64", "bf16-128"):
        for what, plant in (
            ("nan-in-q", Plant("q", NAN, (0, 0, 37, 2))),
            ("inf-in-k", Plant("k", INF, (0, 1, 40, 3))),
        ):
            yield case(
                kind,
                f"rises-{what}",
                steps=((0, 30.0), (333, 0.0)),
                plants=(plant,),
                S_q=150,
                S_k=600,
                batch=1,
            )
    for kind in HIDING:
        yield case(
            kind,
            "rises-nan-in-k",
            steps=((0, 30.0), (65, 0.0)),
            plants=(Plant("k", NAN, (0, 1, 200, 3)),),
            S_q=300,
            S_k=420,
            batch=1,
        )
    yield from _small_weights()


def _small_weights() -> Iterator[AttentionCase]:
    """128 keys of one largest weight rise over a kept reference. Those before them weigh 2^-21.2 or
    2^-20.5 of it each, which float16 still holds, and their values make nearly all of the result,
    for the largest have none: a reference that is 2^4 (64 keys a block) or 2^5 (128) above the
    largest weight loses them."""
    for kind, faint in (("f16-64", 14.7), ("f16-128", 14.2), ("bf16-128", 14.2)):
        steps = ((0, 20.0 - faint), (512, 20.0), (640, 0.0))
        yield case(kind, "faint", data="faint", steps=steps, S_q=65, S_k=700, batch=1)
