"""Random parity cases: kinds, each of which is hardly more than one spec, and problems of a
kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.drawing import attention, products
from benchmarks.drawing.common import Kind, Random

__all__ = ["FAMILIES", "Family", "Kind"]


@dataclass(frozen=True)
class Family:
    """Operations whose problems are drawn together."""

    kinds: Callable[[Random, int], Sequence[Kind]]
    """So many different ones."""
    specs: int
    """How many kinds unless another number is asked for: what compiles in a minute or two."""


FAMILIES = {"attention": Family(attention.kinds, 60), "products": Family(products.kinds, 40)}
