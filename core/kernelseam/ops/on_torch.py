"""What calls on torch tensors ask a runtime and torch for: memory, streams, launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from kernelseam.arrays import torch as torch_arrays
from kernelseam.capture import refuse_capture
from kernelseam.contract import CallState, Device, FastRuntime, GraphRuntime
from kernelseam.ops.array_call import FREED
from kernelseam.planning.streams import stream_handle

T = TypeVar("T")
Enqueue = Callable[[int], None]
_ZEROED_BYTES = 1 << 18
_MOST_STREAMS = 64
"""That have memory of 0: torch has 32 of each priority."""
Zeroed = dict[Device, dict[int, tuple[int, Any]]]
"""By device and stream, the address of memory that is 0 whenever a call's launches on the stream
begin, and that memory: calls need no memset. The address 0 where there is none."""


class OnTorch:
    """For one device."""

    def __init__(self, runtime: FastRuntime, device: Device, like: Any, zeroed: Zeroed) -> None:
        self.runtime: Any = runtime
        self.device, self._zeroed = device, zeroed.setdefault(device, {})
        state: CallState = runtime.call_state(device, "torch")
        self._is_capturing = runtime.is_capturing if isinstance(runtime, GraphRuntime) else None
        self.is_current, self.stream = state.is_current, state.current_stream
        self.empty = torch_arrays.allocator(like)
        self.address_of: Callable[[Any], int] = sys.modules["torch"].Tensor.data_ptr
        self.copied = torch_arrays.copier(like)
        self.count_writes = torch_arrays.version_incrementer()

    def zeroed(self, size: int) -> int:
        """The address of so many bytes of 0 for launches on torch's current stream, which leave
        them 0; 0 where there are none. Launches on one stream take turns. A graph's may run beside
        others, and must have their own."""
        stream = self.stream()
        if size > _ZEROED_BYTES or (stream and self._has_own(stream)):
            return 0
        known = self._zeroed.get(stream)
        if known is None and len(self._zeroed) < _MOST_STREAMS:
            known = self._new_zeroed(stream)
        return known[0] if known else 0

    def captures(self) -> bool:
        """Whether torch's current stream is being captured in a graph, or nobody tells."""
        return self._is_capturing is None or self._is_capturing(self.device, self.stream())

    def _has_own(self, stream: int) -> bool:
        """Whether launches may not share memory with others of the same handle: of a graph, of the
        handles that stand for a stream of each thread, and where graphs are not told."""
        return stream < 3 or self._is_capturing is None or self._is_capturing(self.device, stream)

    def _new_zeroed(self, stream: int) -> tuple[int, Any]:
        torch: Any = sys.modules["torch"]
        memory = self.empty((_ZEROED_BYTES // 4,), (1,), torch.float32)
        if not torch_arrays.lies_in_default_pool(memory):  # but in one that a graph takes back
            return self._zeroed.setdefault(stream, (0, None))
        address: int = memory.data_ptr()
        self.runtime.prepare_memset(address, 0, _ZEROED_BYTES, self.device)(stream)
        # another thread's may come first: what is kept was set to 0 on the stream before
        return self._zeroed.setdefault(stream, (address, memory))

    def within(self, function: Callable[..., T], *arguments: Any) -> T:
        """A call of a function with the device made current."""
        with self.runtime.activate(self.device):
            return function(*arguments)

    def launch(self, launches: Enqueue, workspace: Any, stream: object) -> None:
        """Run launches on a stream as callers name it, of the current device; where they use a
        workspace on a stream that torch's allocator does not know, wait."""
        if stream is None:
            handle = self.stream()
        elif type(stream) is int and 0 <= stream < 2**64:
            handle = stream
        else:
            handle = stream_handle(stream, self.runtime, self.device)
        waits = workspace is not None and stream is not None and handle != self.stream()
        if waits:
            refuse_capture(self.runtime, self.device, *FREED, stream=handle)
        launches(handle)
        if waits:
            self.runtime.synchronize(self.device)


def none_zeroed(size: int) -> int:
    """In place of ``OnTorch.zeroed`` on a stream that is not torch's current one."""
    return 0
