"""``bind(check=True)`` of rows between tokens and the pages of a cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kernelseam.descriptors.cache.problem import PagedCacheProblem
from kernelseam.oracle import cache as oracle
from kernelseam.oracle import check
from kernelseam.oracle.cache import CacheRows
from kernelseam.oracle.operands import Array, Operands
from kernelseam.oracle.verifier import Verifier


class PagedCacheVerifier(Verifier[PagedCacheProblem]):
    """All tokens that have a place; where two have the same, neither."""

    def kept(self, problem: PagedCacheProblem, operands: Operands) -> dict[str, Array]:
        return {
            r.name: operands.strided(r, r.shape[0]).copy() for r in problem.operands if r.may_alias
        }

    def verdict(
        self, problem: PagedCacheProblem, operands: Operands, kept: dict[str, Array], flushed: bool
    ) -> check.Verdict:
        p, s = problem, problem.spec
        x = {r.name: operands.strided(r, r.shape[0]) for r in p.operands} | kept
        found = own_places(p, x)
        index, page, row, position = np.array(found, np.int64).reshape(-1, 4).T
        b, t = np.divmod(index, max(p.S, 1))

        def in_pages(y: Array) -> Array:
            """[1, head, token, column]."""
            return y[page, :, row].swapaxes(0, 1)[None]

        def of_tokens(y: Array) -> Array:
            return y[b, :, t].swapaxes(0, 1)[None]

        expected, results = dict[str, CacheRows](), dict[str, Array]()
        scales, written = dict[str, Array](), dict[str, Array]()
        gather = s.direction == "gather"
        tables = (x["cos"], x["sin"]) if s.rotary else None
        for name in ("q", "k", "v"):
            if name not in x:
                continue
            pages = f"{name}_pages" if name != "q" else "q_out"
            result = name if gather else pages
            results[result] = of_tokens(x[result]) if gather or name == "q" else in_pages(x[pages])
            if gather:
                source = in_pages(x[pages])
            elif s.direction == "copy":
                source = x[name][x["sources"][b], :, t].swapaxes(0, 1)[None]
            else:
                source = of_tokens(x[name])
            if s.scaled and name != "q":
                own = x[f"{name}_scales"]
                each = in_pages(own) if s.scaled == "tokens" else own[[0], :, :1]
                if gather:
                    source = source.astype(np.float64) * each[..., None]
                else:
                    scales[result] = each
                    if s.scaled == "tokens":
                        written[result] = each
            if name == "v" or gather or s.direction == "copy":
                rows = oracle.copied(source)
            else:
                weight = x.get(f"{name}_norm")
                rows = oracle.transformed(source, weight, p.eps, tables, s.rotary, position[None])
            expected[result] = replace(rows, exact=s.exact)
        accumulator = s.dtype.accumulator
        return oracle.verdict(expected, results, scales, accumulator, written, flushed)


def own_places(p: PagedCacheProblem, x: Mapping[str, Array]) -> list[tuple[int, int, int, int]]:
    """(token, page, row, position) of the tokens that have a place of their own."""
    found: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for token in range(p.tokens):
        b, t = divmod(token, p.S)
        entry, begin, end = b, 0, p.S
        if p.spec.packed:
            offsets = x["cu_seqlens"].tolist()
            entry = bisect_right(offsets, t) - 1
            if not 0 <= entry < p.sequences:
                continue
            begin, end = offsets[entry], offsets[entry + 1]
        at = t - begin
        if p.spec.position == "given":
            at = int(x["positions"][b, t])
        elif p.spec.position == "lengths":
            length = int(x["kv_lengths"][entry])
            if p.spec.direction == "append":
                at = length - (end - t)
            elif at >= length:
                continue
        if p.spec.slots:
            slot = int(x["slot_mapping"][b, t])
            if slot < 0:
                continue
            page, row = divmod(slot, p.page_size)
        elif not 0 <= at < p.table_width * p.page_size:
            continue
        else:
            page, row = int(x["block_table"][entry, at // p.page_size]), at % p.page_size
        found.setdefault((page, row), []).append((token, page, row, at))
    gathers = p.spec.direction == "gather"
    return [y for same in found.values() if len(same) == 1 or gathers for y in same]
