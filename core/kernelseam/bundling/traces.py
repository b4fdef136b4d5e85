"""Reads the file that ``kernelseam.trace(path)`` writes: problems without memory.

The file may be edited or written by hand, so every value is held against its field's type.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from kernelseam.containment import error_text
from kernelseam.contract import Device, DeviceLimits
from kernelseam.contract_values import validated
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.descriptors.attention.merge_problem import MergeProblem
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.cache.problem import PagedCacheProblem
from kernelseam.descriptors.common.validation import MAX_BYTES, check_walk
from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersProblem
from kernelseam.descriptors.gemm.grouped_problem import AXES, INDICES, GroupedGemmProblem
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    QkvProjectionBwdProblem,
)
from kernelseam.descriptors.projection.problem import OutputProjectionProblem, QkvProjectionProblem
from kernelseam.errors import InvalidValue, PluginError
from kernelseam.json_schema import SchemaError, decoded, parsed, typed
from kernelseam.launch_trace import FORMAT, TracedProblem

PROBLEMS: Mapping[str, type] = {
    p.operation: p
    for p in (
        AttentionBwdProblem,
        AttentionProblem,
        GemmProblem,
        GroupedGemmPointersProblem,
        GroupedGemmProblem,
        MergeProblem,
        OutputProjectionBwdProblem,
        OutputProjectionProblem,
        PagedCacheProblem,
        QkvProjectionBwdProblem,
        QkvProjectionProblem,
    )
}
"""By operation."""
_REMEDY = "Write the file again by kernelseam.trace(path)"


def read_trace(path: str | os.PathLike[str]) -> tuple[TracedProblem, ...]:
    """The problems of a trace's file. Raises InvalidValue, which names the place in it."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidValue("path", path, "must name a file", "Give a str or a Path")
    path = Path(path)
    try:
        content = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise InvalidValue("--from", path, f"cannot be read as JSON: {why}", _REMEDY) from e
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        actual = content.get("format") if isinstance(content, dict) else None
        raise InvalidValue(
            "--from", path, f"is no trace of format {FORMAT}, its format is {actual}", _REMEDY
        )
    try:
        problems = typed(list, content.get("problems"), "problems")
        return tuple(_traced(entry, f"problems[{i}]") for i, entry in enumerate(problems))
    except SchemaError as e:
        raise InvalidValue(e.at, e.value, e.rule, _REMEDY) from e


def _traced(entry: object, at: str) -> TracedProblem:
    result = typed(dict, entry, at)
    operation = typed(str, result.get("operation"), f"{at}.operation")
    if operation not in PROBLEMS:
        known = ", ".join(PROBLEMS)
        raise SchemaError(f"{at}.operation", operation, f"must be one of {known}")
    problem = decoded(PROBLEMS[operation], result.get("problem"), f"{at}.problem")
    _check_problem(problem, f"{at}.problem")
    device = typed(dict, result.get("device"), f"{at}.device")
    return TracedProblem(
        problem,
        Device(
            typed(str, device.get("backend"), f"{at}.device.backend"),
            0,
            typed(str, device.get("arch"), f"{at}.device.arch"),
            typed(str, device.get("name", ""), f"{at}.device.name"),
            _limits(device.get("limits", {}), f"{at}.device.limits"),
            typed(str, device.get("evidence", "measured"), f"{at}.device.evidence"),
        ),
        typed(str, result.get("implementation", ""), f"{at}.implementation"),
        typed(str, result.get("variant", ""), f"{at}.variant"),
    )


def _limits(value: object, at: str) -> DeviceLimits:
    result = dict(typed(dict, value, at))
    rates = decoded(
        dict[str, float], result.pop("operations_per_second", {}), f"{at}.operations_per_second"
    )
    limits = replace(decoded(DeviceLimits, result, at), operations_per_second=rates)
    try:
        return validated(at, limits, DeviceLimits)
    except PluginError as e:
        raise SchemaError(at, "DeviceLimits", str(e)) from e


_VIEWS = ("strided", "packed", "paged", "pointers")
_KNOWN: Mapping[str, tuple[object, ...]] = {
    "q_view": ("strided", "packed", "pointers"),
    "kv_view": _VIEWS,
    "view": ("strided", "pointers"),
    "along": AXES,
    "indices": tuple(x for n in range(len(INDICES) + 1) for x in combinations(INDICES, n)),
    "rotary": ("", "halves", "pairs"),
    "direction": ("append", "gather", "copy"),
    "position": ("", "given", "lengths"),
    "scaled": ("", "heads", "tokens"),
    "joined": (None, "a", "b", "k"),
    "precision": (None, "tf32", "tf32x3"),
    "vector": (1, 2, 4, 8, 16),
    "q_scales": (None, "heads", "blocks"),
    "kv_scales": (None, "heads", "blocks"),
}
"""Field of a problem or a spec → the values that it may have."""
_ANY_NUMBERS = ("captured_numbers",)
_AT_LEAST_ONE = ("b_head_group", "c_batch_group", "c_head_group")


def _check_values(value: Any, at: str) -> None:
    """Refuse values that no problem has; what they must be together is _check_problem's."""
    if is_dataclass(value):
        for f in fields(value):
            place, own = f"{at}.{f.name}", getattr(value, f.name)
            if f.name in _ANY_NUMBERS:
                continue
            known = _KNOWN.get("vector" if f.name.startswith("vector_") else f.name, (own,))
            if own not in known:
                names = ", ".join(str(x) for x in known if x not in (None, ""))
                raise SchemaError(place, own, f"must be one of {names}")
            if f.name in _AT_LEAST_ONE and own < 1:
                raise SchemaError(place, own, "must be 1 or more")
            _check_values(own, place)
    elif isinstance(value, tuple):
        for i, own in enumerate(value):
            _check_values(own, f"{at}[{i}]")
    elif type(value) is int and not 0 <= value <= MAX_BYTES:
        raise SchemaError(at, value, "must be from 0 to 2**63 - 1")


def _check_problem(problem: Any, at: str) -> None:
    """Refuse a problem whose fields do not fit together: its operands and sizes must follow."""
    _check_values(problem, at)
    try:
        for rule in problem.operands:
            check_walk(rule, [f"axis {i}" for i in range(len(rule.shape))])
        _ = problem.operations, problem.bytes_moved, problem.compute_dtype, str(problem)
    except Exception as e:
        why = str(e).rstrip(".") if isinstance(e, InvalidValue) else error_text(e)
        raise SchemaError(at, type(problem).__name__, f"its fields fit no problem: {why}") from e
