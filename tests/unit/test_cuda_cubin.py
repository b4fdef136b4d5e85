"""Facts of real cubins against what the compiler itself reports of them, and damaged ones."""

from __future__ import annotations

import random
import re
import struct
from typing import Any

import pytest
from kernelseam.errors import DeviceError

nvrtc = pytest.importorskip(
    "cuda.bindings.nvrtc", reason="nvrtc is missing: cuda-bindings is not installed"
)
pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import cubin, disassembly  # noqa: E402

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")
SOURCE = r"""
struct Wide { char c[5000]; };
struct __align__(64) Map { unsigned long long words[16]; };
extern "C" __global__ void none() {}
extern "C" __global__ void mixed(float* y, char c, double d, short s, const int* x, float f) {
  y[0] = c + d + s + *x + f;
}
extern "C" __global__ void wide(char a, Wide w, int i, float* y) { y[0] = w.c[i] + a; }
extern "C" __global__ void map(int n, const __grid_constant__ Map m, float* y) { y[n] = m.words[n]; }
extern "C" __global__ void fixed(float* y) {
  __shared__ float a[300];
  a[threadIdx.x] = y[threadIdx.x]; __syncthreads();
  y[threadIdx.x] = a[threadIdx.x ^ 1];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {
  x += threadIdx.x;  // the same in every lane would fit into uniform registers
  float v[96];
  #pragma unroll
  for (int i = 0; i < 96; i++) v[i] = x[i * n];
  for (int k = 0; k < n; k++) {
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 96; i++) v[i] = v[i] * v[(i + 7) % 96] + 1.f;
  }
  #pragma unroll
  for (int i = 0; i < 96; i++) x[i * n] = v[i];
}
extern "C" __global__ void products(float* d, const unsigned* a, double* e, const double* b) {
  float c[4] = {0, 0, 0, 0};
  #pragma unroll
  for (int i = 0; i < 3; i++)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%4,%4,%4},{%4,%4},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[i]));
  double x = 0, y = 0;
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%2},{%0,%1};"
    : "+d"(x), "+d"(y) : "d"(b[0]));
  d[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
  e[threadIdx.x] = x + y;
}
extern "C" __global__ void halves(unsigned* y, const unsigned* x) {  // packed halves are no matrices
  unsigned r = x[0];
  #pragma unroll
  for (int i = 0; i < 9; i++) asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(r) : "r"(x[i]), "r"(x[i + 1]));
  y[0] = r;
}
#if __CUDA_ARCH__ == 900
extern "C" __global__ void groups(float* d, unsigned long long a, unsigned long long b, unsigned r) {
  float c[4] = {0, 0, 0, 0};
#define C4 "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
    : C4 : "l"(a), "l"(b));
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%4,%4,%4}, %5, 1, 1, 1, 0;"
    : C4 : "r"(r), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  d[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}
#endif
"""  # noqa: E501


def compiled(arch: str) -> tuple[bytes, str]:
    """The cubin, and what the assembler says of its kernels."""

    def run(name: str, *arguments: Any) -> Any:
        status, *results = getattr(nvrtc, name)(*arguments)
        return None if status else results[0] if results else True

    try:
        program = run("nvrtcCreateProgram", SOURCE.encode(), b"k.cu", 0, [], [])
    except RuntimeError as e:
        pytest.skip(f"nvrtc is missing: {e}")
    options = [f"--gpu-architecture={arch}".encode(), b"-std=c++17", b"--ptxas-options=-v"]
    done = run("nvrtcCompileProgram", program, len(options), options)
    log = bytearray(run("nvrtcGetProgramLogSize", program))
    run("nvrtcGetProgramLog", program, log)
    assert done, log.decode(errors="replace")
    binary = bytearray(run("nvrtcGetCUBINSize", program))
    run("nvrtcGetCUBIN", program, binary)
    return bytes(binary), log.decode(errors="replace")


REPORT = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) "
    r"bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@pytest.mark.parametrize("arch", ARCHS)
