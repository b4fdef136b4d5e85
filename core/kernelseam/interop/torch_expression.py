"""Values of expressions in torch, with its gradients: what users' functions say of the tensors that
they capture, whatever library's functions they call. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from kernelseam.expressions.epilogues import EpilogueExpression
from kernelseam.expressions.evaluation import leaf
from kernelseam.expressions.nodes import Node, Type, order
from kernelseam.expressions.operations import OPERATIONS
from kernelseam.expressions.scores import ScoreExpression

Tensor = Any
_Expression = TypeVar("_Expression", ScoreExpression, EpilogueExpression)


def evaluate(
    root: Node,
    coordinates: Mapping[str, Any],
    numbers: Sequence[int | float],
    arrays: Sequence[Any],
    like: Tensor,
) -> Tensor:
    """``root`` as ``expressions.evaluation.evaluate`` has it: integers are int64, floats of the
    dtype of ``like``, on whose device all is. ``coordinates`` broadcast."""
    dtypes = {Type.BOOLEAN: torch.bool, Type.FLOAT: like.dtype}
    tensors = [_tensor(x, like) for x in arrays]
    done: dict[Node, Tensor] = {}
    for n in order([root]):
        value = _value(n, [done[a] for a in n.arguments], coordinates, numbers, tensors)
        dtype = dtypes.get(n.type, torch.int64)
        done[n] = torch.as_tensor(value, dtype=dtype, device=like.device)
    return done[root]


def _value(
    n: Node,
    x: list[Tensor],
    coordinates: Mapping[str, Any],
    numbers: Sequence[int | float],
    arrays: Sequence[Tensor],
) -> Any:
    match n.operation:
        case "constant" | "coordinate" | "argument":
            return leaf(n, coordinates, numbers)
        case "detach":
            return x[0].detach()
        case "cast" if x[0].is_floating_point() and n.type in (Type.INT32, Type.INT64):
            most = 2.0**31 if n.type is Type.INT32 else 2.0**62
            return x[0].nan_to_num(0.0).clamp(-most, most)
        case "cast":
            return x[0]
        case "load":
            array = arrays[n.value[0]]
            return array[tuple(_place(i, e) for i, e in zip(x, array.shape, strict=True))]
    return OPERATIONS[n.operation].compute(torch, *x)


def _place(index: Tensor, extent: int) -> Tensor:
    """As ``expressions.evaluation.place``."""
    i = index.long()
    return torch.where(i < 0, i + extent, i).clamp(0, extent - 1)


def captured_tensors(expression: ScoreExpression | EpilogueExpression) -> list[Tensor]:
    """What an autograd function takes as inputs beside its operands, and keeps: gradients start
    from the expression that the result was made by, and torch refuses tensors changed since."""
    return [x for x in expression.arrays if isinstance(x, torch.Tensor)]


def over(expression: _Expression, tensors: Iterable[Tensor]) -> _Expression:
    """The expression over these in the place of ``captured_tensors``."""
    rest = iter(tensors)
    arrays = tuple(next(rest) if isinstance(x, torch.Tensor) else x for x in expression.arrays)
    return replace(expression, arrays=arrays)


def gradients_by_tensors(
    root: Node,
    coordinates: Mapping[str, Any],
    expression: _Expression,
    wanted: Sequence[bool],
    arriving: Tensor,
    like: Tensor,
) -> list[Tensor | None]:
    """The gradients by those of ``captured_tensors`` that are wanted, given those by every element
    of ``root``, whose shape it broadcasts to."""
    leaves = [
        x.detach().requires_grad_(w)
        for x, w in zip(captured_tensors(expression), wanted, strict=True)
    ]
    with torch.enable_grad():
        arrays = over(expression, leaves).arrays
        y = evaluate(root, coordinates, expression.numbers, arrays, like).expand(arriving.shape)
        asked = [x for x in leaves if x.requires_grad]
        made = iter(torch.autograd.grad(y, asked, arriving.to(y.dtype), allow_unused=True))
    return [next(made) if w else None for w in wanted]


def _tensor(x: Any, like: Tensor) -> Tensor:
    """Floats in the dtype that they are computed in, in which gradients are added up, too."""
    if not isinstance(x, torch.Tensor):
        host = np.asarray(x)
        x = torch.as_tensor(host if host.dtype.kind in "biuf" else host.astype(np.float32))
    return x.to(like) if x.is_floating_point() else x.to(like.device)
