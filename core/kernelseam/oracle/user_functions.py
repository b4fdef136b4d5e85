"""Users' functions, as the oracle takes them: the functions themselves, called in float64
on grids of indices. Nothing of their tracing or lowering is used."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

Array = npt.NDArray[Any]
Function = Callable[..., Any]
STEP = 1e-6


def called(function: Function, *values: Any, **named: int) -> Array:
    """The function's values: over torch's tensors where it reads any or calls torch, else over
    NumPy's arrays. Of the named values it gets those that it has parameters for. Raises
    InvalidValue where it reads outside of an array."""
    try:
        return _called(function, values, named)
    except IndexError as e:
        raise InvalidValue(
            getattr(function, "__name__", "function"),
            str(e),
            "kernels move such an index inside, and the oracle calls the function itself",
            "Move it inside in the function: clip(i, 0, n - 1)",
        ) from e


def _called(function: Function, values: tuple[Any, ...], named: dict[str, int]) -> Array:
    asked = {n: x for n, x in named.items() if n in inspect.signature(function).parameters}
    torch: Any = sys.modules.get("torch")
    if torch is not None and _is_of_torch(torch, function, 0):
        with torch.no_grad():
            return np.asarray(function(*map(torch.as_tensor, values), **asked))
    # Arrays, as ~ of Python's own truth values is no logic, and its integers raise by 0.
    with np.errstate(all="ignore"):
        return np.asarray(function(*map(np.asarray, values), **asked))


def _is_of_torch(torch: Any, x: Any, depth: int) -> bool:
    """Whether it is a tensor, a module or torch itself, or a function that reads one."""
    if x is torch or isinstance(x, torch.Tensor | torch.nn.Module):
        return True
    if depth > 4:
        return False
    if f"{getattr(x, '__module__', '')}.".startswith("torch."):
        return True
    code = getattr(x, "__code__", None)
    read = [getattr(x, n, None) for n in ("__self__", "__func__", "func", "args", "keywords")]
    if isinstance(x, types.FunctionType) and code is not None:
        read += [x.__globals__.get(n) for n in code.co_names]
        read += [c.cell_contents for c in x.__closure__ or ()]
    if isinstance(x, tuple | list | dict):
        read += list(x.values() if isinstance(x, dict) else x)
    return any(_is_of_torch(torch, y, depth + 1) for y in read if _may_read(y))


def _may_read(x: Any) -> bool:
    return x is not None and not isinstance(x, int | float | str | np.ndarray | np.generic)


@dataclass(frozen=True)
class Changed:
    """New scores, and their first and second derivatives by the old ones, by differences; 0 where
    these are not finite."""

    scores: Array
    slope: Array
    bend: Array


def changed(score_mod: Function, scores: Array, *at: Any, q_len: int, kv_len: int) -> Changed:
    """What a score_mod makes of scores."""

    def of(x: Array) -> Array:
        y = called(score_mod, x, *at, q_len=q_len, kv_len=kv_len)
        return np.broadcast_to(np.asarray(y, np.float64), scores.shape)

    own = np.asarray(scores, np.float64)
    size = np.maximum(1, np.abs(np.where(np.isfinite(own), own, 0)))
    with np.errstate(invalid="ignore", over="ignore"):
        near, far = STEP * size, 100 * STEP * size
        slope = (of(own + near) - of(own - near)) / (2 * near)
        bend = (of(own + far) - 2 * of(own) + of(own - far)) / far**2
    return Changed(of(own), *(np.where(np.isfinite(x), x, 0) for x in (slope, bend)))