def test_facts_are_what_the_compiler_reports(arch: str) -> None:
    binary, log = compiled(arch)
    facts, seen = cubin.facts(binary), {}
    for name, stack, stores, loads, registers, rest in REPORT.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        seen[name] = tuple(map(int, (registers, stack, stores, loads, shared[1] if shared else 0)))
    assert set(seen) == set(facts) and len(facts) == (9 if arch == "sm_90a" else 8)
    for name, f in facts.items():
        loads = f.extra["local_load_bytes"]
        assert (f.registers, f.scratch_bytes, f.spills, loads, f.shared_bytes) == seen[name], name
    assert facts["spills"].spills > 0
    assert facts["fixed"].shared_bytes == 1200


@pytest.mark.parametrize("arch", ARCHS)
def test_parameters_and_matrix_instructions(arch: str) -> None:
    facts = cubin.facts(compiled(arch)[0])
    assert facts["none"].parameters == ()
    assert facts["mixed"].parameters == ((0, 8), (8, 1), (16, 8), (24, 2), (32, 8), (40, 4))
    assert facts["wide"].parameters == ((0, 1), (1, 5000), (5004, 4), (5008, 8))
    # A tensor map's 64 bytes of alignment are of its address in constant memory, where parameters
    # start at `base`.
    base = {"sm_80": 0x160, "sm_90a": 0x210}.get(arch, 0x380)
    (_, (offset, size), _) = facts["map"].parameters
    assert ((base + offset) % 64, size) == (0, 128)
    assert {n: f.matrix_instructions for n, f in facts.items() if f.matrix_instructions} == {
        "products": 4,
        **({"groups": 2} if arch == "sm_90a" else {}),
    }


def test_a_cut_or_foreign_binary_is_refused() -> None:
    binary, _ = compiled("sm_80")
    foreign = binary[:18] + b"\x3e" + binary[19:]
    for bad in (
        b"",
        b"\x7fELF",
        binary[:100],
        binary[: len(binary) // 2],
        b"x" + binary[1:],
        foreign,
    ):
        with pytest.raises(DeviceError, match="the binary is not a cubin"):
            cubin.facts(bad)


def test_headers_that_claim_too_much_are_refused() -> None:
    binary, _ = compiled("sm_80")
    (headers,) = struct.unpack_from("<Q", binary, 40)
    no_count = struct.pack("<H", 0), 60  # e_shnum: section 0 holds it
    huge = struct.pack("<Q", 2**62), headers + 32  # its sh_size
    for patches in (
        [no_count, huge],
        [(b"\0\0", 58)],  # e_shentsize
        [(struct.pack("<Q", 2**63), 40)],  # e_shoff
        [(struct.pack("<Q", len(binary)), headers + 64 + 24)],  # sh_offset of section 1
        [(struct.pack("<Q", 2**62), headers + 64 + 32)],
    ):
        bad = bytearray(binary)
        for data, at in patches:
            bad[at : at + len(data)] = data
        with pytest.raises(DeviceError, match="the binary is not a cubin"):
            cubin.facts(bytes(bad))


def test_damage_is_refused_by_name_or_does_not_matter() -> None:
    binary, _ = compiled("sm_80")
    (headers,) = struct.unpack_from("<Q", binary, 40)
    rng, refused = random.Random(3), 0
    for _ in range(200):
        bad = bytearray(binary)
        for _ in range(4):
            first, last = rng.choice([(0, 64), (headers, len(binary)), (64, headers)])
            bad[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
        try:
            cubin.facts(bytes(bad))
        except DeviceError:
            refused += 1
    assert refused > 50


def test_instructions_are_counted_by_their_low_bits() -> None:
    def word(low: int, width: int = 0) -> bytes:
        return low.to_bytes(8, "little") + (width << 9).to_bytes(8, "little")

    # HMMA, HGMMA twice, then stores of 4, 8 (by a uniform register) and 16 bytes, a load of 1, and
    # a NOP.
    code = (
        word(0x23C) + word(0x9F0) + word(0xDF0) + word(0x387, 4) + word(0x987, 5) + word(0x387, 6)
    )
    code += word(0x983) + word(0x918)
    assert disassembly.count(code) == {
        "instructions": 8,
        "matrix_instructions": 3,
        "local_store_bytes": 28,
        "local_load_bytes": 1,
    }
