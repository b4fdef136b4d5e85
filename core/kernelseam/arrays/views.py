"""Views of arrays of any library. Each runtime is asked whether it knows an array, the most likely
one first."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from kernelseam.arrays.torch import increment_versions, is_tensor
from kernelseam.containment import Contained, error_text
from kernelseam.contract import ArrayInfo, Backend, Device, Runtime
from kernelseam.contract_values import validated_view
from kernelseam.dtypes import (
    CAPTURED,
    E4M3,
    OF_8_BITS,
    OF_64_BITS,
    OPERAND_DTYPES,
    DType,
    dtype_rule,
)
from kernelseam.errors import InvalidValue
from kernelseam.plugins import Plugins, plugins

_log = logging.getLogger("kernelseam")


class _Runtimes(dict[tuple[str | None, type], Runtime]):
    """By (requested backend, type): the runtime that knew the last array of that type."""


def describe(array: object, field: str = "array", backend: str | None = None) -> ArrayInfo:
    """The view of an array, without a copy.

    ``field``: the array's name for errors. ``backend``: its runtime is asked first. Raises
    InvalidValue for an array that no runtime knows, and for an unsupported dtype or layout.
    """
    current = plugins()
    runtimes = current.cache_of(_Runtimes)
    key = (backend, type(array))
    broken = ""
    try:
        runtime = runtimes.get(key)
        try:
            info = runtime.describe(array) if runtime is not None else None
        except InvalidValue:
            raise
        # below it is asked again, and its error is reported
        except Exception:
            info = None
        if info is not None:
            return _taken(field, info)
        for candidate in _order(current, array, backend):
            try:
                current.devices_of(candidate)  # raises where its driver hangs
                with Contained(f"describe of backend {candidate.name}"):
                    info = validated_view(candidate.name, candidate.runtime.describe(array))
            except InvalidValue:
                raise
            # a broken runtime must not hide the one that knows the array
            except Exception as e:
                _log.warning(
                    "backend %s cannot tell whether an array is its own",
                    candidate.name,
                    exc_info=True,
                )
                broken += f"; {candidate.name} could not be asked: {error_text(e)}"
                continue
            if info is not None:
                runtimes[key] = candidate.runtime
                return _taken(field, info)
    except InvalidValue as e:
        rule, remedy = e.rule, e.remedy
        # the runtime does not know the operand, and names all dtypes
        if rule == dtype_rule(floating=False):
            name = field.partition("[")[0]
            dtype, remedy = OPERAND_DTYPES.get(name), "Convert the array"
            rule = dtype_rule() if dtype is None else f"must be {dtype}"
            if name in OF_64_BITS:
                rule += f" or {DType.int64}"
            if name in OF_8_BITS:
                rule += f", or where 8 bits are taken {' or '.join(map(str, E4M3))}"
        raise type(e)(f"{field}.{e.field}", e.value, rule, remedy) from None
    raise InvalidValue(
        field,
        _named(array),
        "must be an array of a library and on a device known to "
        f"{', '.join(sorted(current.registry.backends))}{broken}",
        "Pass a NumPy array, a torch tensor or anything with DLPack, and see `kernelseam doctor` "
        "for missing plugins",
    )


def _taken(field: str, info: ArrayInfo) -> ArrayInfo:
    """The view; refused where no operand of this name has such elements."""
    wide = info.dtype is DType.int64 and field in OF_64_BITS
    if info.dtype in CAPTURED and not (wide or field.startswith("captured_")):
        raise InvalidValue("dtype", info.dtype, dtype_rule(floating=False), "Convert the array")
    return info


def _named(array: object) -> str:
    """Its type and, where it is not the host, its device."""
    name = f"{type(array).__module__}.{type(array).__qualname__}"
    try:
        if is_tensor(array):
            device = str(array.device)  # type: ignore[attr-defined]
        else:
            kind, index = map(int, array.__dlpack_device__())  # type: ignore[attr-defined]
            device = "cpu" if kind == 1 else f"DLPack's device ({kind}, {index})"
    except Exception:  # it has none, or its library fails
        return name
    return name if device == "cpu" else f"{name} on {device}"


def _order(current: Plugins, array: object, backend: str | None) -> list[Backend]:
    host = "numpy" if isinstance(array, np.ndarray) else None
    backends = current.registry.backends.values()
    return sorted(backends, key=lambda b: (b.name != backend, b.name != host, -b.priority))


def runtime_of(info: ArrayInfo) -> Runtime:
    """The runtime of an array's device."""
    return plugins().backend(info.device.backend).runtime


def mark_written(info: ArrayInfo) -> None:
    """Record a write with the array's library. torch then refuses a backward pass that needs the
    old values."""
    if info.kind == "torch":
        increment_versions((info.owner,))


def same_device(infos: Mapping[str, ArrayInfo]) -> Device:
    """The common device of several arrays, given by name. Raises InvalidValue, which names two that
    differ."""
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
