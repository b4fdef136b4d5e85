"""Streams that are being captured in a graph: what would synchronise is refused by name, before the
driver ends the capture."""

from __future__ import annotations

from kernelseam.contract import Device, GraphRuntime, Runtime
from kernelseam.errors import InvalidValue


def refuse_capture(
    runtime: Runtime, device: Device, rule: str, remedy: str, stream: int | None = None
) -> None:
    """Raise InvalidValue where a stream is being captured: ``stream``, or where None the current
    one of an array library in use."""
    if isinstance(runtime, GraphRuntime) and runtime.is_capturing(device, stream):
        raise InvalidValue("stream", "one that is being captured in a graph", rule, remedy)
