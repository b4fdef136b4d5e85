"""What the drawing of every family has in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
from kernelseam.dtypes import DType
from kernelseam.samples.case import Case
from kernelseam.samples.common import InjectedValue
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.operations import operands
from kernelseam.samples.projection_case import ProjectionCase

F16, BF16, F32, F64 = DType.float16, DType.bfloat16, DType.float32, DType.float64
Random = np.random.Generator
T = TypeVar("T")
Product = TypeVar("Product", GemmCase, ProjectionCase)


class Kind(Protocol):
    """What shapes binaries: problems of one kind share their spec, but for what an extent of 0 or 1
    makes of it."""

    @property
    def operation(self) -> str: ...

    @property
    def features(self) -> Iterator[str]:
        """Names of what all its problems have."""
        ...

    def draw(self, name: str, rng: Random) -> Case:
        """A problem of the kind; its name seeds its data."""
        ...

    def about(self, case: Any) -> Iterator[str]:
        """Names of what one of its problems has beside that."""
        ...


def one(rng: Random, of: Sequence[T]) -> T:
    return of[int(rng.integers(len(of)))]


def gaps(rng: Random) -> tuple[int, int, int]:
    a, b, c = (int(x) if rng.random() < 0.5 else 0 for x in rng.integers(0, 40, 3))
    return a, b, c


def extent(rng: Random, most: Sequence[int]) -> int:
    """Of a size that one of ``most`` bounds."""
    return int(rng.integers(1, one(rng, most) + 1))


def narrowed(rng: Random, groups: Sequence[str]) -> frozenset[str]:
    """Which of these groups of operands have rows at odd addresses: mostly none or all."""
    kept = one(rng, (0.0, 0.0, 0.0, 1.0, 0.5))
    return frozenset(g for g in groups if rng.random() < kept)


def planted(case: Product, rng: Random, read: Collection[str]) -> Product:
    """The same, one time of ten with a NaN or an infinity in some of the operands that are
    ``read``."""
    if rng.random() >= 0.1:
        return case
    values = []
    for name, placement in operands.layout(case).placements.items():
        if name in read and 0 not in placement.shape and rng.random() < 0.5:
            # of an infinite scale times 0 kernels, which scale sums, know nothing
            value = np.nan if name.endswith("_scales") else one(rng, (np.nan, np.inf, -np.inf))
            values.append(
                InjectedValue(name, value, tuple(int(rng.integers(n)) for n in placement.shape))
            )
    return replace(case, injected=tuple(values))
