"""The parity cases of grouped GEMMs over lists: matrices of any sizes, in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelseam.dtypes import E4M3
from kernelseam.samples.common import BF16, F32
from kernelseam.samples.grouped_pointers_case import GroupedPointersCase, case

_SHARED = frozenset({"shared"})
"""Matrix units for float64 are not on every arch; nor are those for e4m3, of which each has one
kind, nor all precisions of float32."""


def grouped_pointers_cases() -> list[GroupedPointersCase]:
    """Every case of grouped products over lists."""
    listed = [replace(c, group="grouped GEMM over lists") for c in _cases()]
    assert len({c.name for c in listed}) == len(listed)
    return listed


def _cases() -> Iterator[GroupedPointersCase]:
    for ops in ("nn", "nt", "tn", "tt"):
        yield case(f"bf16-{ops}")
        yield case(f"bf16-{ops}", "anywhere", aligned=False)
    for dtype in ("f16", "f32", "f64"):
        refusing = _SHARED if dtype == "f64" else frozenset[str]()
        yield case(f"{dtype}-nn", may_refuse=refusing)
        yield case(f"{dtype}-nt", "device", view="device", may_refuse=refusing)
    yield case("bf16-nn", "integers", data="integers")
    yield case("bf16-nt", "integers", data="integers", view="device", aligned=False)
    yield case("bf16-nn", "alpha-beta", alpha=2.5, beta=-0.5)
    yield case("bf16-nt", "to-f32", dtype_c=F32, beta=1.0)
    yield case("bf16-nn", "alpha-0", alpha=0.0, beta=0.5)
    yield case("bf16-nn", "one-group", sizes=((200, 77, 45),))
    yield case("bf16-nn", "no-groups", sizes=())
    yield case("bf16-nn", "nothing", sizes=((0, 5, 3), (4, 0, 8)))
    yield case("bf16-nn", "k-0", sizes=((7, 5, 0), (4, 90, 0)), beta=0.5)
    yield case("bf16-nt", "one-each", sizes=((1, 1, 1),) * 40)
    yield case("bf16-nt", "one-row-each", sizes=tuple((1, 8 * n, 72) for n in range(1, 30)))
    yield case("bf16-nt", "256-groups", sizes=((0, 8, 8), (1, 24, 16), (3, 8, 40), (2, 5, 0)) * 64)
    yield case("bf16-nt", "the-last-is-large", sizes=((3, 3, 3),) * 21 + ((300, 270, 1100),))
    yield case("f32-nn", "positive", data="positive", sizes=((9, 17, 1030), (40, 3, 12)))
    for precision in ("tf32", "tf32x3"):
        yield case("f32-nn", precision, precision=precision, may_refuse=_SHARED)
    for stored in E4M3:
        short = stored.value.removeprefix("float8_")
        for c in (case("f16-nt"), case("f16-nn", "integers", data="integers", aligned=False)):
            yield replace(
                c,
                name=c.name.replace("f16", short),
                dtype=stored,
                dtype_c=BF16,
                may_refuse=_SHARED,
            )
