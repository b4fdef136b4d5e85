"""The contract's rules for values from plugins, checked once where they enter the core."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from kernelseam.contract import (
    ArrayInfo,
    Backend,
    Cost,
    Device,
    DeviceLimits,
    Implementation,
    LaunchRecord,
    PlanParts,
    PluginInfo,
    Problem,
    Runtime,
    Step,
    Toolchain,
)
from kernelseam.errors import PluginError
from kernelseam.frozen import dataclass

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A rule as text and as a predicate."""

    text: str
    test: Callable[[Any], bool]


def _integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _number(value: object) -> bool:
    if (
        type(value) is not float
        and type(value) is not int
        and (not isinstance(value, Real) or isinstance(value, bool))
    ):
        return False
    return not math.isnan(value)


def _texts(value: object, length: int | None = None) -> bool:
    valid = isinstance(value, (tuple, list)) and all(isinstance(x, str) for x in value)
    return valid and (length is None or len(value) == length)  # type: ignore[arg-type]


TEXT = Rule("must be a str", lambda v: isinstance(v, str))
NAME = Rule("must be a non-empty str", lambda v: isinstance(v, str) and v != "")
BACKEND = Rule(
    "must be a non-empty str without a colon, which separates a device's index",
    lambda v: isinstance(v, str) and v != "" and ":" not in v,
)
INTEGER = Rule("must be an int", _integer)
COUNT = Rule("must be an int of at least 0", lambda v: _integer(v) and v >= 0)
SIZE = Rule("must be an int from 0 to 2**63 - 1", lambda v: _integer(v) and 0 <= v < 2**63)
ALIGNMENT = Rule(
    "must be a power of two, below 2**32",
    lambda v: _integer(v) and 0 < v < 2**32 and not v & (v - 1),
)
DURATION = Rule("must be a number of at least 0", lambda v: _number(v) and v >= 0)
RATE = Rule("must be a number above 0", lambda v: _number(v) and v > 0)
METHOD = Rule("must be a method", callable)
RATES = Rule(
    "must map names of dtypes to numbers above 0",
    lambda v: (
        isinstance(v, Mapping) and all(isinstance(k, str) and RATE.test(x) for k, x in v.items())
    ),
)
VARIABLES = Rule(
    "must be pairs of a variable's name and its meaning",
    lambda v: isinstance(v, (tuple, list)) and all(_texts(pair, 2) for pair in v),
)
TUPLE = Rule("must be a tuple", lambda v: isinstance(v, (tuple, list)))

FIELDS: Mapping[type, Mapping[str, Rule]] = {
    PluginInfo: {
        "name": NAME,
        "version": TEXT,
        "contract_version": INTEGER,
        "summary": TEXT,
        "variables": VARIABLES,
    },
    Backend: {"name": BACKEND, "implementations": TUPLE, "kernels": TUPLE, "priority": INTEGER},
    Implementation: {
        "name": NAME,
        "backend": NAME,
        "operation": NAME,
        "supports": METHOD,
        "cost": METHOD,
        "build": METHOD,
    },
    Runtime: dict.fromkeys(
        (
            "devices",
            "describe",
            "empty",
            "from_host",
            "to_host",
            "read",
            "current_stream",
            "synchronize",
            "activate",
            "time",
            "prepare_memset",
        ),
        METHOD,
    ),
    Toolchain: {
        "backend": NAME,
        **dict.fromkeys(
            ("arch_row", "platform_files", "compiler", "compile", "inspect", "load"), METHOD
        ),
    },
    Device: {"backend": NAME, "index": COUNT, "arch": NAME, "name": TEXT, "evidence": NAME},
    DeviceLimits: {
        "compute_units": COUNT,
        "shared_bytes_per_block": COUNT,
        "memory_bytes": COUNT,
        "bytes_per_second": RATE,
        "operations_per_second": RATES,
        "launch_seconds": DURATION,
    },
    Cost: {"bytes": DURATION, "operations": DURATION, "seconds": DURATION},
    PlanParts: {
        "steps": TUPLE,
        "workspace_bytes": SIZE,
        "workspace_alignment": ALIGNMENT,
        "zeroed_bytes": SIZE,
    },
}
"""By class or protocol, its fields."""


