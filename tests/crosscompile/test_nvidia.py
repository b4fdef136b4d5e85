"""Every covering spec to a cubin for every arch, no GPU needed: nothing spills, matrix units do the halves' work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError, UnknownName
from kernelseam.kernels import HALVES, build_binary, covering_specs, operation_of, tiles_of

toolchain_module = pytest.importorskip(
    "kernelseam_cuda.toolchain", reason="nvrtc is missing: kernelseam-cuda is not installed"
)
from kernelseam_cuda.runtime import CudaRuntime  # noqa: E402

TOOLCHAIN = toolchain_module.CudaToolchain(CudaRuntime())
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"nvrtc is missing: {e.log}", allow_module_level=True)

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")


def name(spec: Any) -> str:
    parts = [operation_of(spec), spec.dtype.value]
    if operation_of(spec) == "gemm":
        turns = "NT"[spec.a_transposed] + "NT"[spec.b_transposed]
        parts += [f"to-{spec.dtype_c}", turns, spec.view, str(spec.vector_a)]
    else:
        parts += [f"{spec.head_dim}-{spec.value_dim}", *["causal"] * spec.causal, *["lse"] * spec.lse, str(spec.vector)]
    return "-".join(parts)


@pytest.mark.parametrize("spec", covering_specs(), ids=name)
@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_spills(arch: str, spec: Any) -> None:
    tiles = tiles_of(TOOLCHAIN, spec, arch)
    assert tiles, "every covering spec has a tile on every arch"
    for tile in tiles:
        _, kernels = build_binary(TOOLCHAIN, spec, arch, tile)
        (facts,) = kernels.values()
        assert (facts.spills, facts.scratch_bytes) == (0, 0), tile
        assert 32 <= facts.registers <= 255, tile
        assert facts.shared_bytes <= TOOLCHAIN.arch_row(arch).shared_bytes_per_block, tile
        assert (facts.matrix_instructions > 0) == (spec.dtype.itemsize == 2), tile
        assert facts.parameters == HALVES[operation_of(spec)].signature(spec).layout


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
