"""Every covering binary as a cubin for every arch, no GPU needed: nothing spills, matrix units do
half precision's work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_table
import pytest
from compile_matrix import Covered
from kernelseam.compilation import compiled
from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError, SlowBinary, UnknownName
from kernelseam.kernels.signature import Signature

toolchain_module = pytest.importorskip(
    "kernelseam_cuda.toolchain", reason="nvrtc is missing: kernelseam-cuda is not installed"
)
from kernelseam_cuda import plugin  # noqa: E402
from kernelseam_cuda.runtime import CudaRuntime  # noqa: E402

TOOLCHAIN, KERNELS = toolchain_module.CudaToolchain(CudaRuntime()), plugin.backend().kernels
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"nvrtc is missing: {e.log}", allow_module_level=True)


def test_nothing_spills(
    arch: str, covered: Covered, tiles: tuple[Any, ...], check_binaries: Callable[..., None]
) -> None:
    check_binaries(kernel_table.keeping(TOOLCHAIN, arch), arch, covered, tiles, registers=255)


def kernel(body: str, *options: str) -> SourceBundle:
    text = (
        'extern "C" __global__ void k(const double* a, double* b, int n, char c, long long '
        f"m) {{ {body} }}\n"
    )
    return SourceBundle("k", "k.cu", (("k.cu", text),), (), options)


def test_facts_of_a_small_kernel() -> None:
    facts = TOOLCHAIN.inspect(TOOLCHAIN.compile(kernel("b[n] = a[c] + m;"), "sm_90a"), "sm_90a")[
        "k"
    ]
    assert facts.parameters == ((0, 8), (8, 8), (16, 4), (20, 1), (24, 8))
    assert (facts.spills, facts.scratch_bytes, facts.matrix_instructions) == (0, 0, 0)
    assert 4 <= facts.registers <= 32


def test_spills_are_seen() -> None:
    sum_of_many = (
        "double x[64]; for (int i = 0; i < 64; i++) x[i] = a[i * n]; __syncthreads(); "
        "for (int i = 0; i < 64; i++) b[i * m] = x[i] * x[63 - i];"
    )
    body = f'_Pragma("unroll") for (int once = 0; once < 1; once++) {{ {sum_of_many} }}'
    bundle = kernel(body, "--maxrregcount=32")
    facts = TOOLCHAIN.inspect(TOOLCHAIN.compile(bundle, "sm_90a"), "sm_90a")["k"]
    assert facts.spills > 0
    assert facts.scratch_bytes > 0


def test_a_compile_error_carries_the_compilers_words() -> None:
    with pytest.raises(CompileError) as caught:
        TOOLCHAIN.compile(kernel("b[0] = undefined_name;"), "sm_80")
    assert 'identifier "undefined_name" is undefined' in caught.value.log
    assert (caught.value.kernel, caught.value.arch) == ("k", "sm_80")


def test_an_unknown_arch_is_refused_before_the_compiler_sees_it() -> None:
    with pytest.raises(
        UnknownName,
        match="arch = sm_12: must be one of sm_75, sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103, "
        "sm_120",
    ):
        TOOLCHAIN.compile(kernel(""), "sm_12")


def test_a_missing_include_is_an_error() -> None:
    bundle = replace(kernel(""), main="absent.h")
    with pytest.raises(CompileError, match="absent.h"):
        TOOLCHAIN.compile(bundle, "sm_80")


WGMMA = """extern "C" __global__ void __launch_bounds__(128) k(float* out, unsigned long long a, int n) {
  float d[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; i++) {
    asm volatile("wgmma.fence.sync.aligned;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; "
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, p, 1, 1, 0, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + i));
    asm volatile("wgmma.commit_group.sync.aligned;");
    BETWEEN
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
  }
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = d[i];
}
"""  # noqa: E501


def wgmma(between: str) -> SourceBundle:
    return SourceBundle(
        "k", "k.cu", (("k.cu", WGMMA.replace("BETWEEN", between)),), (), ("-std=c++17",)
    )


def test_wgmma_that_the_compiler_serialises_fails_the_tests_and_no_users_build() -> None:
    """Sums that are touched while products are on their way. The compiler says so, and ends with
    success."""
    assert (
        TOOLCHAIN.inspect(TOOLCHAIN.compile(wgmma(""), "sm_90a"), "sm_90a")["k"].matrix_instructions
        > 0
    )
    slow = wgmma("d[0] *= 1.5f;")
    with pytest.raises(SlowBinary):  # as every compilation of a test
        TOOLCHAIN.compile(slow, "sm_90a")
    with pytest.warns(SlowBinary) as caught:
        assert (
            TOOLCHAIN.inspect(TOOLCHAIN.compile(slow, "sm_90a"), "sm_90a")["k"].matrix_instructions
            > 0
        )
    (one,) = caught
    first, *lines = str(one.message).splitlines()
    assert first == (
        "k compiles for sm_90a, but not as intended: its results are right, and it is slow. "
        f"{TOOLCHAIN.compiler()} says:"
    )
    assert lines and all("(C751" in line and "serialized" in line for line in lines)


def test_a_setmaxnreg_that_is_ignored_fails_the_tests() -> None:
    """Where the kernel's bounds are not given the compiler cannot know what it starts with."""
    body = 'asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); b[n] = a[c] + m;'
    with pytest.raises(SlowBinary, match=r"\(C7508\) .*'setmaxnreg' ignored"):
        TOOLCHAIN.compile(kernel(body), "sm_90a")
    text = (
        kernel(body)
        .files[0][1]
        .replace("__global__ void k", "__global__ void __launch_bounds__(128, 1) k")
    )
    assert TOOLCHAIN.compile(replace(kernel(body), files=(("k.cu", text),)), "sm_90a")


