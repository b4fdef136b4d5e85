"""Covering AMD kernels against docs/amd-counts.csv: the hot loop's matrix share, and registers that
move between the files, as real hiprtc compiles them. Compiled and read, not run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError
from kernelseam.kernels import build_binary

plugin = pytest.importorskip(
    "kernelseam_rocm.plugin", reason="hiprtc is missing: kernelseam-rocm is not installed"
)
pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
TOOLCHAIN: Any = plugin.backend().toolchain
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"hiprtc is missing: {e.log}", allow_module_level=True)

from kernelseam_rocm_emulator.counting import iteration  # noqa: E402
from kernelseam_rocm_emulator.counting.instructions import Class  # noqa: E402
from kernelseam_rocm_emulator.counting.listing import listings  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import amd_count_table as table  # noqa: E402
import kernel_table  # noqa: E402

BEFORE = table.read()
CHOSEN = [(a, b) for a in TOOLCHAIN.archs for b in table.chosen(plugin.backend(), a) if b.often]


@pytest.mark.parametrize(
    ("arch", "kernel"),
    [pytest.param(a, b, id=f"{b.covered}-{a}".replace(" ", "-")) for a, b in CHOSEN],
)
def test_nothing_is_worse(arch: str, kernel: kernel_table.Binaries) -> None:
    """What is worse for a reason: write the table (`tools/amd_counts.py --write`), and say why."""
    after = table.counts_of(TOOLCHAIN, arch, kernel.covered, kernel.often)
    spec = kernel.covered.spec
    by_tf32 = getattr(spec, "precision", None) is not None
    assert bool(after) == (by_tf32 or spec.dtype in TOOLCHAIN.arch_row(arch).matrix_dtypes)
    left = kernel_table.left_out(arch, [kernel])
    assert table.worse(BEFORE, after, left) == []


def test_the_table_is_of_these_kernels() -> None:
    """Else little is held against it: `tools/amd_counts.py --write`."""
    assert {key[0] for key in BEFORE} == set(TOOLCHAIN.archs)
    known = {key[:2] for key in BEFORE}
    multiplied = [
        (arch, str(b.covered))
        for arch, b in CHOSEN
        if b.covered.spec.dtype in TOOLCHAIN.arch_row(arch).matrix_dtypes
    ]
    assert sum(k in known for k in multiplied) > 0.75 * len(multiplied)


FIRST = {str(b.covered).split()[0]: b for a, b in CHOSEN if a == "gfx1201"}


@pytest.mark.parametrize("kernel", FIRST)
def test_gfx1200_has_the_instructions_of_gfx1201(kernel: str) -> None:
    """So what is emulated of the one is of the other."""
    b = FIRST[kernel]
    (tile, *_), texts = b.often, []
    for arch in ("gfx1200", "gfx1201"):
        binary, _ = build_binary(TOOLCHAIN, b.covered.spec, arch, tile, b.covered.kernel)
        (listing,) = listings(binary.data, arch).values()
        texts.append([i.text for i in listing])
    assert len(texts[0]) > 500 and texts[0] == texts[1]


def compiled(body: str, arch: str = "gfx942") -> iteration.Iteration | None:
    text = (
        "typedef float f4 __attribute__((ext_vector_type(4)));\n"
        "typedef _Float16 h4 __attribute__((ext_vector_type(4)));\n"
        'extern "C" __global__ __launch_bounds__(64) void k(const h4* a, f4* b, int n) {\n'
        f"  f4 c = b[threadIdx.x]; {body} b[threadIdx.x] = c;\n}}\n"
    )
    bundle = SourceBundle("k", "k.h", (("k.h", text),), (), ("-std=c++17", "-O3"))
    (listing,) = listings(TOOLCHAIN.compile(bundle, arch), arch).values()
    return iteration.compiled(listing, arch)


PRODUCT = "h4 x = a[i]; c = __builtin_amdgcn_mfma_f32_16x16x16f16(x, x, c, 0, 0, 0);"


def test_a_loop_of_real_code_is_counted() -> None:
    actual = compiled(f"\n#pragma unroll 1\nfor (int i = 0; i < n; i++) {{ {PRODUCT} }}\n")
    assert actual is not None
    assert (actual.count([Class.MATRIX]), actual.cycles.matrix) == (1, 16)
    assert actual.count([Class.LOAD, Class.SCALAR_LOAD]) == 1 and actual.count([Class.MOVE]) == 0


def test_a_register_that_moves_to_the_other_file_is_seen() -> None:
    lines = '"v_accvgpr_write_b32 a0, %0\\nv_accvgpr_read_b32 %0, a0"'
    moves = f'asm volatile({lines} : "+v"(c[0]) :: "a0");'
    actual = compiled(f"\n#pragma unroll 1\nfor (int i = 0; i < n; i++) {{ {PRODUCT} {moves} }}\n")
    assert actual is not None
    assert actual.count([Class.MOVE]) >= 2


def test_straight_code_has_no_loop() -> None:
    assert compiled(f"int i = n; {PRODUCT}") is None
