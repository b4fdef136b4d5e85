"""Products of matrices of any batch strides as one launch of the batched GEMM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors import BatchedGemmPointers, BatchedGemmStrided
from kernelseam.descriptors.common.wording import Wording
from kernelseam.descriptors.gemm.fields import SCALES
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import EpilogueExpression
from kernelseam.ops.expressions import captured_in, reductions_in
from kernelseam.ops.folding import SUMMED, Axis, fold, offsets
from kernelseam.ops.operation import Operation

Operands = Mapping[str, ArrayInfo]


class _IrregularStrides(Exception):
    """No batch and head strides describe these axes. ``fields``: the descriptor's other fields."""

    def __init__(self, axes: Sequence[Axis], fields: Mapping[str, Any]) -> None:
        self.axes, self.fields = axes, fields


def check_matrices(name: str, info: ArrayInfo) -> None:
    """Raise InvalidValue unless one of the two matrix axes is contiguous."""
    if is_strided(info) and is_strided(transpose(info)):
        raise InvalidValue(
            name,
            _strides(info),
            "one of the two matrix axes must be contiguous (stride 1)",
            "Copy the array into a contiguous one",
        )


def matrices(info: ArrayInfo, transposed: bool = False) -> ArrayInfo:
    """An array of two to four axes viewed as [batch, head, row, column], or [batch, head, column,
    row] where ``transposed``."""
    lead = 4 - len(info.shape)
    shape, strides = info.shape, info.strides
    if lead == 1:
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])
    elif lead == 2:
        shape, strides = (1, 1, *shape), (0, 0, *strides)
    view = replace(info, shape=shape, strides=strides) if lead else info
    return transpose(view) if transposed else view


def transpose(info: ArrayInfo) -> ArrayInfo:
    """The same array with its matrix axes exchanged."""
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
    scale_block: tuple[int, int, int] | None = None,
    epilogue: EpilogueExpression | None = None,
) -> None:
    """C = alpha·Σ A·B + beta·C + bias + residual, and its epilogue, in one launch.

    ``operands``: A [batch, head, M, K], B [batch, head, K, N], C, residual and preactivation
    [batch, head, M, N], bias [batch, head, N], a_scales [batch, head, M], b_scales [batch, head,
    N], with ``scale_block`` of blocks and an axis of blocks of k behind. A or B may have fewer
    heads: each is then used by several consecutive heads. Products are summed along an axis
    on which C has extent 1 and A or B more; bias
    broadcasts along axes of extent 1. ``names``: the caller's arrays that A, B and C are.

    Where the strides do not collapse into one of batches and one of heads, the launch takes lists
    of addresses, and the call synchronises.
    """
    infos = operation.infos
    if is_strided(operands["C"]) and not is_strided(transpose(operands["C"])):  # Cᵀ = Bᵀ·Aᵀ
        if "bias" in operands or epilogue is not None:
            why = "a bias is added" if "bias" in operands else "there is an epilogue"
            raise InvalidValue(
                names["C"],
                _strides(infos[names["C"]]),
                f"must have contiguous rows where {why}",
                "Give a row-major array",
            )
        exchanged = {"A": "B", "B": "A", "a_scales": "b_scales", "b_scales": "a_scales"}
        operands = {
            exchanged.get(n, n): x if n in SCALES else transpose(x) for n, x in operands.items()
        }
        if scale_block is not None:
            scale_block = (scale_block[1], scale_block[0], scale_block[2])
        names = {n: n for n in SCALES if n in operands} | dict(names)
        names = {exchanged.get(n, n): x for n, x in names.items()}
    known = ("A", "B", "C", "bias", "residual", "preactivation", *SCALES)
    ordered = {n: operands[n] for n in known if n in operands}
    reword = Wording(names).reworded
    try:
        try:
            operation.launch(
                {**ordered, **captured_in(infos), **reductions_in(infos)},
                lambda: _descriptor(
                    ordered, names, infos, alpha, beta, precision, scale_block, epilogue
                ),
                names,
                reword,
            )
        except _IrregularStrides as e:
            for name, remedy in (
                ("a_scales", "Copy the arrays, or scale with alpha"),
                ("epilogue", "Copy the arrays"),
            ):
                if name in ordered or (name == "epilogue" and epilogue is not None):
                    raise InvalidValue(
                        name,
                        "given",
                        "needs arrays whose batch and head axes each have one stride",
                        remedy,
                    ) from None
            operation.launch_lists(ordered, _pointer_descriptor(ordered, e.axes, e.fields), names)
    except InvalidValue as e:
        raise reword(e) from None


