"""Values of expressions in NumPy, over broadcast coordinates: what the reference computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.expressions.block_bits import unpacked
from kernelseam.expressions.blocks import SOME, WORD
from kernelseam.expressions.nodes import Node, Type, order
from kernelseam.expressions.operations import OPERATIONS


def place(index: Any, extent: int) -> Any:
    """An index as Python counts it, from the end where it is negative; then moved inside."""
    return np.clip(np.where(np.less(index, 0), np.add(index, extent), index), 0, extent - 1)


def _integer(x: Any, type: Type) -> Any:
    """Towards 0; NaN is 0, and what is too large the largest."""
    most = 2**31 - 1 if type is Type.INT32 else 2**63 - 1
    inside = np.trunc(np.clip(np.where(np.isnan(x), 0, x), -most - 1, most)).astype(np.float64)
    return np.where(inside >= most, most, np.where(inside >= most, 0, inside).astype(np.int64))


def _load(array: Any, n: Node, at: Sequence[Any]) -> Any:
    return array[tuple(place(i, e) for i, e in zip(at, array.shape, strict=True))]


def _extremum(array: Any, n: Node, ends: Sequence[Any]) -> Any:
    """The least or the most of the elements from a first index to a last one, of one axis that
    ranges; the other axes have equal ends."""
    axis = next(i for i, ranges in enumerate(n.value[3]) if ranges)
    first, last = np.broadcast_arrays(*ends[2 * axis : 2 * axis + 2])
    best, at = None, [np.asarray(e) for e in ends[::2]]
    for step in range(int(np.max(last - first)) + 1):
        at[axis] = np.minimum(first + step, last)
        x = _load(array, n, at)
        best = (
            x if best is None else (np.minimum if n.operation == "least" else np.maximum)(best, x)
        )
    return best


def _block_bits(words: Any, plane: int, at: Sequence[Any]) -> Any:
    """Whether a plane has a bit in a range of block rows and columns; of whole blocks all of
    them."""
    states = unpacked(words, words.shape[3] * WORD)[..., plane]
    b, h, *ends = at
    b, h = (np.minimum(i, n - 1) for i, n in zip((b, h), words.shape, strict=False))
    first_row, last_row, first, last = ends
    last_row = np.minimum(last_row, states.shape[2] - 1)
    rows, columns = last_row - first_row + 1, last - first + 1
    # Counts of the bits before each row and column.
    before = np.zeros((*states.shape[:2], states.shape[2] + 1, states.shape[3] + 1), np.int64)
    before[:, :, 1:, 1:] = states.cumsum(2).cumsum(3)
    count = before[b, h, last_row + 1, last + 1] - before[b, h, first_row, last + 1]
    count = count - before[b, h, last_row + 1, first] + before[b, h, first_row, first]
    return count > 0 if plane == SOME else count == rows * columns


def evaluate(
    roots: Sequence[Node],
    coordinates: Mapping[str, Any],
    numbers: Sequence[int | float],
    arrays: Sequence[npt.NDArray[Any]],
    floats: npt.DTypeLike = np.float64,
) -> list[npt.NDArray[Any]]:
    """Values of ``roots``. Integers are int64, floats ``floats``; ``coordinates`` broadcast."""
    dtypes: dict[Type, npt.DTypeLike] = {
        Type.BOOLEAN: np.bool_,
        Type.INT32: np.int64,
        Type.INT64: np.int64,
        Type.FLOAT: floats,
    }
    done: dict[Node, npt.NDArray[Any]] = {}
    with np.errstate(all="ignore"):
        for n in order(roots):
            done[n] = np.asarray(
                _value(n, [done[a] for a in n.arguments], coordinates, numbers, arrays)
            ).astype(dtypes[n.type], copy=False)
    return [done[r] for r in roots]


def leaf(n: Node, coordinates: Mapping[str, Any], numbers: Sequence[int | float]) -> Any:
    """The value of a constant, a coordinate or an argument, whatever library's."""
    if n.operation == "constant":
        return n.value
    return coordinates[n.value] if n.operation == "coordinate" else numbers[n.value]


def _value(
    n: Node,
    x: list[npt.NDArray[Any]],
    coordinates: Mapping[str, Any],
    numbers: Sequence[int | float],
    arrays: Sequence[npt.NDArray[Any]],
) -> Any:
    match n.operation:
        case "constant" | "coordinate" | "argument":
            return leaf(n, coordinates, numbers)
        case "detach":
            return x[0]
        case "cast":
            integer = n.type in (Type.INT32, Type.INT64)
            return _integer(x[0], n.type) if integer and x[0].dtype.kind == "f" else x[0]
        case "load":
            return _load(arrays[n.value[0]], n, x)
        case "least" | "most":
            return _extremum(arrays[n.value[0]], n, x)
        case "block_bits":
            return _block_bits(arrays[n.value[0]], n.value[1], x)
    return OPERATIONS[n.operation].compute(np, *x)
