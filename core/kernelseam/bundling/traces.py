"""Reads the file that ``kernelseam.trace(path)`` writes: problems without memory.

The file may be edited or written by hand, so every value is held against its field's type.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from kernelseam.contract import Device, DeviceLimits
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.descriptors.attention.merge_problem import MergeProblem
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    QkvProjectionBwdProblem,
)
from kernelseam.descriptors.projection.problem import OutputProjectionProblem, QkvProjectionProblem
from kernelseam.errors import InvalidValue
from kernelseam.trace import FORMAT

PROBLEMS: Mapping[str, type] = {
    p.operation: p
    for p in (
        AttentionBwdProblem,
        AttentionProblem,
        GemmProblem,
        MergeProblem,
        OutputProjectionBwdProblem,
        OutputProjectionProblem,
        QkvProjectionBwdProblem,
        QkvProjectionProblem,
    )
}
"""By operation."""
_REMEDY = "Write the file again by kernelseam.trace(path)"


@dataclass(frozen=True)
class TracedProblem:
    """A problem of a trace, the device that it ran on and what was chosen there."""

    problem: Any
    device: Device
    implementation: str = ""
    variant: str = ""


def read_trace(path: Path) -> tuple[TracedProblem, ...]:
    """The problems of a trace's file. Raises InvalidValue, which names the place in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InvalidValue("--from", path, f"cannot be read as JSON: {e}", _REMEDY) from e
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        actual = content.get("format") if isinstance(content, dict) else None
        raise InvalidValue(
            "--from", path, f"is no trace of format {FORMAT}, its format is {actual}", _REMEDY
        )
    problems = _typed(list, content.get("problems"), "problems")
    return tuple(_traced(entry, f"problems[{i}]") for i, entry in enumerate(problems))


def _traced(entry: object, at: str) -> TracedProblem:
    result = _typed(dict, entry, at)
    operation = _typed(str, result.get("operation"), f"{at}.operation")
    if operation not in PROBLEMS:
        known = ", ".join(PROBLEMS)
        raise InvalidValue(f"{at}.operation", operation, f"must be one of {known}", _REMEDY)
    device = _typed(dict, result.get("device"), f"{at}.device")
    return TracedProblem(
        _decoded(PROBLEMS[operation], result.get("problem"), f"{at}.problem"),
        Device(
            _typed(str, device.get("backend"), f"{at}.device.backend"),
            0,
            _typed(str, device.get("arch"), f"{at}.device.arch"),
            _typed(str, device.get("name", ""), f"{at}.device.name"),
            _limits(device.get("limits", {}), f"{at}.device.limits"),
            _typed(str, device.get("evidence", "measured"), f"{at}.device.evidence"),
        ),
        _typed(str, result.get("implementation", ""), f"{at}.implementation"),
        _typed(str, result.get("variant", ""), f"{at}.variant"),
    )


def _limits(value: object, at: str) -> DeviceLimits:
    result = dict(_typed(dict, value, at))
    rates = _typed(dict, result.pop("operations_per_second", {}), f"{at}.operations_per_second")
    limits: DeviceLimits = _decoded(DeviceLimits, result, at)
    decoded = {n: _decoded(float, x, f"{at}.operations_per_second") for n, x in rates.items()}
    return replace(limits, operations_per_second=decoded)


def _typed(kind: type, value: object, at: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidValue(at, value, f"must be a {kind.__name__}", _REMEDY)
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decoded(hint: Any, value: Any, at: str) -> Any:
    """The value as a field of this type holds it."""
    if get_origin(hint) is types.UnionType:  # X | None
        if value is None:
            return None
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
        return _decoded(hint, value, at)
    if get_origin(hint) is tuple:
        return _tuple(get_args(hint), _typed(list, value, at), at)
    if is_dataclass(hint):
        return _dataclass(hint, _typed(dict, value, at), at)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            names = ", ".join(str(x.value) for x in hint)
            raise InvalidValue(at, value, f"must be one of {names}", _REMEDY) from None
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise InvalidValue(at, value, f"must be a {hint.__name__}", _REMEDY)
    return value


def _tuple(kinds: tuple[Any, ...], values: list[Any], at: str) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(values)
    if len(values) != len(kinds):
        raise InvalidValue(at, values, f"must have {len(kinds)} entries", _REMEDY)
    return tuple(
        _decoded(k, v, f"{at}[{i}]") for i, (k, v) in enumerate(zip(kinds, values, strict=True))
    )


def _dataclass(kind: type, value: dict[str, Any], at: str) -> Any:
    own = {f.name: f for f in fields(kind)}
    if unknown := sorted(value.keys() - own.keys()):
        raise InvalidValue(at, unknown[0], f"is no field of a {kind.__name__}", _REMEDY)
    for name, field in own.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in value:
            raise InvalidValue(f"{at}.{name}", None, "is missing", _REMEDY)
    hints = _hints(kind)
    return kind(**{n: _decoded(hints[n], v, f"{at}.{n}") for n, v in value.items()})
