"""Rows of k and v between tokens and pages, on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Device, PlanParts
from kernelseam.descriptors.cache.contents import LEAST_SCALE
from kernelseam.descriptors.cache.places import Places, places_of
from kernelseam.descriptors.cache.problem import PagedCacheProblem
from kernelseam.dtypes import LARGEST
from kernelseam.reference.implementation import NumpyImplementation, operand_arrays, recorded
from kernelseam.reference.rotary import rotate

Array = npt.NDArray[Any]
_TOKENS = 256
"""Of one block."""


class NumpyPagedCache(NumpyImplementation[PagedCacheProblem]):
    """Every dtype, any strides; computed in float32, rows of float64 in float64."""

    operation = "paged_cache"

    def build(self, problem: PagedCacheProblem, device: Device) -> PlanParts:
        return PlanParts((CacheStep(problem, device),), 0)


class CacheStep:
    """Some tokens after others, all heads at once."""

    def __init__(self, problem: PagedCacheProblem, device: Device) -> None:
        self.problem = problem
        self.record = recorded("paged_cache", device)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p = self.problem
        x = operand_arrays(p.operands, pointers)

        def launch(stream: int) -> None:
            places = places_of(p, x)
            entries, tokens = np.nonzero(places.stored)
            with np.errstate(all="ignore"):
                for i in range(0, len(entries), _TOKENS):
                    _move(p, x, places, entries[i : i + _TOKENS], tokens[i : i + _TOKENS])

        return launch


def _move(p: PagedCacheProblem, x: Mapping[str, Array], at: Places, b: Array, s: Array) -> None:
    """Rows [tokens, heads, columns] of some tokens, each with a place."""
    page, row, position = at.page[b, s], at.row[b, s], at.position[b, s]
    lead = x["sources"][b] if p.spec.direction == "copy" else b
    least = np.float32(LEAST_SCALE)
    for name in ("q", "k", "v"):
        if name not in x:
            continue
        pages = x.get(f"{name}_pages")
        if p.spec.exact and pages is not None:
            if p.spec.direction == "gather":
                x[name][b, :, s] = pages[page, :, row]
            else:
                pages[page, :, row] = x[name][lead, :, s]
            continue
        scales = x.get(f"{name}_scales")
        if p.spec.direction == "gather" and pages is not None:
            y = pages[page, :, row].astype(p.compute_dtype.numpy)
            if scales is not None:
                y *= _of_rows(p, scales, page, row)[..., None]
            x[name][b, :, s] = y
            continue
        y = x[name][b, :, s].astype(p.compute_dtype.numpy)
        if name != "v":
            _transform(p, x, y, x.get(f"{name}_norm"), position)
        if pages is None:
            x["q_out"][b, :, s] = y
            continue
        if p.spec.scaled == "tokens" and scales is not None:
            most = np.fmax.reduce(np.abs(y), axis=2, initial=0)
            scales[page, :, row] = np.fmax(most / y.dtype.type(LARGEST[p.spec.dtype_pages]), least)
        if scales is not None:
            y /= np.fmax(_of_rows(p, scales, page, row), least)[..., None]
        if p.spec.dtype_pages.is_fp8:
            bound = y.dtype.type(LARGEST[p.spec.dtype_pages])
            np.clip(y, -bound, bound, out=y)
        pages[page, :, row] = y


def _of_rows(p: PagedCacheProblem, scales: Array, page: Array, row: Array) -> Array:
    """The scales of rows, [tokens, heads]."""
    return scales[page, :, row] if p.spec.scaled == "tokens" else scales[[0], :, 0]


def _transform(
    p: PagedCacheProblem, x: Mapping[str, Array], y: Array, weight: Array | None, position: Array
) -> None:
    """The norm and the rotation, in place."""
    kind = y.dtype.type
    if weight is not None:
        mean = np.einsum("thd,thd->th", y, y) / kind(p.spec.head_dim)
        y *= (1 / np.sqrt(mean + kind(p.eps)))[..., None]
        y *= weight
    if not p.spec.rotary:
        return
    # positions that are not checked may have no cosines
    bounded = np.clip(position, 0, p.max_position - 1)
    cos, sin = x["cos"][bounded][:, None], x["sin"][bounded][:, None]
    rotate(y, cos.astype(y.dtype), sin.astype(y.dtype), p.spec.rotary)
