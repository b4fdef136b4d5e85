"""The counter's self-test: kernels whose counts are known, on an emulated device of each arch."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from kernelseam.compilation import compiled
from kernelseam.contract import EMULATED, Device, LaunchConfig, Runtime, SourceBundle, Toolchain
from kernelseam.errors import NoDevice
from kernelseam.plugins import plugins

from kernelseam_rocm_emulator.counting import model
from kernelseam_rocm_emulator.counting.instructions import Class
from kernelseam_rocm_emulator.counting.recorder import Tally
from kernelseam_rocm_emulator.counting.recording import Counted
from kernelseam_rocm_emulator.emulation import recorded

TRIPS = 7
STRIDES = (1, 2, 4, 8)

_MATRIX = {
    "gfx9": ("h4", "f4", "mfma_f32_16x16x16f16(a, a, c, 0, 0, 0)"),
    "gfx11": ("h16", "f8", "wmma_f32_16x16x16_f16_w32(a, a, c)"),
    "gfx12": ("h8", "f8", "wmma_f32_16x16x16_f16_w32_gfx12(a, a, c)"),
}
_SOURCE = """
#ifdef KS_KEY
extern "C" __constant__ char kernelseam_key[] = KS_KEY;
#endif
typedef unsigned u4 __attribute__((ext_vector_type(4)));
typedef float f4 __attribute__((ext_vector_type(4)));
typedef float f8 __attribute__((ext_vector_type(8)));
typedef _Float16 h4 __attribute__((ext_vector_type(4)));
typedef _Float16 h8 __attribute__((ext_vector_type(8)));
typedef _Float16 h16 __attribute__((ext_vector_type(16)));

// Each lane copies an element of T, `stride` elements from its neighbour's, into LDS and out of it.
template <class T> __device__ void copy(const T* in, T* out, T* shared, int stride) {
  int l = threadIdx.x;
  shared[l * stride] = in[l * stride];
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  __builtin_amdgcn_s_barrier();
  out[l] = shared[(l ^ 1) * stride];
}

extern "C" __global__ void words(const unsigned* in, unsigned* out, int stride, int trips) {
  __shared__ unsigned shared[64 * 8];
  copy(in, out, shared, stride);
}

extern "C" __global__ void quads(const u4* in, u4* out, int stride, int trips) {
  __shared__ u4 shared[64 * 8];
  copy(in, out, shared, stride);
}

extern "C" __global__ void products(const float* in, float* out, int stride, int trips) {
  OPERAND a = (_Float16)in[threadIdx.x];
  ACCUMULATOR c = in[threadIdx.x];
#pragma unroll 1
  for (int i = 0; i < trips; i++) c = __builtin_amdgcn_PRODUCT;
  out[threadIdx.x] = c[0];
}
"""


def source(arch: str) -> str:
    """The kernels for an arch."""
    operand, accumulator, product = next(m for p, m in _MATRIX.items() if arch.startswith(p))
    text = _SOURCE.replace("OPERAND", operand).replace("ACCUMULATOR", accumulator)
    return text.replace("PRODUCT", product)


def failures(arch: str) -> list[str]:
    """What is counted wrong on the arch's emulated device, in words. Raises NoDevice where there is
    none."""
    backend = plugins().backend("rocm")
    device = next(
        (d for d in backend.runtime.devices() if d.arch == arch and d.evidence == EMULATED), None
    )
    if device is None or backend.toolchain is None:
        raise NoDevice(f"no emulated {arch}: see `kernelseam doctor`")
    run = _Runner(backend.toolchain, backend.runtime, device)
    checks = (*_strides(run, "words", 4), *_strides(run, "quads", 16), *_products(run))
    return [
        f"{arch}, {what}: {actual} counted, {expected} expected"
        for what, actual, expected in checks
        if actual != expected
    ]


_Check = tuple[str, object, object]


def _strides(run: _Runner, kernel: str, width: int) -> Iterator[_Check]:
    """A stride of 2, 4, 8 elements is a conflict of as many ways, while a phase's elements fill the
    banks; and touches as many times the fewest segments."""
    unit = model.unit(run.device.arch)
    for stride in STRIDES:
        counted = run(kernel, stride)
        for kind in (Class.LDS_READ, Class.LDS_WRITE):
            name, tally = f"{kernel} at stride {stride}: {kind.value}", _of(counted, kind)
            phases = len(unit.banks(kind is Class.LDS_READ, width).phases)
            yield f"{name}, executions", tally.count, 1
            yield f"{name}, clocks without conflicts", tally.lds_fewest, phases
            yield f"{name}, clocks", tally.lds_clocks, phases * stride
            yield f"{name}, bytes", tally.bytes, unit.lanes * width
        for kind, spread in ((Class.LOAD, stride), (Class.STORE, 1)):
            name, tally = f"{kernel} at stride {stride}: {kind.value}", _of(counted, kind)
            size = unit.lanes * width
            # An element of 16 bytes alone in its segment wastes no more than the segment's rest.
            touched = [min(size * spread // n, unit.lanes) for n in (64, 128)]
            yield f"{name}, bytes", tally.bytes, size
            yield f"{name}, segments", tally.touched, touched
            yield f"{name}, fewest segments", tally.fewest, [size // 64, size // 128]


def _products(run: _Runner) -> Iterator[_Check]:
    """A loop of one product."""
    counted = run("products", 1)
    hot = counted.iteration()
    assert hot is not None
    unit = model.unit(run.device.arch)
    yield "products, executions", _of(counted, Class.MATRIX).count, TRIPS
    yield "products, iterations", hot.times, TRIPS
    yield "products, an iteration's", hot.classes[Class.MATRIX], 1
    yield "products, matrix cycles", hot.cycles.matrix, unit.matrix_cycles("16x16x16")


def _of(counted: Counted, kind: Class) -> Tally:
    """The tallies of a class's instructions, added."""
    total = Tally()
    for x in counted.listing:
        if x.kind is kind and (tally := counted.tallies.get(x.address)) is not None:
            total.count += tally.count
            total.lds_clocks += tally.lds_clocks
            total.lds_fewest += tally.lds_fewest
            total.bytes += tally.bytes
            total.touched = [a + b for a, b in zip(total.touched, tally.touched, strict=True)]
            total.fewest = [a + b for a, b in zip(total.fewest, tally.fewest, strict=True)]
    return total


class _Runner:
    """Launches one wave of a kernel, and counts it."""

    def __init__(self, toolchain: Toolchain, runtime: Runtime, device: Device) -> None:
        self.device, self._toolchain, self._runtime = device, toolchain, runtime
        files = (("counts.h", source(device.arch)),)
        options = toolchain.arch_row(device.arch).options
        bundle = SourceBundle("counting_selftest", "counts.h", files, (), options)
        self._binary = compiled(toolchain, bundle, device.arch).data

    def __call__(self, kernel: str, stride: int) -> Counted:
        lanes = model.unit(self.device.arch).lanes
        # Segments are counted from a boundary of theirs.
        zeros = np.zeros((lanes * 8 * 16 + 128) // 4, np.float32)
        arrays = [self._runtime.from_host(zeros, self.device) for _ in range(2)]
        infos = [self._runtime.describe(x) for x in arrays]
        pointers = [-(-x.pointer // 128) * 128 for x in infos if x is not None]
        loaded = self._toolchain.load(self._binary, kernel, self.device)
        launch = loaded.prepare(
            LaunchConfig((1, 1, 1), (lanes, 1, 1), 0),
            struct.pack("<QQii", *pointers, stride, TRIPS),
        )
        with recorded() as recording:
            launch(0)
        (counted,) = recording.launches
        return counted
