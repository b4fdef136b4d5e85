"""Products of matrices that lie anywhere in arrays, as one launch of the batched GEMM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors import BatchedGemmPointers, BatchedGemmStrided
from kernelseam.descriptors.common.wording import Wording
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import Operation
from kernelseam.ops.folding import SUMMED, Axis, fold, offsets

Operands = Mapping[str, ArrayInfo]


class _Uneven(Exception):
    """Axes that no batch and head strides walk, and the descriptor's other fields."""

    def __init__(self, axes: Sequence[Axis], fields: Mapping[str, Any]) -> None:
        self.axes, self.fields = axes, fields


def check_matrices(name: str, info: ArrayInfo) -> None:
    """Refuse an array of which no matrix axis is contiguous."""
    if _apart(info) and _apart(swapped(info)):
        raise InvalidValue(
            name,
            _strides(info),
            "one of the two matrix axes must be contiguous (stride 1)",
            "Copy the array into a contiguous one",
        )


def matrices(info: ArrayInfo, transposed: bool = False) -> ArrayInfo:
    """An array of two to four axes as [batch, head, row, column]; or its matrices' transposes,
    where they lie."""
    lead = 4 - len(info.shape)
    shape, strides = info.shape, info.strides
    if lead == 1:
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])
    elif lead == 2:
        shape, strides = (1, 1, *shape), (0, 0, *strides)
    found = replace(info, shape=shape, strides=strides) if lead else info
    return swapped(found) if transposed else found


def swapped(info: ArrayInfo) -> ArrayInfo:
    """The matrices' transposes, in the same memory."""
    return replace(
        info,
        shape=(*info.shape[:-2], *info.shape[:-3:-1]),
        strides=(*info.strides[:-2], *info.strides[:-3:-1]),
    )


def multiply(
    operation: Operation,
    operands: Operands,
    names: Mapping[str, str],
    alpha: float,
    beta: float,
    precision: str | None = None,
) -> None:
    """C = alpha·Σ A·B + beta·C + bias + residual, in one launch.

    ``operands``: A [batch, head, M, K], B [batch, head, K, N], C and residual [batch, head, M, N],
    bias [batch, head, N]. A or B may have fewer heads, each of which then meets several in a row.
    Products are summed along an axis of which C has one entry and they more; bias repeats along an
    axis of which it has one. ``names``: the operation's arrays that A, B and C are.

    Where axes do not step evenly as one of batches and one of heads, the launch is one over lists
    of addresses, which synchronises.
    """
    given = operation.infos
    if _apart(operands["C"]) and not _apart(swapped(operands["C"])):  # Cᵀ = Bᵀ·Aᵀ
        if "bias" in operands:
            raise InvalidValue(
                names["C"],
                _strides(given[names["C"]]),
                "must have contiguous rows where a bias is added",
                "Give a row-major array",
            )
        turned = {"A": "B", "B": "A"}
        operands = {turned.get(n, n): swapped(x) for n, x in operands.items()}
        names = {turned.get(n, n): x for n, x in names.items()}
    ordered = {n: operands[n] for n in ("A", "B", "C", "bias", "residual") if n in operands}
    told = Wording(names).told
    try:
        try:
            operation.launch(
                ordered,
                lambda: _descriptor(ordered, names, given, alpha, beta, precision),
                names,
                told,
            )
        except _Uneven as e:
            operation.launch_lists(ordered, _by_lists(ordered, e.axes, e.fields), names)
    except InvalidValue as e:
        raise told(e) from None