def test_a_slow_binary_is_not_kept_where_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next to ask would find it in the cache, and nobody would read the log again."""
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path))
    text = WGMMA.replace("BETWEEN", "d[0] *= 1.5f;")
    keyed = (
        "__device__ extern const char key[] = "
        f"KS_KEY;\n{text.replace('out[', 'out[key[0] - key[0] + ')}"
    )
    slow = replace(wgmma(""), files=(("k.cu", keyed),))
    for _ in range(2):
        with pytest.raises(SlowBinary):
            compiled(TOOLCHAIN, slow, "sm_90a")
    assert not list(tmp_path.rglob("*.bin"))
    with pytest.warns(SlowBinary):
        assert compiled(TOOLCHAIN, slow, "sm_90a").path is not None


@pytest.mark.parametrize(
    ("before", "kinds", "layout"),
    [
        ("int n, ", ("i32",), ((0, 4), (48, 128), (176, 8))),
        ("", (), ((48, 128), (176, 8))),
        (
            "long long x, int n, double y, ",
            ("i64", "i32", "f64"),
            ((0, 8), (8, 4), (16, 8), (48, 128), (176, 8)),
        ),
    ],
)
def test_a_tensor_map_lies_where_the_compiler_aligns_it(
    before: str, kinds: tuple[str, ...], layout: tuple[tuple[int, int], ...]
) -> None:
    """Parameters begin in memory that is aligned to 16 bytes only, on sm_90a at 0x210: behind an
    int a tensor map lies at 48, not at 64 as in a C structure; and as the first one at 48, too."""
    text = f"""struct alignas(64) Map {{ unsigned long long words[16]; }};
    extern "C" __global__ void k({before}const __grid_constant__ Map map, double* b) {{
      b[0] = double(map.words[threadIdx.x & 15]);
    }}"""
    source = SourceBundle("k", "k.cu", (("k.cu", text),), (), ("-std=c++17", "-default-device"))
    facts = TOOLCHAIN.inspect(TOOLCHAIN.compile(source, "sm_90a"), "sm_90a")["k"]
    signature = Signature(
        (*((f"x{i}", k) for i, k in enumerate(kinds)), ("map", "tensor_map"), ("b", "pointer"))
    )
    assert facts.parameters == layout == signature.placed(facts).layout
