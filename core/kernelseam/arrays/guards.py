"""Whether torch tensors are what others were, told by the guards of torch's compiler: one call for
all tensors, in a quarter of the time that reading them takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any

Guard = Callable[..., bool]
_MODES = ("Tracer", "FuncTorchDynamicLayerFrontMode")
"""Dispatch keys while torch.jit.trace records, and while torch.func transforms."""


def tensor_guard(tensors: Sequence[Any], extents: bool = True, loses: bool = True) -> Guard:
    """``holds(*others)``: whether other tensors, as many, are like these in everything that
    ``arrays.torch.layouts`` reads, and have no gradients that a call would lose; without
    ``extents`` shapes and strides may differ, numbers of axes not; without ``loses`` gradients that
    are wanted count for nothing. It may say no where they are, as
    in another of torch's modes, and always does where torch has no guards."""
    return guard_maker(tensors, loses)(tensors, extents)


def guard_maker(tensors: Sequence[Any], loses: bool = True) -> Callable[..., Guard]:
    """``tensor_guard`` of tensors for which that of these holds without extents."""
    guards = _guards()
    if guards is None:
        return lambda *given, **more: never
    # A guard of torch's holds for no tensor that comes twice, and whatever the gradient mode.
    seen: dict[int, int] = {}
    first = tuple([seen.setdefault(id(x), i) for i, x in enumerate(tensors)])
    once = sorted({*first})
    distinct = itemgetter(*once) if len(once) > 1 else itemgetter(slice(1))
    lost: Callable[[], bool] | None = None
    if loses and any(x.requires_grad for x in tensors):
        lost = sys.modules["torch"].is_grad_enabled
    if len(once) == len(first) and lost is None:
        return partial(_guard, guards)
    asked = _asked(first)

    def make(others: Sequence[Any], extents: bool = True) -> Guard:
        return asked(_guard(guards, distinct(others), extents), lost or bool)

    return make


@lru_cache(maxsize=64)
def _asked(first: tuple[int, ...]) -> Callable[[Guard, Callable[[], bool]], Guard]:
    """``guard(holds, lost)`` of tensors that are each the one at this place among them, of which
    ``holds`` is asked for those that come first. One function, as guards are asked where all is
    cold."""
    names = [f"x{i}" for i in range(len(first))]
    same = "".join(f"x{i} is x{at} and " for i, at in enumerate(first) if i != at)
    once = ", ".join(names[i] for i in sorted({*first}))
    text = f"lambda {', '.join(names)}: {same}holds({once}) and not lost()"
    guard: Callable[[Guard, Callable[[], bool]], Guard] = eval(f"lambda holds, lost: {text}")
    return guard


def compilers_own() -> Any:
    """What torch's compiler calls, which is no public part of torch; None where it is missing."""
    torch: Any = sys.modules["torch"]
    return getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def never(*others: Any) -> bool:
    """A guard that holds for no tensors."""
    return False


def _guard(guards: Any, tensors: Sequence[Any], extents: bool = True) -> Guard:
    axes = None if extents else [[None] * x.ndim for x in tensors]
    holds: Guard = guards(*tensors, dynamic_dims_sizes=axes, dynamic_dims_strides=axes).check
    return holds


@cache
def _guards() -> Any:
    """The class of torch's guards; None where it is missing, or does not tell apart all it must."""
    torch: Any = sys.modules["torch"]
    try:
        guards = compilers_own().TensorGuards
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.empty(2, 2)
            holds = _guard(guards, [x])
            others = [x.t(), x[:1], x[0], x.double(), torch._neg_view(x), torch.nn.Parameter(x)]
            others.append(torch.empty(2, 2, requires_grad=True))
            open_to = _guard(guards, [x], extents=False)
            knows = holds(x.clone()) and not any(map(holds, others))
            knows_open = all(map(open_to, others[:2])) and not any(map(open_to, others[2:]))
            for name in _MODES:
                with torch._C._IncludeDispatchKeyGuard(torch._C._parse_dispatch_key(name)):
                    knows = knows and not (holds(x) or open_to(x))
            with torch.autocast("cpu"):
                knows = knows and not (holds(x) or open_to(x))
            return guards if knows and knows_open else None
    except Exception:
        return None
