"""Kernels on a device: arguments are packed once; a launch only launches."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from kernelseam.contract import NOT_KNOWN, TENSOR_MAP_BYTES, KernelFacts, LaunchConfig
from kernelseam.errors import DeviceError
from kernelseam.forking import new_lock

from kernelseam_cuda import bindings

_WITHOUT_OPT_IN = 48 * 1024
"""Bytes of static and dynamic shared memory that a block has without opting in to more."""
_HAS_FUNC_LOAD = _HAS_PARAM_INFO = 12040
"""The first driver, by the CUDA it serves, that has cuFuncLoad, and cuFuncGetParamInfo."""
_CAPTURES_EARLY_STARTS = 12030
"""The first that captures programmatic dependent launches into graphs. On those before, such a
kernel starts as others do: its wait for them returns at once."""
_INVALID_VALUE = 1
_STRUCTURES = 256
"""Configs of a kernel, and streams of each, whose launch structures are remembered; a full
dictionary is cleared."""
_STREAMS = 8
"""The same of arguments that are packed again for every launch."""

_PER_THREAD = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
"""The bindings' variable; what begins with no number is 0."""

# CU_LAUNCH_PARAM_END, CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE of cuda.h.
_END, _POINTER, _SIZE = 0, 1, 2


@cache
def _launch_kernel() -> Any:
    """The driver's cuLaunchKernelEx(config, function, parameters, extra), all by address: that
    which the bindings call, where the default stream is each thread's."""
    number = re.match(r"\s*[+-]?\d+", os.environ.get(_PER_THREAD, ""))
    per_thread = number is not None and int(number[0]) != 0
    return bindings.by_ctypes("cuLaunchKernelEx" + "_ptsz" * per_thread)


def argument_list(arguments: bytes, size: ctypes.c_size_t) -> tuple[Any, Any]:
    """The packed arguments in a buffer of their own, and the list that passes it to
    cuLaunchKernel."""
    if len(arguments) != size.value:
        raise DeviceError(
            f"{len(arguments)} bytes of arguments were packed, the kernel takes {size.value}"
        )
    buffer = ctypes.create_string_buffer(arguments, max(len(arguments), 1))
    address = ctypes.addressof(buffer)
    return buffer, (ctypes.c_void_p * 5)(_POINTER, address, _SIZE, ctypes.addressof(size), _END)


def parameter_list(buffer: int, facts: KernelFacts) -> Any:
    """The address of each packed parameter, in order: the driver copies each to its offset in
    the kernel.

    For tensor maps. CUDA documents one buffer by C's rules of alignment alone, and a kernel may
    have its first tensor map 48 bytes from the start.
    """
    return (ctypes.c_void_p * len(facts.parameters))(
        *[buffer + offset for offset, _ in facts.parameters]
    )


class CudaKernel:
    """kernelseam.contract.LoadedKernel over a CUfunction."""

    def __init__(self, function: Any, facts: KernelFacts) -> None:
        self._function = function
        self.facts = facts
        self._size = ctypes.c_size_t(
            max((offset + size for offset, size in facts.parameters), default=0)
        )
        self._has_tensor_maps = any(size >= TENSOR_MAP_BYTES for _, size in facts.parameters)
        self._max_dynamic_shared = _WITHOUT_OPT_IN - facts.shared_bytes
        self._structures: dict[LaunchConfig, dict[int, Any]] = {}
        self._lock = new_lock()

    def prepare(self, config: LaunchConfig, arguments: bytes) -> Callable[[int], None]:
        self._opt_in_shared(config.shared_bytes)
        buffer, extra = argument_list(arguments, self._size)
        parameters = (0, ctypes.addressof(extra))
        keep_alive: tuple[object, ...] = (buffer, extra, self._size)
        if self._has_tensor_maps:
            addresses = parameter_list(ctypes.addressof(buffer), self.facts)
            parameters, keep_alive = (ctypes.addressof(addresses), 0), (*keep_alive, addresses)
        return self._launcher(config, parameters, keep_alive)

    def _launcher(
        self, config: LaunchConfig, parameters: tuple[int, int], keep_alive: object
    ) -> Callable[[int], None]:
        """cuLaunchKernelEx for all: its four arguments are handed over in less time than
        cuLaunchKernel's eleven. The structure holds the stream as well: there is one for each
        config and stream, which never changes and which all launches share: to make it takes
        longer than to launch."""
        run, function, (addresses, extra) = (
            bindings.driver().cuLaunchKernelEx,
            self._function,
            parameters,
        )
        structures = self._structures_of(config)

        def launch(stream: int, keep_alive: object = keep_alive) -> None:
            try:
                structure = structures[stream]
            except KeyError:
                if len(structures) >= _STRUCTURES:
                    structures.clear()
                structure = structures[stream] = _launch_structure(config, stream)
            (status,) = run(structure, function, addresses, extra)
            if status:
                bindings.fail("cuLaunchKernelEx", status, str(config))

        return launch

    def reusable(
        self, config: LaunchConfig, packer: struct.Struct
    ) -> Callable[..., Callable[[int], None]]:
        """See kernelseam.contract.ReusableKernel. What a launch needs of the host (a buffer of
        arguments, their addresses, a structure for each stream) is taken from a list, and put back
        when the driver has copied it. The driver is called by ctypes, over ctypes' own objects:
        where calls are far between, the bindings take half as long again."""
        self._opt_in_shared(config.shared_bytes)
        run, facts = _launch_kernel(), self.facts
        function = ctypes.c_void_p(int(self._function))
        free = list[tuple[Any, list[int], Callable[[int], None]]]()
        pack_into = packer.pack_into
        if packer.size != self._size.value:
            raise DeviceError(
                f"{packer.size} bytes of arguments are packed, the kernel takes {self._size.value}"
            )

        def frame() -> tuple[Any, list[int], Callable[[int], None]]:
            buffer, extra = argument_list(bytes(packer.size), self._size)
            addresses, listed = ctypes.c_void_p(), ctypes.c_void_p(ctypes.addressof(extra))
            kept: Any = extra
            if self._has_tensor_maps:
                kept = parameter_list(ctypes.addressof(buffer), facts)
                addresses, listed = ctypes.c_void_p(ctypes.addressof(kept)), ctypes.c_void_p()
            grid, structures = [0], dict[int, tuple[Any, Any, Any]]()

            def launch(stream: int, keep_alive: object = kept) -> None:
                try:
                    structure, blocks, _ = structures[stream]
                except KeyError:
                    if len(structures) >= _STREAMS:
                        structures.pop(next(iter(structures)))
                    made = _launch_structure(config, stream)
                    at = made.getPtr()  # of a CUlaunchConfig, which gridDimX begins
                    structure, blocks = ctypes.c_void_p(at), ctypes.c_uint32.from_address(at)
                    structures[stream] = structure, blocks, made
                blocks.value = grid[0]
                status = run(structure, function, addresses, listed)
                free.append(own)
                if status:
                    failed = replace(config, grid=(grid[0], 1, 1))
                    bindings.fail("cuLaunchKernelEx", status, str(failed))

            own = (buffer, grid, launch)
            return own

        def pack(blocks: int, *values: Any) -> Callable[[int], None]:
            try:
                buffer, grid, launch = free.pop()
            except IndexError:
                buffer, grid, launch = frame()
            pack_into(buffer, 0, *values)
            grid[0] = blocks
            return launch

        return pack

    def _structures_of(self, config: LaunchConfig) -> dict[int, Any]:
        """By stream."""
        if len(self._structures) >= _STRUCTURES:
            self._structures.clear()  # launches keep their own
        return self._structures.setdefault(config, {})

    def _opt_in_shared(self, shared_bytes: int) -> None:
        """Opt in to that much dynamic shared memory, never back to less: other plans share the
        function."""
        with self._lock:
            if shared_bytes > self._max_dynamic_shared:
                attributes = bindings.driver().CUfunction_attribute
                attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                bindings.call("cuFuncSetAttribute", self._function, attribute, shared_bytes)
                self._max_dynamic_shared = shared_bytes


