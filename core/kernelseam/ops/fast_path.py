"""The shortest way of a call on torch tensors: if it is like the latest call of its function, the
same launches run at the new addresses. In a model each layer's call is like the one before, with
other code in between, so the cost is in how many objects a call touches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import kernelseam.plugins as discovery
from kernelseam.dispatch import chosen_backend, in_environment
from kernelseam.launch_trace import active
from kernelseam.ops.array_call import put
from kernelseam.ops.calling import CallCache, Way
from kernelseam.ops.split import split_of

PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of options that are compared by type and value."""


class FastPath:
    """For calls of ``work`` on operands of these names, with these options, on torch's current
    stream, with no backend and no implementation asked for. ``defaults``: of all options;
    ``takes(*tensors)``: whether it is for such extents and strides."""

    def __init__(
        self,
        work: Callable[..., None],
        operands: tuple[str, ...],
        options: tuple[str, ...],
        defaults: Mapping[str, Any],
        takes: Callable[..., bool],
    ) -> None:
        self.work, self.operands, self.takes = work, operands, takes
        self.options, self.defaults = options, defaults


def again(
    path: FastPath, tensors: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """The results of a call like the latest of its kind, in order; None, with nothing launched, for
    all else. It holds for torch's own tensors, outside of its modes and transforms."""
    found = discovery._plugins
    cache: CallCache | None = None if found is None else found.caches.get(CallCache)
    if cache is None or not (chosen_backend() is in_environment() is None):
        return None
    try:
        way = cache.ways.get((path, *options, *map(type, options)))
    except TypeError:  # an option that cannot be hashed
        return None
    # guards are silent on these
    if way is None or active() or way.forward._current_level >= 0 or way.modes() or way.casts():
        return None
    return way.caller.again(tensors, way.given, path.takes)


def learn(path: FastPath, options: tuple[Any, ...]) -> None:
    """From a call that took the usual way."""
    found = discovery._plugins
    cache: CallCache | None = None if found is None else found.caches.get(CallCache)
    kinds = tuple(map(type, options))
    if cache is None or not PLAIN.issuperset(kinds) or (path, *options, *kinds) in cache.ways:
        return
    given = dict(zip(path.options, options, strict=True))
    values = tuple({**path.defaults, **given}.values())
    split = split_of(values)
    numbers, others = split.parted(values)
    caller = cache.callers.get((path.work, None, None, split, others, *path.operands))
    forward: Any = sys.modules.get("torch.autograd.forward_ad")
    if caller is not None and forward is not None:
        torch: Any = sys.modules["torch"]._C
        modes, casts = torch._len_torch_dispatch_stack, torch._is_any_autocast_enabled
        put(cache.ways, (path, *options, *kinds), Way(caller, numbers, forward, modes, casts))


# While Dynamo compiles the caller there is nothing to launch.
again._torchdynamo_inline = lambda *given: None  # type: ignore[attr-defined]
learn._torchdynamo_inline = lambda *given: None  # type: ignore[attr-defined]
