"""Merging partial attentions (split-KV) on arrays."""

from __future__ import annotations

from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.attention.merge import MergeStates
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
    the merged state with the next part's.

    Returns (result [B, H, S, D_v] of ``out_dtype``, by default that of outs, and its LSE [B, H,
    S]). Raises InvalidValue for what does not fit together.
    """
    arrays = {"outs": outs, "lses": lses, **not_none(out=out)}
    results = operate(merge_work, arrays, (out_dtype,), backend, implementation, stream)
    return results["out"] if out is None else out, results["lse"]


def merge_work(operation: Operation, out_dtype: DType | str | None) -> None:
    infos = operation.infos
    check_rank("outs", infos["outs"], ("N", "B", "H", "S", "D_v"))
    shape = infos["outs"].shape
    dtype = None if out_dtype is None else DType.of(out_dtype, "out_dtype")
    if "out" not in infos:
        operation.new_result("out", shape[1:], dtype or infos["outs"].dtype, "outs", "out_dtype")
    elif dtype not in (None, infos["out"].dtype):
        raise InvalidValue(
            "out_dtype", dtype, f"out is an array of {infos['out'].dtype}", "Give one of the two"
        )
    operation.new_result("lse", shape[1:4], infos["outs"].dtype.accumulator, "outs")
    operation.launch(infos, lambda: _descriptor(infos))


def _descriptor(infos: dict[str, ArrayInfo]) -> MergeStates:
    parts, batch, heads, rows, dim = axes("outs", infos["outs"], "N B H S D_v", {})
    known = {"N": parts, "B": batch, "H": heads, "S": rows, "D_v": dim}
    axes("lses", infos["lses"], "N B H S", known)
    axes("out", infos["out"], "B H S D_v", known)
    names = {
        "outs": ("part", "batch", "head", "row"),
        "lses": ("part", "batch", "head"),
        "out": ("batch", "head", "row"),
    }
    strides = {
        f"stride_{n}_{axis}": s
        for n, labels in names.items()
        for axis, s in zip(labels, canonical(infos[n]), strict=False)
    }
    fields: dict[str, Any] = {**infos, **strides}
    return MergeStates(
        parts=parts, batch=batch, num_heads=heads, rows=rows, value_dim=dim, **fields
    )
