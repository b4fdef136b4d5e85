"""Calls whose options are those of an earlier one, on torch tensors like the latest's: what served
that is launched, and nothing else is looked at. In a model each layer calls like the one before,
with code of its own in between: what counts is how much a call passes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import kernelseam.plugins as discovery
from kernelseam.dispatch import chosen_backend, in_environment
from kernelseam.launch_trace import active
from kernelseam.ops.array_call import put
from kernelseam.ops.calling import CallCache
from kernelseam.ops.road import Caller
from kernelseam.ops.split import split_of

Work = Callable[..., None]
Way = tuple[Caller, tuple[Any, ...]]
"""What serves a signature, and its numbers."""
_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of options that are told by type and value."""


def again(
    work: Work, tensors: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The results by name of a call on torch's current stream, with no backend and no
    implementation asked for; None, with nothing launched, where it must go the usual way."""
    found = discovery._plugins
    cache = None if found is None else found.caches.get(CallCache)
    if cache is None or not (chosen_backend() is in_environment() is None):
        return None
    try:
        way = cache.ways.get(_key(work, tensors, options))
    except TypeError:  # an option that cannot be hashed
        return None
    if way is None or active() or cache.addresses is None:
        return None
    pointers = cache.addresses(tensors)
    return None if pointers is None else way[0].again(tensors, pointers, way[1])


def learn(
    work: Work, names: tuple[str, ...], options: Mapping[str, Any], whole: Mapping[str, Any]
) -> None:
    """From a call that took the usual way. ``names``: of its tensors. ``whole``: ``options`` with
    the defaults of the others."""
    found = discovery._plugins
    cache = None if found is None else found.caches.get(CallCache)
    if cache is None or not _PLAIN.issuperset(map(type, options.values())):
        return
    if (key := _key(work, names, options)) in cache.ways:
        return
    values = tuple(whole.values())
    split = split_of(values)
    given, others = split.parted(values)
    caller = cache.callers.get((work, None, None, split, others, *names))
    if caller is not None:
        put(cache.ways, key, (caller, given))


def _key(work: Work, operands: tuple[Any, ...], options: Mapping[str, Any]) -> Hashable:
    values = options.values()
    return (work, len(operands), *options, *values, *map(type, values))


# While Dynamo compiles the caller there is nothing to launch.
again._torchdynamo_inline = lambda *given: None  # type: ignore[attr-defined]
learn._torchdynamo_inline = lambda *given: None  # type: ignore[attr-defined]
