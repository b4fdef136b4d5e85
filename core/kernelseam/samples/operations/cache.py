"""Rows between tokens and the pages of a cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelseam.descriptors import PagedCache
from kernelseam.oracle import cache as oracle
from kernelseam.oracle.cache import CacheRows
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.samples.cache_case import CacheCase
from kernelseam.samples.data import cache as data
from kernelseam.samples.operations.operation import Arrays, Operation, Placed

Expected = tuple[dict[str, CacheRows], dict[str, Array]]
"""Rows by result, and scales that were given, by result."""


class PagedCaches(Operation[CacheCase, Expected]):
    """Append, gather, copy."""

    name, data = "paged_cache", data

    def repeatable(self, case: CacheCase) -> bool:
        return not case.in_place

    def describe(self, case: CacheCase, placed: Placed) -> PagedCache:
        return data.describe(case, placed.layout, placed.addresses)

    def expected(self, case: CacheCase, inputs: Arrays) -> Expected:
        rows, scales = dict[str, CacheRows](), dict[str, Array]()
        if case.direction == "copy":
            return {f"{n}_pages": oracle.copied(inputs[n][inputs["sources"]]) for n in "kv"}, {}
        stored = (data.places(case).slots >= 0)[:, None, :, None]
        positions = np.clip(data.places(case).positions, 0, data.places(case).ends - 1)
        tables = (inputs["cos"], inputs["sin"]) if case.rotary else None
        exact = case.dtype is case.pages_dtype and not (case.rotary or case.norm or case.scaled)
        for name in data.outputs(case):
            if name.endswith("_scales"):
                continue
            gather, source = case.direction == "gather", name[0]
            x = inputs[f"{source}_pages" if gather else source]
            if gather and case.scaled:
                x = x.astype(np.float64) * inputs[f"{source}_scales"][..., None]
            elif case.scaled == "heads" and name != "q_out":
                scales[name] = inputs[f"{source}_scales"]
            if source == "v" or gather:
                of = oracle.copied(x)
                of = replace(of, exact=exact)
            else:
                weight = inputs.get(f"{source}_norm")
                of = oracle.transformed(x, weight, 1e-5, tables, case.rotary, positions)
                of = replace(of, exact=exact)
            other = x.astype(np.float64) if case.in_place and name == "q_out" else 0.0
            rows[name] = replace(of, value=np.where(stored, of.value, other))
        return rows, scales

    def verdict(
        self, case: CacheCase, expected: Expected, results: Arrays, flushed: bool = False
    ) -> Verdict:
        rows, scales = expected
        written = {}
        if case.scaled == "tokens" and case.direction == "append":
            stored = (data.places(case).slots >= 0)[:, None]
            for name in rows:
                if name != "q_out":
                    own = results[f"{name[0]}_scales"]
                    written[name] = np.where(stored, own, 2.0**-120)
            scales = {**scales, **written}
        return oracle.verdict(rows, results, scales, case.dtype.accumulator, written, flushed)
