"""Calls on the GPU that JAX computes on: launches on XLA's stream over XLA's memory. Imports JAX.

``jax.experimental.buffer_callback`` calls Python with the buffers of operands and results, and with
the stream. The call is planned while JAX traces, on shapes; what it needs as workspace is one
result more, so that XLA allocates all memory. When the compiled function runs, the callback binds
the plan to addresses and launches: it copies nothing, and waits for nothing. XLA may capture the
launches in a command buffer (a graph), and replay that over the same addresses without asking.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from kernelseam.contract import ArrayInfo, Backend, Device
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.array_call import ArrayCall, BoundCache, put
from kernelseam.ops.operation import Operation
from kernelseam.plugins import plugins

Array = Any
Work = Callable[..., None]
_ALIGNED = 256
"""Bytes: of every buffer of XLA's on a GPU. Stands for an address while a call is planned."""


def backend() -> Backend | None:
    """The backend that launches on the GPU that JAX computes on, if there is one."""
    if jax.default_backend() != "gpu":
        return None
    known = plugins().registry.backends.values()
    return next((b for b in known if _is_jax_on(b.jax_platform) and b.runtime.devices()), None)


def _is_jax_on(platform: str) -> bool:
    try:
        return bool(platform and jax.devices(platform))
    except RuntimeError:  # JAX has no such platform here
        return False


def launch(
    work: Work,
    arrays: Mapping[str, Array],
    options: tuple[Any, ...],
    wording: Wording,
) -> dict[str, Array]:
    """The results of an operation on JAX's arrays, by name.

    Raises, while JAX traces, InvalidValue and Unsupported as the operation does.
    """
    of = backend()
    assert of is not None, "JAX computes on the host"
    shapes = {n: (x.shape, x.dtype) for n, x in arrays.items()}
    call = _Callback(of.name, work, shapes, options)
    try:
        planned = call.planned(of.runtime.devices()[0], plugins().cache_of(_Cache))
    except InvalidValue as e:
        raise wording.reworded(e) from None
    results = [jax.ShapeDtypeStruct(r.shape, np.dtype(r.dtype.numpy)) for r in planned.results]
    if planned.workspace_bytes:
        results.append(jax.ShapeDtypeStruct((planned.workspace_bytes,), np.dtype(np.uint8)))
    result = buffer_callback(
        call, results, vmap_method="sequential", command_buffer_compatible=True
    )(*arrays.values())
    return {r.name: x for r, x in zip(planned.results, result, strict=False)}


class _Cache:
    """Planned calls and bound launches, which go with the plugins that made them."""

    def __init__(self) -> None:
        self.planned: dict[Hashable, ArrayCall] = {}
        self.bound: BoundCache = {}


class _Callback:
    """An operation on arrays of these shapes and dtypes, which XLA calls back."""

    def __init__(
        self,
        backend_name: str,
        work: Work,
        arrays: Mapping[str, tuple[Any, Any]],
        options: tuple[Any, ...],
    ) -> None:
        self._backend = backend_name
        self._work, self._arrays, self._options = work, dict(arrays), options
        self._key = (work, tuple(arrays.items()), options, *map(type, options))

        self._last: tuple[_Cache, Device, ArrayCall] | None = None

    def planned(self, device: Device, cache: _Cache) -> ArrayCall:
        last = self._last  # read once: XLA has a thread for each device
        if last is not None and last[0] is cache and last[1] is device:
            return last[2]
        result = cache.planned.get((device, self._key))
        if result is None:
            infos = {n: _view(*x, device) for n, x in self._arrays.items()}
            operation = _Outline(infos, None)
            self._work(operation, *self._options)
            result = operation.planned()
            assert not result.synchronizes, "rows in order need no lists of addresses"
            put(cache.planned, (device, self._key), result)
        self._last = cache, device, result
        return result

    def __call__(self, context: Any, results: Sequence[Any], *operands: Any) -> None:
        places = [_place(x) for x in (*operands, *results)]
        current = plugins()
        device = current.backend(self._backend).runtime.devices()[places[-1][1]]
        cache = current.cache_of(_Cache)
        planned = self.planned(device, cache)
        workspace = places[-1][0] if planned.workspace_bytes else 0
        key = (planned, workspace, *places)
        with planned.runtime.activate(device):
            bound = cache.bound.get(key)
            if bound is None:
                names = (*self._arrays, *(r.name for r in planned.results))
                addresses = dict(zip(names, (address for address, _ in places), strict=False))
                bound = planned.bind_addresses(addresses, key, cache.bound)
            bound.launch(_stream(context))


def _stream(context: Any) -> int:
    return int(context.stream)


class _Outline(Operation):
    """A call on arrays that have no memory yet."""

    def new_array(
        self, name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo
    ) -> ArrayInfo:
        return _view(tuple(shape), dtype.numpy, like.device)


def _view(shape: tuple[int, ...], dtype: Any, device: Device) -> ArrayInfo:
    strides = np.cumprod([1, *reversed(shape[1:])]).tolist()[::-1] if shape else []
    kind = DType.of(np.dtype(dtype), floating=False)
    return ArrayInfo(_ALIGNED, shape, tuple(strides), kind, device, "jax", None)


class _Tensor(ctypes.Structure):
    """The head of DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _place(buffer: Any) -> tuple[int, int]:
    """The address of a buffer of XLA's, and the index of its device. DLPack has every dtype."""
    capsule = buffer.__dlpack__()
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    return tensor.data or 0, tensor.device_index
