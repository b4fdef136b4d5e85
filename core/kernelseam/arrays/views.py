"""Arrays of any library as views: which runtime knows one is asked of the runtimes, fastest guess
first."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from kernelseam.arrays import torch as torch_arrays
from kernelseam.containment import Contained, told
from kernelseam.contract import ArrayInfo, Backend, Device, Runtime
from kernelseam.contract_values import held_view
from kernelseam.dtypes import OF_OPERANDS, one_of
from kernelseam.errors import InvalidValue
from kernelseam.plugins import Plugins, plugins

_log = logging.getLogger("kernelseam")


class _Runtimes(dict[tuple[str | None, type], Runtime]):
    """By (backend asked for, type): the runtime that knew the last array of the type."""


def describe(array: object, field: str = "array", backend: str | None = None) -> ArrayInfo:
    """The view of an array; nothing is copied.

    ``field`` is the array's name as the caller knows it; ``backend``'s runtime, where given, is
    asked first. Raises InvalidValue for what no runtime knows, and for a dtype or layout that none
    takes.
    """
    found = plugins()
    known = found.remembered(_Runtimes)
    key = (backend, type(array))
    broken = ""
    try:
        runtime = known.get(key)
        try:
            info = runtime.describe(array) if runtime is not None else None
        except InvalidValue:
            raise
        # an array of a kind that it cannot read: it is asked again below, with all others
        except Exception:
            info = None
        if info is not None:
            return info
        for asked in _order(found, array, backend):
            try:
                found.devices_of(asked)  # one whose driver hangs is given up there
                with Contained(f"describe of backend {asked.name}"):
                    info = held_view(asked.name, asked.runtime.describe(array))
            except InvalidValue:
                raise
            # one that is broken must not stand before the one that knows the array
            except Exception as e:
                _log.warning(
                    "backend %s cannot tell whether an array is its own", asked.name, exc_info=True
                )
                broken += f"; {asked.name} could not be asked: {told(e)}"
                continue
            if info is not None:
                known[key] = asked.runtime
                return info
    except InvalidValue as e:
        rule, remedy = e.rule, e.remedy
        # a runtime knows no operand, and names all that some operand takes
        if rule == one_of(floating=False):
            only = OF_OPERANDS.get(field.partition("[")[0])
            rule, remedy = one_of() if only is None else f"must be {only}", "Convert the array"
        raise type(e)(f"{field}.{e.field}", e.value, rule, remedy) from None
    raise InvalidValue(
        field,
        f"{type(array).__module__}.{type(array).__qualname__}",
        "must be an array of a library and on a device known to "
        f"{', '.join(sorted(found.registry.backends))}{broken}",
        "Pass a NumPy array, a torch tensor or anything with DLPack, and see `kernelseam doctor` "
        "for missing plugins",
    )


def _order(found: Plugins, array: object, backend: str | None) -> list[Backend]:
    host = "numpy" if isinstance(array, np.ndarray) else None
    backends = found.registry.backends.values()
    return sorted(backends, key=lambda b: (b.name != backend, b.name != host, -b.priority))


def runtime_of(info: ArrayInfo) -> Runtime:
    """The runtime of the device that an array lies on."""
    return plugins().backend(info.device.backend).runtime


def tell_written(info: ArrayInfo) -> None:
    """Tell an array's library that its elements were written, where it keeps count: torch refuses
    gradients that need what stood there before."""
    if info.kind == "torch":
        torch_arrays.tell_written((info.owner,))


def same_device(infos: Mapping[str, ArrayInfo]) -> Device:
    """The one device of several arrays, given by name. Raises InvalidValue naming the first two
    that differ."""
    (first, info), *others = infos.items()
    for name, other in others:
        if other.device != info.device:
            raise InvalidValue(
                name,
                other.device,
                f"must be on the same device as {first}, which is on {info.device}",
                f"Move {name} or {first}",
            )
    return info.device