def _pointer_descriptor(
    operands: Operands, axes: Sequence[Axis], fields: Mapping[str, Any]
) -> BatchedGemmPointers:
    """The same products over lists of matrix addresses; products of one sum are consecutive."""
    kept, summed = (
        [x for x in axes if (x.strides["C"] is SUMMED) is sums] for sums in (False, True)
    )
    terms = math.prod(x.extent for x in summed)
    all_fields = dict[str, Any](fields)
    for name, x in operands.items():
        walked = [*kept, *summed] if name in "AB" else kept
        all_fields[f"{name}_ptrs"] = x.pointer + offsets(name, walked) * x.dtype.itemsize
        all_fields["dtype" if name in "AB" else f"dtype_{name.lower()}"] = x.dtype
    return BatchedGemmPointers(
        batch=math.prod(x.extent for x in kept), num_heads=terms, c_head_group=terms, **all_fields
    )


def _descriptor(
    operands: Operands,
    names: Mapping[str, str],
    infos: Operands,
    alpha: float,
    beta: float,
    precision: str | None,
    scale_block: tuple[int, int, int] | None,
    epilogue: EpilogueExpression | None,
) -> BatchedGemmStrided:
    a, b, c = (operands[n] for n in "ABC")
    pairs = epilogue is not None and bool(epilogue.structure.pairs)
    M, N, K = c.shape[2], b.shape[3] if pairs else c.shape[3], a.shape[3]
    axes = [*_batch_axes(operands)]
    repeated = dict.fromkeys(operands, 0)
    if M == 1 < a.shape[2]:  # sum over rows of A, or columns of B, as over a batch axis
        axes.append(Axis(a.shape[2], {**repeated, "A": a.strides[2], "C": SUMMED}))
        a = replace(a, shape=(*a.shape[:2], 1, K))
    if N == 1 < b.shape[3]:
        axes.append(Axis(b.shape[3], {**repeated, "B": b.strides[3], "C": SUMMED}))
        b = replace(b, shape=(*b.shape[:3], 1))
    if 0 in (*a.shape[:2], *b.shape[:2]) and 0 not in c.shape[:2]:  # an empty sum
        alpha, axes = 0.0, [Axis(c.shape[i], {**repeated, "C": c.strides[i]}) for i in (0, 1)]
    fields: dict[str, Any] = {
        "M": M,
        "N": N,
        "K": K,
        "alpha": alpha,
        "beta": beta,
        "precision": precision,
    }
    if scale_block is not None:
        fields["scale_block"] = scale_block
    if epilogue is not None:
        fields["epilogue"] = epilogue
    for name, info in {**operands, "A": a, "B": b}.items():
        if name in SCALES:
            axis = "row" if name == "a_scales" else "column"
            fields[f"stride_{name}_{axis}"] = info.strides[2] if info.shape[2] > 1 else None
            if scale_block is not None:
                fields[f"stride_{name}_k"] = info.strides[3] if info.shape[3] > 1 else None
        if name in ("bias", *SCALES):
            continue
        transposed = is_strided(info)
        if transposed and name in ("residual", "preactivation"):
            raise InvalidValue(
                name,
                _strides(infos[name]),
                f"must be contiguous along the same axis as {names['C']}",
                f"Copy it, or give {names['C']} with the same order of axes",
            )
        rows = transpose(info) if transposed else info
        fields[f"stride_{name.lower()}_row"] = rows.strides[2] if rows.shape[2] > 1 else None
        if name in "AB":
            fields[f"{name.lower()}_transposed"] = transposed
    in_order = epilogue is not None and epilogue.structure.counts_matrices
    folded = fold(axes, in_order)
    if folded is None and not K:  # nothing is read
        axes = [
            replace(x, strides={**x.strides, "A": 0, "B": 0})
            for x in axes
            if x.strides["C"] is not SUMMED
        ]
        folded = fold(axes, in_order)
    if folded is None:
        raise _IrregularStrides(axes, fields)
    return BatchedGemmStrided(**fields, **folded, **dict[str, Any](operands))


def _batch_axes(operands: Operands) -> tuple[Axis, Axis, Axis]:
    """The axes of batches, of groups of heads (one head of the operand with fewest), and of heads
    within a group."""
    a, b, c = (operands[n] for n in "ABC")
    batch, heads = max(a.shape[0], b.shape[0]), max(a.shape[1], b.shape[1])
    few = min(x.shape[1] for x in (a, b, c) if x is not c or c.shape[1] > 1)
    group = heads // few if few else 1
    strides: list[dict[str, int | None]] = [{}, {}, {}]
    for name, x in operands.items():
        none = SUMMED if name == "C" else 0
        n, step = x.shape[1], x.strides[1]
        strides[0][name] = x.strides[0] if x.shape[0] == batch else none
        strides[1][name] = step * group if n == heads else step if n == few else none
        strides[2][name] = step if n == heads else none
    return Axis(batch, strides[0]), Axis(few, strides[1]), Axis(group, strides[2])


def is_strided(info: ArrayInfo) -> bool:
    """Whether the last axis is not contiguous."""
    return info.strides[-1] != 1 and info.shape[-1] > 1 and 0 not in info.shape


def _strides(info: ArrayInfo) -> str:
    return f"strides {list(info.strides)}"
