"""Self-tests of whole kernels: what blocks, waves, LDS, scratch, calls, arguments and memory must
do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kernelseam_rocm_emulator.loader import Extents


class Launcher(Protocol):
    """Runs the test's kernel over arrays of the host."""

    def __call__(self, grid: Extents, block: Extents, *arrays: npt.NDArray[Any]) -> None: ...


@dataclass(frozen=True)
class KernelTest:
    """A kernel, NAME in ``source``, and a check that returns what is wrong ("": nothing)."""

    name: str
    source: str
    check: Callable[[Launcher, np.random.Generator], str]


def tests(arch: str) -> Iterator[KernelTest]:
    yield KernelTest("private arrays across a barrier", _SCRATCH, _scratch)
    yield KernelTest("LDS across barriers", _BARRIERS, _barriers)
    yield KernelTest("a call", _CALL, _call)
    yield KernelTest("the launch's extents", _EXTENTS, _extents)
    yield KernelTest("subnormal floats", _SUBNORMAL, _subnormal)
    yield KernelTest("words at any address", _UNALIGNED, _unaligned)
    yield KernelTest("floats added to memory", _ADDED, _added)
    yield KernelTest("integers added, which return what was there", _COUNTED, _counted)
    if arch.startswith("gfx9"):
        yield KernelTest("a load straight to LDS", _TO_LDS, _to_lds)
        yield KernelTest("floats added out of accumulation registers", _ADDED_ACC, _added)
        yield KernelTest("accumulation registers stored to LDS", _STORED_ACC, _stored_acc)
    if arch == "gfx950":
        yield KernelTest("16 bytes a lane straight to LDS", _WIDE_TO_LDS, _wide_to_lds)
        yield KernelTest("a transposing read of LDS", _TRANSPOSED, _transposed)
    if not arch.startswith("gfx12"):
        yield KernelTest("buffers and their bounds", _BUFFER, _buffer)


