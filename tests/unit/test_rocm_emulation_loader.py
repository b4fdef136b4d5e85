"""What a driver does with a code object: relocations, descriptors, arguments and the registers a
wave starts with."""

from __future__ import annotations

import struct
from io import BytesIO

import pytest
from kernelseam.contract import LaunchConfig, SourceBundle
from kernelseam.errors import CompileError, DeviceError

pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
import amdelf  # noqa: E402
from elftools.elf.elffile import ELFFile  # noqa: E402
from kernelseam_rocm import codeobject  # noqa: E402
from kernelseam_rocm_emulator import loader  # noqa: E402
from kernelseam_rocm_emulator.loader import Descriptor  # noqa: E402

BASE = 0x7F0123456000
RELATIVE64, ABS64, ABS32_LO, ABS32_HI, REL32 = 13, 3, 1, 2, 4


def image(*relocations: tuple[int, int, int, int]) -> bytes:
    elf = amdelf.elf(b"code", relocations=relocations)
    return loader.image(ELFFile(BytesIO(elf)), BASE)


def words(memory: bytes, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", memory, amdelf.TABLE_AT)


def test_segments_are_at_their_addresses() -> None:
    memory = image()
    assert memory[amdelf.CODE_AT :] == b"code"
    assert memory[amdelf.DESCRIPTOR_AT : amdelf.DESCRIPTOR_AT + 64] == amdelf.descriptor()


def test_relocations() -> None:
    memory = image(
        (0, RELATIVE64, 0, 0x20),
        (1, ABS64, 1, 8),
        (2, ABS32_LO, 2, 0),
        (3, ABS32_HI, 2, 0),
        (4, ABS64, 2, -16),
    )
    kernel = BASE + amdelf.DESCRIPTOR_AT
    assert words(memory, 5) == (
        BASE + 0x20,
        BASE + amdelf.CODE_AT + 8,
        kernel & 0xFFFFFFFF,
        kernel >> 32,
        kernel - 16,
    )


def test_what_cannot_be_relocated_is_refused() -> None:
    with pytest.raises(DeviceError, match="needs symbol elsewhere, which it does not define"):
        image((0, ABS64, 3, 0))
    with pytest.raises(DeviceError, match="a relocation of type 4, which the loader does not know"):
        image((0, REL32, 1, 0))


def test_descriptor() -> None:
    kd = amdelf.descriptor(
        shared=512,
        scratch=48,
        kernarg=80,
        entry=0x40,
        rsrc1=1 << 16,
        rsrc2=13 << 1,
        properties=9,
        preload=5,
    )
    d = Descriptor.read(bytes(16) + kd, 16)
    assert (d.shared_bytes, d.scratch_bytes, d.kernarg_bytes, d.entry) == (512, 48, 80, 0x40)
    assert (d.user_registers, d.properties, d.preload) == (13, 9, 5)


@pytest.mark.parametrize(("mode", "flushes"), [(0, True), (1, True), (2, True), (3, False)])
def test_float32_subnormals(mode: int, flushes: bool) -> None:
    assert (
        Descriptor.read(amdelf.descriptor(rsrc1=mode << 16 | 3 << 18), 0).flushes_single is flushes
    )


HIDDEN = (
    ("block_count_x", 16, 4),
    ("block_count_y", 20, 4),
    ("block_count_z", 24, 4),
    ("group_size_x", 28, 2),
    ("group_size_y", 30, 2),
    ("group_size_z", 32, 2),
    ("remainder_x", 34, 2),
    ("grid_dims", 36, 2),
    ("dynamic_lds_size", 40, 4),
    ("heap_v1", 48, 8),
)


def test_hidden_arguments() -> None:
    args = [
        {".offset": at, ".size": size, ".value_kind": f"hidden_{name}"} for name, at, size in HIDDEN
    ]
    kernel = amdelf.metadata(
        **{".args": [*amdelf.metadata()[".args"], *args], ".kernarg_segment_size": 56}
    )
    d = Descriptor.read(amdelf.descriptor(kernarg=56), 0)
    segment = loader.kernarg(kernel, d, b"\xaa" * 16, LaunchConfig((7, 3, 1), (64, 2, 1), 4096))
    assert len(segment) == 56 and segment[:16] == b"\xaa" * 16
    assert struct.unpack_from("<IIIHHHHHxxIxxxxQ", segment, 16) == (
        7,
        3,
        1,
        64,
        2,
        1,
        0,
        2,
        4096,
        0,
    )


@pytest.mark.parametrize(
    ("grid", "block", "dimensions"),
    [((1, 1, 1), (1, 1, 1), 1), ((1, 2, 1), (1, 1, 1), 2), ((1, 1, 1), (1, 1, 3), 3)],
)
def test_dimensions_of_a_grid(grid: loader.Extents, block: loader.Extents, dimensions: int) -> None:
    assert loader.hidden_arguments(LaunchConfig(grid, block))["hidden_grid_dims"] == dimensions


def test_dispatch_packet() -> None:
    d = Descriptor.read(amdelf.descriptor(shared=1024, scratch=16), 0)
    packet = loader.dispatch_packet(d, LaunchConfig((3, 2, 1), (64, 1, 1), 512), 0x1234, 0x5678)
    actual = struct.unpack("<HHHHHHIIIIIQQQQ", packet)
    assert actual[2:5] == (64, 1, 1) and actual[6:9] == (192, 2, 1)
    assert actual[9:13] == (16, 1536, 0x1234, 0x5678)


def test_user_registers() -> None:
    # Dispatch packet, kernarg and scratch size, and two words of the arguments preloaded from the
    # second on.
    kd = amdelf.descriptor(scratch=24, rsrc2=9 << 1, properties=2 | 8 | 64, preload=1 << 7 | 2)
    d = Descriptor.read(kd, 0)
    arguments = struct.pack("<4I", 10, 11, 12, 13)
    actual = loader.user_registers(d, arguments, 0xA_0000_0001, 0xB_0000_0002)
    assert actual == [2, 0xB, 1, 0xA, 24, 11, 12, 0, 0]


def test_too_many_user_registers() -> None:
    d = Descriptor.read(amdelf.descriptor(rsrc2=3 << 1, properties=2 | 8), 0)
    with pytest.raises(DeviceError, match="asks for 4 user registers and has 3"):
        loader.user_registers(d, b"", 0, 0)


SOURCE = """
extern "C" __global__ void k(float* x, int n) { if (blockIdx.x * blockDim.x + threadIdx.x < n) x[blockDim.x] = 1; }
__device__ int table[2] = {7, 9};
__device__ int* place = table + 1;
"""  # noqa: E501


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
def test_a_code_object_of_hiprtc(arch: str) -> None:
    from kernelseam_rocm import plugin

    toolchain = plugin.backend().toolchain
    assert toolchain is not None
    try:
        binary = toolchain.compile(SourceBundle("k", "k.h", (("k.h", SOURCE),), (), ("-O2",)), arch)
    except CompileError as e:
        if "cannot be used" in e.log:
            pytest.skip(f"hiprtc is missing: {e.log}")
        raise
    code = codeobject.parse(binary)
    memory = loader.image(ELFFile(BytesIO(binary)), BASE)
    (pointed,) = struct.unpack_from("<Q", memory, code.symbols["place"][0])
    assert struct.unpack_from("<i", memory, pointed - BASE) == (9,)
    d = Descriptor.read(memory, code.symbols["k.kd"][0])
    assert code.symbols["k.kd"][0] + d.entry == code.symbols["k"][0]
    assert not d.flushes_single
    segment = loader.kernarg(
        code.kernels["k"], d, struct.pack("<Qi", 1, 5), LaunchConfig((2, 1, 1), (32, 1, 1), 0)
    )
    hidden = {a[".value_kind"]: a for a in code.kernels["k"][".args"]}
    at = hidden["hidden_group_size_x"][".offset"]
    assert segment[:12] == struct.pack("<Qi", 1, 5) and struct.unpack_from("<H", segment, at) == (
        32,
    )
    registers = loader.user_registers(d, segment, 0x1122334455667788, 0)
    assert (0x55667788, 0x11223344) in zip(registers, registers[1:], strict=False)
