"""The way of a repeated call on torch's tensors: it asks their attributes, allocates results and
launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, QuickRuntime
from kernelseam.ops.planned_call import BoundBy, Infos, PlannedCall
from kernelseam.planning.streams import stream_handle
from kernelseam.trace import active


class Shortcut:
    """A planned call for torch's tensors of the same layouts: nothing of them is described."""

    __slots__ = ("_is_current", "_known", "_makers", "_names", "_stream", "_tell", "_workspace")

    def __init__(self, known: PlannedCall, infos: Infos, own: ArrayInfo | None) -> None:
        assert isinstance(known.runtime, QuickRuntime)
        self._known, self._names = known, tuple(infos)
        ready = known.runtime.ready(known.device, "torch")
        self._is_current, self._stream = ready.is_current, ready.current_stream
        self._makers = [
            (r.name, torch_arrays.maker(r.shape, r.dtype, infos[r.like].owner))
            for r in known.results
        ]
        self._workspace = (
            None if own is None else torch_arrays.maker(own.shape, own.dtype, own.owner)
        )
        self._tell = torch_arrays.teller()

    def call(
        self, pointers: list[int], arrays: Mapping[str, object], stream: object, bound: BoundBy
    ) -> dict[str, Any] | None:
        """Its results; None, with nothing launched, where a result could not be allocated or has
        another layout, so that the call must be planned. ``pointers``: those of the arrays, in
        order."""
        known, place, own = self._known, 0, None
        results: dict[str, Any] = {}
        try:
            for name, make in self._makers:
                results[name] = x = make()
                pointers.append(x.data_ptr())
                if not pointers[-1] or pointers[-1] & 15:
                    return None
            if self._workspace is not None:
                own = self._workspace()
                place = own.data_ptr()
        except Exception:  # the runtime, which is asked again, says it in its words
            return None
        if stream is None:
            handle = self._stream()
        elif type(stream) is int and 0 <= stream < 2**64:
            handle = stream
        else:
            handle = stream_handle(stream, known.runtime, known.device)
        key = (known, place, *pointers)
        launches = bound.get(key)
        if launches is not None and self._is_current() and not active():
            for launch in launches.launches:
                launch(handle)
        else:
            with known.runtime.activate(known.device):
                if launches is None:
                    addresses = dict(zip(self._names, pointers, strict=True))
                    launches = known.bound_to(addresses, key, bound)
                launches.launch(handle)
        # The library, which takes the workspace back, knows nothing of another stream.
        if own is not None and stream is not None and handle != self._stream():
            known.runtime.synchronize(known.device)
        if known.written:
            self._tell(tuple([arrays[name] for name in known.written]))
        return results
