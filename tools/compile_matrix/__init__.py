"""The compile matrix: for which specs the tests compile every kernel, and the table of kernel facts
has it. Together they take every code path of the device sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kernelseam.contract import Composition

from compile_matrix.covered import Covered
from compile_matrix.shared import shared

__all__ = ["Covered", "compile_matrix"]


def compile_matrix(kernels: Iterable[Composition] = ()) -> tuple[Covered, ...]:
    """Those of the shared kernels, and those of ``kernels``, a plugin's own."""
    return (*shared(), *(c for k in kernels for c in _own(k)))


def _own(kernel: Any) -> Iterator[Covered]:
    plugin = type(kernel).__module__.partition(".")[0]
    if plugin == "kernelseam_cuda":
        from compile_matrix import hopper_attention, hopper_products

        of = {**hopper_attention.SPECS, **hopper_products.SPECS}.get(type(kernel))
        yield from of(kernel) if of else ()
    elif plugin == "kernelseam_rocm":
        from compile_matrix import gfx950

        yield from gfx950.attention(kernel)
    else:
        yield from (Covered(kernel, spec) for spec in kernel.covering())
