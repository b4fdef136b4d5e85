"""Streams as callers pass them, and a runtime's queries for repeated calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from kernelseam.contract import ArrayInfo, CallState, Device, FastRuntime, Runtime
from kernelseam.errors import InvalidValue


def call_state(runtime: Runtime, device: Device, array: ArrayInfo | None) -> CallState:
    """The runtime's queries for calls on a device. Without a FastRuntime, ``activate`` is called
    every time."""
    fast: Any = getattr(runtime, FastRuntime.call_state.__name__, None)
    if fast is not None:  # isinstance asks a protocol for all that it has, at every call
        state: CallState = fast(device, array.kind if array else None)
        return state
    return CallState(lambda: False, partial(runtime.current_stream, device, array))


def stream_handle(
    stream: object, runtime: Runtime, device: Device, array: ArrayInfo | None = None
) -> int:
    """The integer handle of a stream: an int, an object with ``__cuda_stream__``, or None, the
    array library's current one. Raises InvalidValue for anything else."""
    if stream is None:
        return runtime.current_stream(device, array)
    handle = stream
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        pair = protocol() if callable(protocol) else protocol
        handle = pair[1] if isinstance(pair, tuple | list) and len(pair) == 2 else None
    if not isinstance(handle, int) or isinstance(handle, bool) or not 0 <= handle < 2**64:
        raise InvalidValue(
            "stream",
            repr(stream) if isinstance(stream, str) else stream,
            "must be an int, an object with __cuda_stream__, or None",
            "Pass the stream's integer handle",
        )
    return handle
