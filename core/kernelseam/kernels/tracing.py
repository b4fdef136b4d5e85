"""Kernels' launches for problems whose numbers are symbols: what a spec and a tile determine is
made here, once, and what extents, strides and addresses determine stays an expression of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from kernelseam.compilation import compiled
from kernelseam.contract import (
    AddressFirstEncoder,
    Device,
    Launch,
    LaunchConfig,
    Launches,
    LoadedKernel,
    Memset,
    ReusableKernel,
    Runtime,
    TensorMap,
    TensorMapEncoder,
    Toolchain,
)
from kernelseam.frozen import changed, dataclass
from kernelseam.kernels.kernel import KernelImplementation, bundle, placed_signature
from kernelseam.kernels.signature import Signature
from kernelseam.symbolic import Untraceable

Enqueue = Callable[[int], None]
"""``launch(stream)``."""


@dataclass(frozen=True)
class Encoded:
    """An argument that is a tensor map: ``encode(extents, strides, address)``."""

    encode: Callable[..., bytes]
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    tail: Callable[..., tuple[bytes, int] | None] | None = None
    """See kernelseam.contract.AddressFirstEncoder."""


@dataclass(frozen=True)
class TracedStep:
    """One launch of which ``arguments`` are the numbers: symbols and others, and ``Encoded``."""

    once: Callable[..., Enqueue]
    """``once(*arguments)``: a launch that is run once, before anything else is packed."""
    kept: Callable[..., Enqueue]
    """The same, which may be run any number of times."""
    arguments: tuple[Any, ...]
    signature: Signature | None = None
    """A kernel's, of all arguments but the first, the blocks."""
    once_by: Callable[[struct.Struct], Callable[..., Enqueue]] | None = None
    """``once`` whose arguments behind the blocks are a packer's; None where a launch keeps its
    own."""


def traced_launches(
    implementation: KernelImplementation, problem: Any, tile: Any, device: Device
) -> Launches | None:
    """The launches of a problem by a tile of its class; None where they do not take it."""
    row = implementation.toolchain.arch_row(device.arch)
    composition = implementation.composition
    if composition.refuse(problem, row) or not composition.takes(problem, tile, row, device):
        return None
    launches = composition.launches(problem, tile, device)
    if implementation.refuse_launches(problem, launches, device):
        return None
    return None if implementation.refuse_missing(launches, device) else launches


def traced_steps(
    launches: Launches,
    toolchain: Toolchain,
    runtime: Runtime,
    device: Device,
    addresses: Mapping[str, int],
    workspace: int,
    zeroed: int,
) -> list[TracedStep]:
    """The launches as functions of their numbers: compiled and loaded. ``zeroed``: the address that
    takes the place of the workspace's first ``zeroed_bytes``, which the caller has set to 0."""

    def at(offset: int) -> int:
        return (zeroed if offset < launches.zeroed_bytes else workspace) + offset

    steps = []
    for step in launches.steps:
        if isinstance(step, Memset):
            if step.size:
                steps.append(traced_memset(runtime, device, at(step.offset), step.value, step.size))
            continue
        places = {parameter: at(offset) for parameter, offset in step.workspace.items()}
        if (traced := _kernel(step, toolchain, device, addresses, places)) is not None:
            steps.append(traced)
    return steps


def traced_memset(runtime: Runtime, device: Device, at: int, value: int, size: int) -> TracedStep:
    prepare: Callable[..., Enqueue] = partial(runtime.prepare_memset, device=device)
    return TracedStep(prepare, prepare, (at, value, size))


def _kernel(
    launch: Launch,
    toolchain: Toolchain,
    device: Device,
    addresses: Mapping[str, int],
    places: Mapping[str, int],
) -> TracedStep | None:
    """One kernel; None where it has nothing to do. ``places``: addresses in the workspace."""
    kernel, problem, tile = launch.kernel, launch.problem, launch.tile
    row = toolchain.arch_row(device.arch)
    config: LaunchConfig = kernel.config(problem, tile, row, device)
    blocks, *others = config.grid
    if blocks == 0:
        return None
    if others != [1, 1]:
        raise Untraceable(f"{kernel.entry} has a grid of several axes")
    source = bundle(kernel, problem.spec, tile, toolchain, device.arch)
    binary = compiled(toolchain, source, device.arch)
    loaded = toolchain.load(binary.data, kernel.entry, device)
    signature = placed_signature(kernel, problem.spec, cast(Any, loaded))
    maps: Mapping[str, TensorMap] = kernel.tensor_maps(problem, tile, device)
    operands = {
        **kernel.pointers(problem.spec),
        **{parameter: m.operand for parameter, m in maps.items()},
        **launch.operands,
    }
    values = dict(kernel.values(problem, tile, device))
    values |= {parameter: addresses.get(name, 0) for parameter, name in operands.items()}
    values |= places
    for parameter, m in maps.items():
        values[parameter] = _encoded(toolchain, m, values[parameter])
    fixed = changed(config, grid=(1, 1, 1))
    kept: Callable[..., Enqueue] = partial(_prepare, loaded, fixed, signature.packer)
    once, once_by = kept, None
    if isinstance(loaded, ReusableKernel):
        once_by = partial(loaded.reusable, fixed)
        once = once_by(signature.packer)
    arguments = (blocks, *[values[name] for name, _, _ in signature.scalars])
    return TracedStep(once, kept, arguments, signature, once_by)


def _prepare(
    loaded: LoadedKernel, config: LaunchConfig, packer: struct.Struct, blocks: int, *values: Any
) -> Enqueue:
    return loaded.prepare(changed(config, grid=(blocks, 1, 1)), packer.pack(*values))


def _encoded(toolchain: Toolchain, m: TensorMap, address: Any) -> Encoded:
    """With what the template has; an axis of extent 1 has a stride that nothing reads."""
    template = changed(m, extents=(1,) * len(m.extents), strides=(1,) * len(m.extents), offset=0)
    encode: Callable[..., bytes] = partial(_encode, toolchain, template)
    tail = None
    if isinstance(toolchain, TensorMapEncoder):
        encode = toolchain.tensor_map_encoder(template)
    if isinstance(toolchain, AddressFirstEncoder):
        tail = toolchain.address_first_encoder(template)
    return Encoded(encode, m.extents, m.strides, address + m.offset, tail)


def _encode(
    toolchain: Toolchain,
    template: TensorMap,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    address: int,
) -> bytes:
    return toolchain.encode_tensor_map(changed(template, extents=extents, strides=strides), address)
