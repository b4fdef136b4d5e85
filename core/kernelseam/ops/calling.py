"""What every operation on arrays does: views, one device, a remembered plan, a call, a result of the caller's kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kernelseam.arrays import describe, runtime_of, same_device
from kernelseam.contract import ArrayInfo
from kernelseam.dispatch import check_backend, preferred_backend
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.planning import Plan, plan
from kernelseam.plugins import Plugins, plugins


def views(backend: str | None, **arrays: object) -> dict[str, ArrayInfo]:
    """The views of arrays, by name; all are on one device, and it is the backend's. ``out`` alone may be None.

    The backend asked for is the argument, over ``use_backend``, over KERNELSEAM_BACKEND; none takes the arrays'.
    """
    wanted = preferred_backend(backend)
    if wanted is not None:
        plugins().backend(wanted)
    infos = {name: describe(x, name, wanted) for name, x in arrays.items() if x is not None or name != "out"}
    device = same_device(infos)
    check_backend(wanted, device)
    for name, info in infos.items():
        if min(info.strides, default=0) < 0 and 0 not in info.shape:
            raise InvalidValue(name, f"strides {list(info.strides)}", "must not walk backwards", "Copy the array first")
    return infos


def rank(name: str, info: ArrayInfo, axes: Sequence[str]) -> None:
    """Refuse an array whose number of axes is not that of ``axes`` (names, for the message)."""
    if len(info.shape) != len(axes):
        raise InvalidValue(
            name, f"an array of shape {list(info.shape)}", f"must have {len(axes)} axes, [{', '.join(axes)}]",
            "Add or remove axes with reshape",
        )


def fresh(name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo) -> ArrayInfo:
    """A new array on ``like``'s device and, where its runtime makes them, of its kind."""
    runtime = runtime_of(like)
    return describe(runtime.empty(shape, dtype, like.device, like), name, like.device.backend)


class _Remembered:
    """Plans by everything of a call but its memory; they hold no array."""

    def __init__(self, found: Plugins) -> None:
        self.found = found
        self.plans: dict[Hashable, Plan] = {}


_KEPT = 1024
_remembered: _Remembered | None = None


def run(
    infos: dict[str, ArrayInfo], options: Hashable, descriptor: Callable[[], Any], implementation: str | None,
    stream: object,
) -> None:
    """Launch the operation that ``descriptor()`` describes over these arrays.

    ``infos``: every operand under its name in the descriptor. ``options``: whatever else shapes the descriptor.
    """
    global _remembered
    found = plugins()
    if _remembered is None or _remembered.found is not found:
        _remembered = _Remembered(found)
    plans = _remembered.plans
    key = (implementation, options, next(iter(infos.values())).device, *[
        (i.shape, i.strides, i.dtype, i.pointer % 16 == 0, i.writable) for i in infos.values()
    ])
    made = plans.get(key)
    if made is None:
        filled = descriptor()
        device = next(iter(infos.values())).device
        # A remembered plan must not keep anyone's memory alive.
        bare = filled.over({name: i.pointer for name, i in infos.items()})
        made = plan(bare, device=device, implementation=implementation)
        if len(plans) >= _KEPT:
            plans.clear()
        plans[key] = made
    made.launch(infos, stream)


def handed_back(made: ArrayInfo, like: ArrayInfo, stream: object) -> object:
    """The result as an array of ``like``'s library, where it can take one; else as its runtime made it."""
    space = None if made.kind == like.kind else getattr(like.owner, "__array_namespace__", None)
    if space is None:
        return made.owner
    if stream is not None:
        runtime_of(made).synchronize(made.device)  # the library's own streams know nothing of this one
    library = space()
    if made.dtype is DType.bfloat16:  # NumPy does not hand it out by DLPack
        return library.asarray(made.owner)
    return library.from_dlpack(made.owner)