def _launch_structure(config: LaunchConfig, stream: int) -> Any:
    """The config as a CUlaunchConfig, on a stream."""
    api = bindings.driver()
    structure, attributes = api.CUlaunchConfig(), []
    structure.gridDimX, structure.gridDimY, structure.gridDimZ = config.grid
    structure.blockDimX, structure.blockDimY, structure.blockDimZ = config.block
    structure.sharedMemBytes, structure.hStream = config.shared_bytes, stream
    if config.cluster != (1, 1, 1):
        cluster = api.CUlaunchAttribute()
        cluster.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = (
            config.cluster
        )
        attributes.append(cluster)
    if config.programmatic and bindings.call("cuDriverGetVersion") >= _CAPTURES_EARLY_STARTS:
        early = api.CUlaunchAttribute()
        early.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    if config.cooperative:
        together = api.CUlaunchAttribute()
        together.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        together.value.cooperative = 1
        attributes.append(together)
    structure.attrs, structure.numAttrs = attributes, len(attributes)
    return structure


def driver_facts(function: Any, name: str) -> KernelFacts:
    """What the driver reports of a function. It counts neither spills, which are part of a thread's
    local memory, nor instructions."""
    attributes = bindings.driver().CUfunction_attribute

    def attribute(suffix: str) -> int:
        return int(
            bindings.call(
                "cuFuncGetAttribute", getattr(attributes, f"CU_FUNC_ATTRIBUTE_{suffix}"), function
            )
        )

    parameters: list[tuple[int, int]] = []
    while (parameter := _parameter(function, len(parameters))) is not None:
        parameters.append(parameter)
    return KernelFacts(
        name,
        attribute("NUM_REGS"),
        NOT_KNOWN,
        attribute("LOCAL_SIZE_BYTES"),
        attribute("SHARED_SIZE_BYTES"),
        NOT_KNOWN,
        tuple(parameters),
    )


def _parameter(function: Any, index: int) -> tuple[int, int] | None:
    """(offset, size) of a parameter; None beyond the last."""
    status, *result = bindings.driver().cuFuncGetParamInfo(function, index)
    if int(status) == _INVALID_VALUE:
        return None
    if int(status):
        bindings.fail("cuFuncGetParamInfo", status)
    offset, size = result
    return int(offset), int(size)


def load(module: Any, name: str, read: Callable[[], KernelFacts]) -> CudaKernel:
    """The kernel of a module of the current context, on the device when this returns.

    Loading at the first launch, as the driver does by default, would synchronise, and fail inside a
    graph's capture. ``read`` reads the facts off the binary, for a driver that does not report
    the parameters' offsets.
    """
    function = bindings.call("cuModuleGetFunction", module, name.encode())
    version = bindings.call("cuDriverGetVersion")
    if version >= _HAS_FUNC_LOAD:
        bindings.call("cuFuncLoad", function)
    return CudaKernel(
        function, driver_facts(function, name) if version >= _HAS_PARAM_INFO else read()
    )
