"""The fast path of a repeated call on torch tensors: it reads their attributes, allocates results
and launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.arrays import torch as torch_arrays
from kernelseam.capture import refuse_capture
from kernelseam.contract import ArrayInfo, FastRuntime
from kernelseam.ops.planned_call import FREED, BoundLaunches, Infos, PlannedCall
from kernelseam.planning.streams import stream_handle
from kernelseam.trace import active


class Shortcut:
    """A planned call for torch tensors of the same layouts. It makes no ``ArrayInfo`` of them."""

    __slots__ = (
        "_allocate_workspace",
        "_allocators",
        "_count_writes",
        "_is_current",
        "_names",
        "_planned",
        "_stream",
    )

    def __init__(self, planned: PlannedCall, infos: Infos, workspace: ArrayInfo | None) -> None:
        assert isinstance(planned.runtime, FastRuntime)
        self._planned, self._names = planned, tuple(infos)
        call_state = planned.runtime.call_state(planned.device, "torch")
        self._is_current, self._stream = call_state.is_current, call_state.current_stream
        self._allocators = [
            (r.name, torch_arrays.allocator(r.shape, r.dtype, infos[r.like].owner))
            for r in planned.results
        ]
        self._allocate_workspace = (
            None
            if workspace is None
            else torch_arrays.allocator(workspace.shape, workspace.dtype, workspace.owner)
        )
        self._count_writes = torch_arrays.version_incrementer()

    def call(
        self,
        pointers: list[int],
        arrays: Mapping[str, object],
        stream: object,
        bound: BoundLaunches,
    ) -> dict[str, Any] | None:
        """Allocate the results, launch, and return the results by name.

        ``pointers``: the arrays' addresses, in order. Returns None, with nothing launched, where a
        result cannot be allocated or has another layout: the call must then be planned."""
        planned, workspace_address, workspace = self._planned, 0, None
        results: dict[str, Any] = {}
        try:
            for name, allocate in self._allocators:
                results[name] = x = allocate()
                pointers.append(x.data_ptr())
                if not pointers[-1] or pointers[-1] & 15:
                    return None
            if self._allocate_workspace is not None:
                workspace = self._allocate_workspace()
                workspace_address = workspace.data_ptr()
        except Exception:  # the planned call allocates again and raises the proper error
            return None
        if stream is None:
            handle = self._stream()
        elif type(stream) is int and 0 <= stream < 2**64:
            handle = stream
        else:
            handle = stream_handle(stream, planned.runtime, planned.device)
        # The library may reuse the workspace at once: its allocator does not know this stream.
        waits = workspace is not None and stream is not None and handle != self._stream()
        if waits:
            refuse_capture(planned.runtime, planned.device, *FREED, stream=handle)
        key = (planned, workspace_address, *pointers)
        launches = bound.get(key)
        if launches is not None and self._is_current() and not active():
            launches.run(handle)
        else:
            with planned.runtime.activate(planned.device):
                if launches is None:
                    addresses = dict(zip(self._names, pointers, strict=True))
                    launches = planned.bind_addresses(addresses, key, bound)
                launches.launch(handle)
        if waits:
            planned.runtime.synchronize(planned.device)
        if planned.written:
            self._count_writes(tuple([arrays[name] for name in planned.written]))
        return results
