"""``torch.ops.kernelseam.append_paged``, ``gather_paged`` and ``copy_pages``: pages are written in
place, and nothing is differentiated."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.descriptors.cache.options import AppendOptions, GatherOptions
from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS
from kernelseam.descriptors.common.options import scalars_of
from kernelseam.interop.torch_library.define import (
    absent_result,
    define,
    fake_result_like,
    fake_results_like,
    of_rank,
    result_like,
    results_like,
)
from kernelseam.interop.torch_library.dtypes import dtype_name, torch_dtype
from kernelseam.interop.torch_library.schemas import CHOSEN, given_by, schema_of, tensors_of
from kernelseam.ops import cache

Tensor = Any

APPEND = (
    *("k", "v", "k_pages", "v_pages", "k_scales", "v_scales", "slot_mapping", "block_table"),
    *("kv_lengths", "positions", "cu_seqlens", "q", "q_norm", "k_norm", "cos", "sin", "q_out"),
)
GATHER = (
    *("k_pages", "v_pages", "slot_mapping", "block_table", "kv_lengths", "cu_seqlens"),
    *("k_scales", "v_scales", "k", "v"),
)
COPY = ("k_pages", "v_pages", "sources", "block_table")


def _append_compute(*tensors: Tensor, **options: Any) -> Tensor:
    given: dict[str, Any] = dict.fromkeys(("v", "v_pages"))
    given |= given_by(APPEND, tensors)
    if "cos" in given or "sin" in given:
        given["rotary"] = given.pop("cos", None), given.pop("sin", None)
    if "q_out" in given:
        given["out"] = result_like(given.pop("q_out"))
    if "cu_seqlens" in given:
        given["cu_seqlens_q"] = given.pop("cu_seqlens")
    with torch.no_grad():
        result = cache.append_paged(**given, **options)
    return absent_result(tensors[0]) if result is None else result


def _append_fake(*tensors: Tensor, **options: Any) -> Tensor:
    given = given_by(APPEND, tensors)
    if "q_out" in given:
        return fake_result_like(given["q_out"])
    return given["q"].new_empty(given["q"].shape) if "q" in given else absent_result(tensors[0])


APPEND_PAGED = define(
    "append_paged(Tensor k, Tensor? v, Tensor(a!) k_pages, Tensor(b!)? v_pages, "
    "Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None, "
    f"{tensors_of(optional=APPEND[6:])}, *, "
    f"{schema_of(AppendOptions(), *scalars_of(AppendOptions))}, {CHOSEN}) -> Tensor",
    _append_compute,
    _append_fake,
)


def _gather_compute(*tensors: Tensor, out_dtype: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {"v_pages": None}
    given |= given_by(GATHER, tensors)
    if "cu_seqlens" in given:
        given["cu_seqlens_k"] = given.pop("cu_seqlens")
    if "k" in given or "v" in given:
        # rows beyond a sequence's stay as they are
        places = results_like({n: given.pop(n) for n in ("k", "v") if n in given}, ("k", "v"))
        given["out"] = places.get("k"), places.get("v")
    with torch.no_grad():
        k, v = cache.gather_paged(**given, out_dtype=dtype_name(out_dtype), **options)
    return k, absent_result(k) if v is None else v


def _gather_fake(k_pages: Tensor, v_pages: Tensor | None, *rest: Tensor, **options: Any) -> Any:
    given = given_by(GATHER[2:], rest)
    if "k" in given:
        made = fake_results_like({n: given[n] for n in ("k", "v") if n in given})
        return made["k"], made["v"] if "v" in made else absent_result(k_pages)
    axes = KV_LAYOUTS[options.get("kv_layout", "nhd")].split()
    labels = LAYOUTS[options.get("layout", "bshd")].split()

    def of(pages: Tensor) -> Tensor:
        of_rank("k_pages", pages, 4)
        known = dict(zip(axes, pages.shape, strict=True))
        if "slot_mapping" in given:
            shape = given["slot_mapping"].shape
            extents = dict(zip(("B", "S") if len(shape) == 2 else ("S",), shape, strict=True))
        elif "cu_seqlens" in given:
            extents = {"S": options.get("total_k") or 0}
        else:
            batch, width = of_rank("block_table", given["block_table"], 2).shape
            rows = options.get("max_seqlen_k")
            extents = {"B": batch, "S": width * known["N"] if rows is None else rows}
        extents |= {"H": known["H"], "D": known["D"]}
        shape = [extents[label] for label in labels if label in extents]
        return pages.new_empty(shape, dtype=options.get("out_dtype") or pages.dtype)

    return of(k_pages), absent_result(k_pages) if v_pages is None else of(v_pages)


GATHER_PAGED = define(
    f"gather_paged(Tensor k_pages, Tensor? v_pages, {tensors_of(optional=GATHER[2:])}, *, "
    f"{schema_of(GatherOptions(), *scalars_of(GatherOptions))}, {CHOSEN}) -> (Tensor, Tensor)",
    _gather_compute,
    _gather_fake,
    rules={"out_dtype": lambda name, x: torch_dtype(x, name, fp8=True)},
)


def _copy_compute(
    k_pages: Tensor, v_pages: Tensor | None, sources: Tensor, destinations: Tensor, **options: Any
) -> None:
    cache.copy_pages(k_pages, v_pages, sources, destinations, **options)


def _copy_fake(*tensors: Tensor, **options: Any) -> None:
    return None


COPY_PAGES = define(
    "copy_pages(Tensor(a!) k_pages, Tensor(b!)? v_pages, Tensor sources, Tensor destinations, *, "
    f'str kv_layout="nhd", {CHOSEN}) -> ()',
    _copy_compute,
    _copy_fake,
)
