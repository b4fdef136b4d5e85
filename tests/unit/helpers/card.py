"""A vendor whose device memory is the host's, so that torch's CPU tensors are its arrays; with a
compiler, where kernels are to be known by their specs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import (
    ArrayInfo,
    Backend,
    CallState,
    Device,
    DeviceLimits,
    LaunchConfig,
    TensorMap,
)
from kernelseam.dtypes import DType
from kernelseam.plugins import Plugins
from kernelseam_thirdvendor import AcmeGemm, AcmeRuntime
from kernelseam_thirdvendor.compiled import AcmeKernel, AcmeToolchain, Rows

CARD = Device("card", 0, "acme1", "Card", DeviceLimits(launch_seconds=1e-6))


class CardRuntime(AcmeRuntime):
    """``described`` counts the arrays that it was asked about; ``entered`` how often it was made
    current."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.described, self.entered, self.waits = 0, 0, 0, 0

    def devices(self) -> tuple[Device, ...]:
        return (CARD,)

    def describe(self, array: Any) -> ArrayInfo | None:
        self.described += 1
        if not torch_arrays.is_tensor(array) or array.device.type != "cpu":
            return None
        return torch_arrays.describe(array, CARD)

    def empty(
        self, shape: Any, dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        return torch_arrays.empty(shape, dtype, "cpu")

    def synchronize(self, device: Device) -> None:
        self.waits += 1

    def call_state(self, device: Device, kind: str | None) -> CallState:
        assert (device, kind) == (CARD, "torch")
        return CallState(lambda: self.current == 0, lambda: self.stream)

    @contextmanager
    def activate(self, device: Device) -> Iterator[None]:
        self.entered += 1
        with super().activate(device):
            yield


class CardGemm(AcmeGemm):
    name, backend = "card-gemm", "card"


class CardToolchain(AcmeToolchain):
    backend = "card"


class QuickKernel(AcmeKernel):
    """Packs launches that run once."""

    def reusable(
        self, config: LaunchConfig, packer: struct.Struct
    ) -> Callable[..., Callable[[int], None]]:
        return lambda blocks, *values: self.prepare(
            replace(config, grid=(blocks, 1, 1)), packer.pack(*values)
        )


class QuickToolchain(CardToolchain):
    """Whose tensor maps begin with their addresses below ``end``; ``tails`` counts those that were
    asked for."""

    def __init__(self, end: int | None) -> None:
        super().__init__()
        self.end, self.tails = end, 0

    def load(self, binary: bytes, kernel: str, device: Device) -> AcmeKernel:
        return QuickKernel(binary, self.inspect(binary, device.arch)[kernel])

    def tensor_map_encoder(self, template: TensorMap) -> Callable[..., bytes]:
        def encode(extents: tuple[int, ...], strides: tuple[int, ...], address: int) -> bytes:
            m = replace(template, extents=extents, strides=strides)
            return self.encode_tensor_map(m, address)

        return encode

    def address_first_encoder(self, template: TensorMap) -> Callable[..., tuple[bytes, int] | None]:
        def tail(
            extents: tuple[int, ...], strides: tuple[int, ...], address: int
        ) -> tuple[bytes, int] | None:
            self.tails += 1
            m = replace(template, extents=extents, strides=strides)
            content = AcmeToolchain().encode_tensor_map(m, address)
            return None if self.end is None else (content[8:], self.end)

        return tail


class CardRows(Rows):
    """A kernel that says nothing of classes: its tile is each problem's own."""

    name = "card-rows"


def add_compiled_card(loaded: Plugins, toolchain: CardToolchain | None = None) -> CardRuntime:
    """The vendor with its compiler among these plugins, before the others."""
    runtime, toolchain = CardRuntime(), toolchain or CardToolchain()
    loaded.registry.add_backend(
        Backend("card", runtime, toolchain, (CardGemm(),), (CardRows(),), priority=10)
    )
    return runtime
