"""Values of expressions in torch, with its gradients: what users' functions say of the tensors that
they capture, whatever library's functions they call. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kernelseam.expressions.evaluation import leaf
from kernelseam.expressions.nodes import Node, Type, order
from kernelseam.expressions.operations import OPERATIONS

Tensor = Any


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


def _tensor(x: Any, like: Tensor) -> Tensor:
    """Floats in the dtype that they are computed in, in which gradients are added up, too."""
    if not isinstance(x, torch.Tensor):
        host = np.asarray(x)
        x = torch.as_tensor(host if host.dtype.kind in "biuf" else host.astype(np.float32))
    return x.to(like) if x.is_floating_point() else x.to(like.device)
