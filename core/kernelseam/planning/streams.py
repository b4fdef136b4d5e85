"""Streams as callers hand them over, and what a runtime has ready for calls that repeat."""

from __future__ import annotations

from functools import partial

from kernelseam.contract import ArrayInfo, Device, QuickRuntime, Ready, Runtime
from kernelseam.errors import InvalidValue


def ready_of(runtime: Runtime, device: Device, array: ArrayInfo | None) -> Ready:
    """What a runtime has ready for calls on a device; where it has nothing, ``activate`` is always
    asked for."""
    if isinstance(runtime, QuickRuntime):
        return runtime.ready(device, array.kind if array else None)
    return Ready(lambda: False, partial(runtime.current_stream, device, array))


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
