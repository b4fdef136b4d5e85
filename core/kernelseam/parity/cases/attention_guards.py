"""Attention cases for a softmax that keeps the row maximum of the first block of keys and only
rescales when the row sums demand it.

Any softmax must pass them. Such a softmax visits blocks of 64 or 128 keys from the last key to the
first, so scores rise towards key 0 here: a weight exceeds 2^15 relative to the kept maximum, or
1e30, beyond which sums cannot be rescaled, or the range of float32; or the first scores are all
−inf.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelseam.samples.attention_case import AttentionCase, case
from kernelseam.samples.common import INF, NAN, InjectedValue

KINDS = ("f16-64", "f16-128", "bf16-64", "bf16-128")
HIDING = ("f16-64-causal", "bf16-128-causal")
GROWTH = {"sums": 30.0, "far": 78.0, "infinite": 300.0}
"""A jump of the scores, e^30 = 2^43, e^78 = 2^112 and more than float32 holds."""


def guards() -> Iterator[AttentionCase]:
    """Every way into the rescaling branch of ``sm90/attention/softmax.h``, and small weights."""
    for kind in KINDS:
        shape = {"S_q": 150, "S_k": 600, "batch": 1}
        for name, by in GROWTH.items():
            # A jump in the middle; and a single key in the last block, outside the first thread's
            # fragment.
            yield case(kind, f"rises-{name}", steps=((0, by), (333, 0.0)), **shape)
            yield case(
                kind, f"rises-{name}-at-the-end", steps=((0, 0.0), (5, by), (6, 0.0)), **shape
            )
        # In the first block visited, and in the next one.
        yield case(kind, "falls-infinite", steps=((0, 0.0), (595, 300.0), (597, 0.0)), **shape)
        yield case(kind, "rises-sums-early", steps=((0, 0.0), (505, 30.0), (510, 0.0)), **shape)
        # Seven jumps of 2^17: relative to one maximum their sum exceeds 2^112.
        yield case(
            kind,
            "rises-again-and-again",
            steps=tuple((80 * i, 12.0 * (7 - i)) for i in range(8)),
            **shape,
        )
        yield case(kind, "from-nothing", steps=((0, 0.0), (300, -INF)), **shape)
    # Scores that are computed anew, of head dims that end within a step of their products.
    for kind in ("f16-40", "f16-72", "f16-136/184"):
        yield case(kind, "rises-infinite", steps=((0, 300.0), (233, 0.0)), S_q=70, S_k=400, batch=1)
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
            # The last keys, masked for some rows; then those before the diagonal, visible to all.
            yield case(kind, f"rises-{name}", steps=((0, by), (65, 0.0)), **shape)
            yield case(
                kind, f"rises-{name}-twice", steps=((0, 2 * by), (50, by), (330, 0.0)), **shape
            )
        # In blocks with masked keys, few rows see any score but −inf.
        yield case(kind, "from-nothing", steps=((0, 0.0), (150, -INF)), **shape)
        yield case(kind, "stays-then-rises", steps=((0, 40.0), (100, 5.0), (390, 0.0)), **shape)
    for kind in ("f16-64", "bf16-128"):
        for what, injection in (
            ("nan-in-q", InjectedValue("q", NAN, (0, 0, 37, 2))),
            ("inf-in-k", InjectedValue("k", INF, (0, 1, 40, 3))),
        ):
            yield case(
                kind,
                f"rises-{what}",
                steps=((0, 30.0), (333, 0.0)),
                injected=(injection,),
                S_q=150,
                S_k=600,
                batch=1,
            )
    for kind in HIDING:
        yield case(
            kind,
            "rises-nan-in-k",
            steps=((0, 30.0), (65, 0.0)),
            injected=(InjectedValue("k", NAN, (0, 1, 200, 3)),),
            S_q=300,
            S_k=420,
            batch=1,
        )
    yield from _small_weights()


def _small_weights() -> Iterator[AttentionCase]:
    """128 keys share the largest weight, above the kept maximum. The keys before them weigh 2^-21.2
    or 2^-20.5 of that each, which float16 can represent, and dominate the result because the values
    of the 128 are 0: a maximum kept 2^4 (64 keys per block) or 2^5 (128) too high flushes them."""
    for kind, faint in (("f16-64", 14.7), ("f16-128", 14.2), ("bf16-128", 14.2)):
        steps = ((0, 20.0 - faint), (512, 20.0), (640, 0.0))
        yield case(kind, "faint", data="faint", steps=steps, S_q=65, S_k=700, batch=1)
