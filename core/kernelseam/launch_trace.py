"""Records launches: kernel, grid, block and shared memory; and the problems that they compute, in a
file that ``kernelseam compile --from`` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelseam._version import __version__
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

if TYPE_CHECKING:
    from kernelseam.contract import Device, LaunchRecord, Problem

FORMAT = 1
"""Of the file: raised when its meaning changes."""


@dataclass(frozen=True)
class TracedProblem:
    """A problem that a trace has seen, the device that it ran on and what was chosen there."""

    problem: Problem
    device: Device
    implementation: str = ""
    variant: str = ""


class Recording:
    """What one trace has seen: launches in order, and how often each problem was computed."""

    def __init__(self) -> None:
        self.launches: list[LaunchRecord] = []
        self.problems: dict[TracedProblem, int] = {}

    def add(self, launches: Iterable[LaunchRecord], problems: Iterable[TracedProblem]) -> None:
        """One call that computes these problems."""
        self.launches.extend(launches)
        for problem in problems:
            self.problems[problem] = self.problems.get(problem, 0) + 1


_active: ContextVar[tuple[Recording, ...]] = ContextVar("kernelseam_trace", default=())
active: Callable[[], tuple[Recording, ...]] = _active.get
"""The active traces, usually none."""


@contextmanager
def trace(path: str | os.PathLike[str] | None = None) -> Iterator[list[LaunchRecord]]:
    """Within the block, every launch of this thread (or task) is appended to the list, in order.

    ``path``: at the end of the block, however it ends, the problems that were computed are written
    to this file as JSON: extents, strides, dtypes and options, the device and what was chosen; no
    address and no data. ``kernelseam compile --from`` compiles what they launch. Raises OSError
    where it cannot be written, InvalidValue at the start of the block for what is no path.
    """
    if path is not None and not (isinstance(path, str | os.PathLike) and os.fspath(path)):
        raise InvalidValue("path", path, "must name a file", "Give a str or a Path, or nothing")
    recording = Recording()
    token = _active.set((*_active.get(), recording))
    try:
        yield recording.launches
    finally:
        _active.reset(token)
        if path is not None:
            _write(Path(path), recording)


def _write(path: Path, recording: Recording) -> None:
    """Whole or not at all."""
    problems = [
        {
            "operation": p.problem.operation,
            "problem": _plain(p.problem),
            "device": {
                "backend": p.device.backend,
                "arch": p.device.arch,
                "name": p.device.name,
                "evidence": p.device.evidence,
                "limits": asdict(p.device.limits),
            },
            "implementation": p.implementation,
            "variant": p.variant,
            "calls": calls,
        }
        for p, calls in recording.problems.items()
    ]
    content = {"format": FORMAT, "kernelseam": __version__, "problems": problems}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """A problem as JSON has it: dataclasses by their fields' names, dtypes by name."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | float | str):
        return value
    assert isinstance(value, Integral), f"{value!r} in a problem"
    return int(value)