def _by_lists(
    operands: Operands, axes: Sequence[Axis], fields: Mapping[str, Any]
) -> BatchedGemmPointers:
    """The same products, each matrix by its address; those that are summed come one after the
    other."""
    own, summed = (
        [x for x in axes if (x.strides["C"] is SUMMED) is sums] for sums in (False, True)
    )
    each = math.prod(x.extent for x in summed)
    given = dict[str, Any](fields)
    for name, x in operands.items():
        walked = [*own, *summed] if name in "AB" else own
        given[f"{name}_ptrs"] = x.pointer + offsets(name, walked) * x.dtype.itemsize
        given["dtype" if name in "AB" else f"dtype_{name.lower()}"] = x.dtype
    return BatchedGemmPointers(
        batch=math.prod(x.extent for x in own), num_heads=each, c_head_group=each, **given
    )


def _descriptor(
    operands: Operands,
    names: Mapping[str, str],
    given: Operands,
    alpha: float,
    beta: float,
    precision: str | None,
) -> BatchedGemmStrided:
    a, b, c = (operands[n] for n in "ABC")
    M, N, K = c.shape[2], c.shape[3], a.shape[3]
    axes = [*_lead(operands)]
    once = dict.fromkeys(operands, 0)
    if M == 1 < a.shape[2]:  # products run over rows, too, or over columns
        axes.append(Axis(a.shape[2], {**once, "A": a.strides[2], "C": SUMMED}))
        a = replace(a, shape=(*a.shape[:2], 1, K))
    if N == 1 < b.shape[3]:
        axes.append(Axis(b.shape[3], {**once, "B": b.strides[3], "C": SUMMED}))
        b = replace(b, shape=(*b.shape[:3], 1))
    if 0 in (*a.shape[:2], *b.shape[:2]) and 0 not in c.shape[:2]:  # a sum of nothing
        alpha, axes = 0.0, [Axis(c.shape[i], {**once, "C": c.strides[i]}) for i in (0, 1)]
    fields: dict[str, Any] = {
        "M": M,
        "N": N,
        "K": K,
        "alpha": alpha,
        "beta": beta,
        "precision": precision,
    }
    for name, info in {**operands, "A": a, "B": b}.items():
        if name == "bias":
            continue
        transposed = _apart(info)
        if transposed and name == "residual":
            raise InvalidValue(
                name,
                _strides(given[name]),
                f"must be contiguous along the axis that {names['C']} is",
                f"Copy it, or give {names['C']} in its order",
            )
        lies = swapped(info) if transposed else info
        fields[f"stride_{name.lower()}_row"] = lies.strides[2] if lies.shape[2] > 1 else None
        if name in "AB":
            fields[f"{name.lower()}_transposed"] = transposed
    folded = fold(axes)
    if folded is None and not K:  # nothing is read
        axes = [
            replace(x, strides={**x.strides, "A": 0, "B": 0})
            for x in axes
            if x.strides["C"] is not SUMMED
        ]
        folded = fold(axes)
    if folded is None:
        raise _Uneven(axes, fields)
    return BatchedGemmStrided(**fields, **folded, **dict[str, Any](operands))


def _lead(operands: Operands) -> tuple[Axis, Axis, Axis]:
    """The axes of batches, of heads that stand for several others, and of those."""
    a, b, c = (operands[n] for n in "ABC")
    batch, heads = max(a.shape[0], b.shape[0]), max(a.shape[1], b.shape[1])
    few = min(x.shape[1] for x in (a, b, c) if x is not c or c.shape[1] > 1)
    within = heads // few if few else 1
    found: list[dict[str, int | None]] = [{}, {}, {}]
    for name, x in operands.items():
        none = SUMMED if name == "C" else 0
        n, step = x.shape[1], x.strides[1]
        found[0][name] = x.strides[0] if x.shape[0] == batch else none
        found[1][name] = step * within if n == heads else step if n == few else none
        found[2][name] = step if n == heads else none
    return Axis(batch, found[0]), Axis(few, found[1]), Axis(within, found[2])


def _apart(info: ArrayInfo) -> bool:
    """Whether the entries of a row do not lie side by side."""
    return info.strides[-1] != 1 and info.shape[-1] > 1 and 0 not in info.shape


def _strides(info: ArrayInfo) -> str:
    return f"strides {list(info.strides)}"
