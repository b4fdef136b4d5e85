"""Every covering binary as a code object for every arch by real hiprtc, no GPU needed: nothing
spills, and matrix instructions do half precision's work. Compiled and read, not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from compile_matrix import Covered
from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError, UnknownName

plugin = pytest.importorskip(
    "kernelseam_rocm.plugin", reason="hiprtc is missing: kernelseam-rocm is not installed"
)
TOOLCHAIN: Any = plugin.backend().toolchain
KERNELS = plugin.backend().kernels
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"hiprtc is missing: {e.log}", allow_module_level=True)


def test_nothing_spills(
    arch: str, covered: Covered, tiles: tuple[Any, ...], check_binaries: Callable[..., None]
) -> None:
    check_binaries(TOOLCHAIN, arch, covered, tiles, TOOLCHAIN.arch_row(arch).registers_per_lane)


def kernel(body: str) -> SourceBundle:
    text = (
        'extern "C" __global__ void k(const double* a, double* b, int n, char c, long long '
        f"m) {{ {body} }}\n"
    )
    return SourceBundle("k", "k.h", (("k.h", text),), (), ("-std=c++17", "-O3"))


def test_facts_of_a_small_kernel() -> None:
    facts = TOOLCHAIN.inspect(TOOLCHAIN.compile(kernel("b[n] = a[c] + m;"), "gfx942"), "gfx942")[
        "k"
    ]
    assert facts.parameters == ((0, 8), (8, 8), (16, 4), (20, 1), (24, 8))
    assert (facts.spills, facts.scratch_bytes, facts.shared_bytes) == (0, 0, 0)
    assert facts.extra["wavefront"] == 64


def test_scratch_is_seen() -> None:
    body = "volatile double x[64]; for (int i = 0; i < n; i++) x[i & 63] = a[i]; b[0] = x[m & 63];"
    facts = TOOLCHAIN.inspect(TOOLCHAIN.compile(kernel(body), "gfx1100"), "gfx1100")["k"]
    assert facts.scratch_bytes >= 64 * 8


def test_a_compile_error_carries_the_compilers_words() -> None:
    with pytest.raises(CompileError) as caught:
        TOOLCHAIN.compile(kernel("b[0] = undefined_name;"), "gfx942")
    assert "use of undeclared identifier 'undefined_name'" in caught.value.log
    assert (caught.value.kernel, caught.value.arch) == ("k", "gfx942")


def test_an_unknown_arch_is_refused_before_the_compiler_sees_it() -> None:
    with pytest.raises(
        UnknownName,
        match="arch = gfx12: must be one of gfx90a, gfx942, gfx950, gfx1100, gfx1151, gfx1200, "
        "gfx1201",
    ):
        TOOLCHAIN.compile(kernel(""), "gfx12")


def test_a_compiler_that_aborts_takes_no_one_along() -> None:
    """A builtin of another arch ends the compiler's process: the caller lives, and is told."""
    body = "typedef float f8 __attribute__((ext_vector_type(8)));"
    body += " typedef _Float16 h16 __attribute__((ext_vector_type(16)));"
    body += (
        " h16 x = {}; f8 y = {}; y = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, x, y); "
        "b[0] = y[0];"
    )
    with pytest.raises(CompileError) as caught:
        TOOLCHAIN.compile(kernel(body), "gfx1201")
    assert caught.value.arch == "gfx1201"
    assert (
        TOOLCHAIN.inspect(TOOLCHAIN.compile(kernel("b[0] = 1;"), "gfx1201"), "gfx1201")["k"].spills
        == 0
    )
