"""Every covering binary as a cubin for every arch, no GPU needed: nothing spills, matrix units do the halves' work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError, UnknownName
from kernelseam.kernels import Covered

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

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_spills(arch: str, covered: Covered, check_binaries: Callable[..., None]) -> None:
    check_binaries(TOOLCHAIN, arch, covered, registers=255)


def kernel(body: str, *options: str) -> SourceBundle:
    text = f'extern "C" __global__ void k(const double* a, double* b, int n, char c, long long m) {{ {body} }}\n'
    return SourceBundle("k", "k.cu", (("k.cu", text),), (), options)


def test_facts_of_a_small_kernel() -> None:
    facts = TOOLCHAIN.inspect(TOOLCHAIN.compile(kernel("b[n] = a[c] + m;"), "sm_90a"), "sm_90a")["k"]
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
    with pytest.raises(UnknownName, match="arch = sm_12: must be one of sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120"):
        TOOLCHAIN.compile(kernel(""), "sm_12")


def test_a_missing_include_is_an_error() -> None:
    bundle = replace(kernel(""), main="absent.h")
    with pytest.raises(CompileError, match="absent.h"):
        TOOLCHAIN.compile(bundle, "sm_80")