def validated(subject: str, value: Any, kind: type[T]) -> T:
    """Return the value if it is an instance of ``kind`` whose fields satisfy FIELDS, else raise
    PluginError. ``subject`` begins the message."""
    if not isinstance(value, kind):
        raise PluginError(f"{subject} must be a {kind.__name__}, got {reprlib.repr(value)}")
    _check_fields(subject, value, kind)
    return value


def _check_fields(subject: str, value: object, kind: type[Any]) -> None:
    for name, rule in FIELDS.get(kind, {}).items():
        actual = getattr(value, name, None)
        if not rule.test(actual):
            raise PluginError(
                f"{subject}: {kind.__name__}.{name} = {reprlib.repr(actual)}: {rule.text}"
            )


def check_implementation(value: Any) -> None:
    """Raise PluginError for a value that is no Implementation."""
    _check_fields(
        f"implementation {reprlib.repr(getattr(value, 'name', value))}", value, Implementation
    )


def validated_backend(value: Any) -> Backend:
    """A backend with its runtime, toolchain and implementations. Raises PluginError."""
    backend = validated("a backend", value, Backend)
    subject = f"backend {backend.name!r}"
    _check_fields(subject, backend.runtime, Runtime)
    if backend.toolchain is not None:
        _check_fields(subject, backend.toolchain, Toolchain)
    for i in backend.implementations:
        check_implementation(i)
    return backend


def validated_devices(backend: str, value: Any) -> tuple[Device, ...]:
    """The devices that a backend's runtime lists. Raises PluginError."""
    subject = f"devices() of backend {backend!r}"
    if not isinstance(value, Sequence):
        raise PluginError(f"{subject} must be a sequence of Device, got {reprlib.repr(value)}")
    for device in value:
        validated(subject, device, Device)
        validated(subject, device.limits, DeviceLimits)
        if device.backend != backend:
            raise PluginError(
                f"{subject}: Device.backend = {device.backend!r}: must be {backend!r}"
            )
    return tuple(value)


def validated_archs(backend: str, value: Any) -> tuple[str, ...]:
    """The archs that a backend's toolchain compiles for. Raises PluginError."""
    if not _texts(value):
        raise PluginError(
            f"archs of backend {backend!r} must be a tuple of str, got {reprlib.repr(value)}"
        )
    return tuple(value)


def validated_view(backend: str, value: Any) -> ArrayInfo | None:
    """A runtime's description of an array. Raises PluginError."""
    return (
        None if value is None else validated(f"describe() of backend {backend!r}", value, ArrayInfo)
    )


def validated_refusal(name: str, value: Any) -> str | None:
    """The result of ``supports``; "" counts as None. Raises PluginError."""
    if value is not None and not isinstance(value, str):
        raise PluginError(
            f"supports() of {name!r} must be None or a str with the reason, got "
            f"{reprlib.repr(value)}"
        )
    return value or None


def validated_parts(name: str, value: Any, problem: Problem, device: Device) -> PlanParts:
    """The result of ``build`` for a problem on a device. Raises PluginError."""
    subject = f"build() of {name!r}"
    parts = validated(subject, value, PlanParts)
    for step in parts.steps:
        validated(f"{subject}: a step's record", getattr(step, "record", None), LaunchRecord)
        if not callable(getattr(step, "bind", None)):
            raise PluginError(f"{subject}: {reprlib.repr(step)} has no method bind")
    if not parts.steps and (results := [r.name for r in problem.operands if r.written and r.span]):
        raise PluginError(f"{subject}: no step, so that nothing writes {', '.join(results)}")
    if parts.zeroed_bytes > parts.workspace_bytes:
        raise PluginError(
            f"{subject}: PlanParts.zeroed_bytes = {parts.zeroed_bytes}: must be at most "
            f"workspace_bytes = {parts.workspace_bytes}"
        )
    memory = device.limits.memory_bytes
    if memory and parts.workspace_bytes > memory:
        raise PluginError(
            f"{subject}: PlanParts.workspace_bytes = {parts.workspace_bytes}: must fit into the "
            f"{memory} bytes of {device}"
        )
    return parts


def validated_launch(name: str, step: Step, value: Any) -> Callable[[int], None]:
    """The result of a step's ``bind``. Raises PluginError."""
    if not callable(value):
        raise PluginError(
            f"bind() of {name!r}, step {step.record.kernel!r}, must return launch(stream), got "
            f"{reprlib.repr(value)}"
        )
    launch: Callable[[int], None] = value
    return launch
