"""Merging partial attentions (split-KV) on arrays."""

from __future__ import annotations

from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.attention.merge import MergeStates
from kernelseam.descriptors.common.layouts import LAYOUTS, order
from kernelseam.descriptors.common.operands import axes, canonical
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import operate
from kernelseam.ops.operation import Operation, check_rank, not_none
from kernelseam.ops.signatures import Array


def merge_states(
    outs: Array,
    lses: Array,
    *,
    layout: str = "bhsd",
    out: Any = None,
    out_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> tuple[Array, Array]:
    """Merge attentions of the same queries over disjoint parts of the keys into the attention over
    all of them.

    ``outs`` [N, B, H, S, D_v] and ``lses`` [N, B, H, S] (float32, float64 where outs are) are the
    parts' results and log-sum-exps, stacked; keep them float32 (``out_dtype`` of ``attention``)
    where their rounding matters. A part whose LSE is −inf saw no key. To merge incrementally, stack
    the merged state with the next part's. ``layout`` "bshd": ``outs`` [N, B, S, H, D_v], the head
    after the row, as ``attention`` gives them then; LSEs stay as they are.

    Returns (result [B, H, S, D_v], in ``layout``'s order, of ``out_dtype``, by default that of
    outs, and its LSE [B, H, S]). Raises InvalidValue for what does not fit together.
    """
    arrays = {"outs": outs, "lses": lses, **not_none(out=out)}
    results = operate(merge_work, arrays, (out_dtype, layout), backend, implementation, stream)
    return results["out"] if out is None else out, results["lse"]


def merge_work(operation: Operation, out_dtype: DType | str | None, layout: str) -> None:
    infos = operation.infos
    rows = LAYOUTS[order("layout", layout, LAYOUTS)].replace("D", "D_v")
    labels = ["N", *rows.split()]
    check_rank("outs", infos["outs"], labels)
    shape = infos["outs"].shape
    dtype = None if out_dtype is None else DType.of(out_dtype, "out_dtype")
    if "out" not in infos:
        operation.new_result("out", shape[1:], dtype or infos["outs"].dtype, "outs", "out_dtype")
    elif dtype not in (None, infos["out"].dtype):
        raise InvalidValue(
            "out_dtype", dtype, f"out is an array of {infos['out'].dtype}", "Give one of the two"
        )
    lse = [shape[labels.index(label)] for label in ("B", "H", "S")]
    operation.new_result("lse", lse, infos["outs"].dtype.accumulator, "outs")
    operation.launch(infos, lambda: _descriptor(infos, rows))


_STRIDES = {"N": "part", "B": "batch", "H": "head", "S": "row"}


def _descriptor(infos: dict[str, ArrayInfo], rows: str) -> MergeStates:
    """``rows``: the order of a result's axes."""
    known: dict[str, int] = {}
    fields: dict[str, Any] = dict(infos)
    for name, labels in (("outs", f"N {rows}"), ("lses", "N B H S"), ("out", rows)):
        extents = axes(name, infos[name], labels, known)
        known |= dict(zip(labels.split(), extents, strict=True))
        for label, step in zip(labels.split()[:-1], canonical(infos[name]), strict=False):
            fields[f"stride_{name}_{_STRIDES[label]}"] = step
    return MergeStates(
        parts=known["N"],
        batch=known["B"],
        num_heads=known["H"],
        rows=known["S"],
        value_dim=known["D_v"],
        **fields,
    )