def _same(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> str:
    wrong = actual != expected
    if not wrong.any():
        return ""
    at = int(wrong.argmax())
    return (
        f"{int(wrong.sum())} elements differ, [{at}] is {actual.flat[at]} and must be "
        f"{expected.flat[at]}"
    )


_SCRATCH = """extern "C" __global__ void NAME(const int* index, int* out) {
  int t = threadIdx.x, x[80];
  for (int i = 0; i < 80; i++) x[i] = t * 100 + i;
  x[index[0] + 17] += 5;
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < 16; i++) sum += x[index[i] * 3] * (i + 1);
  out[t] = sum;
}
"""


def _scratch(launch: Launcher, rng: np.random.Generator) -> str:
    index, out, t = rng.permutation(16).astype(np.int32), np.zeros(256, np.int32), np.arange(256)
    launch((1, 1, 1), (256, 1, 1), index, out)
    terms = [
        (t * 100 + 3 * j + 5 * (3 * j == index[0] + 17)) * (i + 1) for i, j in enumerate(index)
    ]
    return _same(out, np.sum(terms, 0))


_BARRIERS = """extern "C" __global__ void NAME(int* out) {
  __shared__ int s[256];
  int t = threadIdx.x;
  s[t] = t * 3;
  __syncthreads();
  int v = s[(t + 97) & 255];
  __syncthreads();
  s[t] = v + 1;
  __syncthreads();
  out[blockIdx.x * 256 + t] = s[255 - t] + blockIdx.x;
}
"""


def _barriers(launch: Launcher, rng: np.random.Generator) -> str:
    out, t = np.zeros(512, np.int32), np.arange(256)
    launch((2, 1, 1), (256, 1, 1), out)
    return _same(out, np.concatenate([(255 - t + 97 & 255) * 3 + 1 + b for b in (0, 1)]))


_CALL = """__device__ __attribute__((noinline)) int NAME_callee(int x, int y) { asm volatile(""); return x * 7 - y; }
extern "C" __global__ void NAME(int* out) {
  int t = threadIdx.x;
  out[t] = NAME_callee(NAME_callee(t, 3), t);
}
"""  # noqa: E501


def _call(launch: Launcher, rng: np.random.Generator) -> str:
    out, t = np.zeros(64, np.int32), np.arange(64)
    launch((1, 1, 1), (64, 1, 1), out)
    return _same(out, (t * 7 - 3) * 7 - t)


_EXTENTS = """extern "C" __global__ void NAME(int* out) {
  int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
      block * 1000 + threadIdx.z * 100 + threadIdx.y * 10 + threadIdx.x;
}
"""


def _extents(launch: Launcher, rng: np.random.Generator) -> str:
    out = np.zeros(24 * 60, np.int32)
    launch((2, 3, 4), (5, 4, 3), out)
    z, y, x = np.indices((3, 4, 5)).reshape(3, -1)
    return _same(out, (np.arange(24)[:, None] * 1000 + z * 100 + y * 10 + x).ravel())


_SUBNORMAL = """extern "C" __global__ void NAME(const float* x, float* out) {
  out[threadIdx.x] = x[threadIdx.x] * 0.5f + x[threadIdx.x];
}
"""


def _subnormal(launch: Launcher, rng: np.random.Generator) -> str:
    x, out = (2 * np.arange(32, dtype=np.uint32) + 2).view(np.float32), np.zeros(32, np.float32)
    launch((1, 1, 1), (32, 1, 1), x, out)
    return _same(out.view(np.uint32), 3 * np.arange(1, 33, dtype=np.uint32))


_UNALIGNED = """extern "C" __global__ void NAME(const unsigned char* x, unsigned char* out) {
  typedef unsigned words __attribute__((ext_vector_type(4)));
  struct __attribute__((packed)) any { words w; };
  struct __attribute__((packed)) one { unsigned w; };
  int t = threadIdx.x;
  ((any*)(out + 34 * t + 2))->w = ((const any*)(x + 18 * t + 6))->w;
  ((one*)(out + 34 * t + 22))->w = ((const one*)(x + 6 * t))->w;
}
"""


def _unaligned(launch: Launcher, rng: np.random.Generator) -> str:
    x, out = rng.integers(0, 256, 1024).astype(np.uint8), np.zeros(34 * 32, np.uint8)
    expected = out.copy().reshape(32, 34)
    for t in range(32):
        expected[t, 2:18], expected[t, 22:26] = x[18 * t + 6 : 18 * t + 22], x[6 * t : 6 * t + 4]
    launch((1, 1, 1), (32, 1, 1), x, out)
    return _same(out, expected.ravel())


_ADDED = """extern "C" __global__ void NAME(const float* x, float* out) {
  int t = threadIdx.x;
  __builtin_amdgcn_global_atomic_fadd_f32((__attribute__((address_space(1))) float*)(out + t % 16), x[t]);
}
"""  # noqa: E501

_ADDED_ACC = """extern "C" __global__ void NAME(const float* x, float* out) {
  int t = threadIdx.x;
  asm volatile("v_accvgpr_write_b32 a7, %1\\nv_accvgpr_write_b32 a8, %1\\ns_nop 4\\n"
               "global_atomic_add_f32 %0, a8, off offset:4\\ns_waitcnt vmcnt(0)"
               : : "v"(out + t % 16 - 1), "v"(x[t]) : "memory", "a7", "a8");
}
"""


def _added(launch: Launcher, rng: np.random.Generator) -> str:
    x, out = rng.integers(-99, 99, 64).astype(np.float32), np.arange(20, dtype=np.float32)
    expected = out.copy()
    expected[:16] += 2 * x.reshape(4, 16).sum(0)
    launch((2, 1, 1), (64, 1, 1), x, out)
    return _same(out, expected)


_STORED_ACC = """extern "C" __global__ void NAME(const int* x, int* out) {
  __shared__ int rows[256];
  int t = threadIdx.x, *of = out + 4 * t;
  auto at = (unsigned)(size_t)(__attribute__((address_space(3))) int*)(rows + 4 * t);
  asm volatile("v_accvgpr_write_b32 a4, %1\\nv_accvgpr_write_b32 a5, %2\\n"
               "v_accvgpr_write_b32 a6, %3\\nv_accvgpr_mov_b32 a7, a4\\ns_nop 4\\n"
               "ds_write_b128 %0, a[4:7]\\ns_waitcnt lgkmcnt(0)"
               : : "v"(at), "v"(x[3 * t]), "v"(x[3 * t + 1]), "v"(x[3 * t + 2])
               : "memory", "a4", "a5", "a6", "a7");
  for (int i = 0; i < 4; i++) of[i] = rows[4 * t + i];
}
"""


def _stored_acc(launch: Launcher, rng: np.random.Generator) -> str:
    x, out = rng.integers(0, 1 << 30, (64, 3)).astype(np.int32), np.zeros((64, 4), np.int32)
    launch((1, 1, 1), (64, 1, 1), x, out)
    return _same(out, x[:, [0, 1, 2, 0]])


_COUNTED = """extern "C" __global__ void NAME(int* counters, int* out) {
  int t = threadIdx.x;
  if (t % 4 == 3) return;
  auto counter = (__attribute__((address_space(1))) int*)(counters + t % 4);
  out[blockIdx.x * 64 + t] = __hip_atomic_fetch_add(counter, t - 9, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
"""  # noqa: E501


def _counted(launch: Launcher, rng: np.random.Generator) -> str:
    """Lanes and blocks come in any order, so each counter's values are sorted by their steps: a
    step leads from what one lane was given to what another was, or to the counter's end."""
    begin = rng.integers(-99, 99, 4).astype(np.int32)
    counters, out = begin.copy(), np.full(128, 1 << 30, np.int32)
    launch((2, 1, 1), (64, 1, 1), counters, out)
    lane = np.arange(128) % 64
    taking = lane % 4 != 3
    for c in range(3):
        mine = lane % 4 == c
        left = sorted([*out[mine], counters[c]])
        reached = sorted([begin[c], *(out[mine] + lane[mine] - 9)])
        if left != reached:
            return f"counter {c}: what lanes were given and what they left are different numbers"
    unchanged = np.append(counters[3:], out[~taking])
    return _same(unchanged, np.append(begin[3:], np.full(int((~taking).sum()), 1 << 30, np.int32)))


_TO_LDS = """extern "C" __global__ void NAME(const unsigned* x, unsigned* out) {
  __shared__ unsigned s[64];
  int t = threadIdx.x;
  __builtin_amdgcn_global_load_lds(
      (const __attribute__((address_space(1))) void*)(x + (t ^ 5)), (__attribute__((address_space(3))) void*)s,
      4, 0, 0);
  __syncthreads();
  out[t] = s[63 - t];
}
"""  # noqa: E501


def _to_lds(launch: Launcher, rng: np.random.Generator) -> str:
    x, out, t = rng.integers(0, 1 << 32, 64, np.uint32), np.zeros(64, np.uint32), np.arange(64)
    launch((1, 1, 1), (64, 1, 1), x, out)
    return _same(out, x[(63 - t) ^ 5])


_WIDE_TO_LDS = """extern "C" __global__ void NAME(const unsigned* x, unsigned* out) {
  __shared__ unsigned s[20480];  // beyond 64 KiB
  int t = threadIdx.x;
  for (int i = t; i < 20480; i += 64) s[i] = i;
  __syncthreads();
  __builtin_amdgcn_global_load_lds(
      (const __attribute__((address_space(1))) void*)(x + 4 * (t ^ 5)), (__attribute__((address_space(3))) void*)(s + 18000),
      16, 0, 0);
  __syncthreads();
  for (int i = 0; i < 4; i++) out[i * 64 + t] = s[18000 + i * 64 + t] + s[t] - t;
}
"""  # noqa: E501


def _wide_to_lds(launch: Launcher, rng: np.random.Generator) -> str:
    x, out = rng.integers(0, 1 << 32, 256, np.uint32), np.zeros(256, np.uint32)
    launch((1, 1, 1), (64, 1, 1), x, out)
    return _same(out, x.reshape(64, 4)[np.arange(64) ^ 5].ravel())


_TRANSPOSED = """extern "C" __global__ void NAME(const unsigned* x, unsigned* out) {
  typedef short four __attribute__((ext_vector_type(4)));
  __shared__ __attribute__((aligned(16))) unsigned s[160];
  int t = threadIdx.x;
  for (int i = 0; i < 2; i++) s[i * 64 + t] = x[i * 64 + t];
  if (t < 32) s[128 + t] = x[128 + t];
  __syncthreads();
  // groups of 16 lanes: 4 rows of 16 elements, 72 elements apart, from element 12 + 16 a group on
  auto at = (__attribute__((address_space(3))) four*)((__attribute__((address_space(3))) short*)s
      + 12 + t / 16 * 16 + t % 16 / 4 * 72 + t % 4 * 4);
  struct two { unsigned a, b; } y = __builtin_bit_cast(two, __builtin_amdgcn_ds_read_tr16_b64_v4i16(at));
  out[2 * t] = y.a, out[2 * t + 1] = y.b;
}
"""  # noqa: E501


def _transposed(launch: Launcher, rng: np.random.Generator) -> str:
    x, out = rng.integers(0, 1 << 32, 160, np.uint32), np.zeros(128, np.uint32)
    launch((1, 1, 1), (64, 1, 1), x, out)
    t, element = np.arange(64)[:, None], np.arange(4)[None, :]
    expected = x.view(np.uint16)[12 + t // 16 * 16 + element * 72 + t % 16]
    return _same(out.view(np.uint16).reshape(64, 4), expected)


_BUFFER = """extern "C" __global__ void NAME(unsigned* x, unsigned* out) {
  auto all = __builtin_amdgcn_make_buffer_rsrc(x, 0, 20 * 4, FLAGS);
  int t = threadIdx.x;
  out[t] = __builtin_amdgcn_raw_buffer_load_b32(all, t * 4, 0, 0);
  __builtin_amdgcn_raw_buffer_store_b32(t + 1u, all, t * 8, 0, 0);
}
"""


def _buffer(launch: Launcher, rng: np.random.Generator) -> str:
    x, out, t = rng.integers(0, 1 << 32, 64, np.uint32), np.zeros(32, np.uint32), np.arange(32)
    read, written = np.where(t < 20, x[:32], 0), x.copy()
    written[:20:2] = np.arange(10) + 1
    launch((1, 1, 1), (32, 1, 1), x, out)
    return _same(np.concatenate([out, x]), np.concatenate([read, written]))
