"""What every vendor's covering binaries must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_table
import pytest
from compile_matrix import Covered
from kernelseam.contract import Toolchain
from kernelseam.kernels import build_binary


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every arch of the module's toolchain with every covering spec, those of its own kernels among
    them, each with the tiles that every run compiles and with the others."""
    if "covered" not in metafunc.fixturenames:
        return
    toolchain, cases = metafunc.module.TOOLCHAIN, []
    for arch in toolchain.archs:
        known = kernel_table.binaries(toolchain, arch, getattr(metafunc.module, "KERNELS", ()))
        for i, b in enumerate(known):
            if b.covered.kernel.archs and arch not in b.covered.kernel.archs:
                continue
            name = f"{str(b.covered).replace(' ', '-')}-{arch}"
            if b.often or not (b.rarely or kernel_table.rare(arch, i, b.covered)):
                cases.append(pytest.param(arch, b.covered, b.often, id=name))
                name += "-other-tiles"
            elif not b.rarely:
                slow = pytest.mark.slow("no tile of an arch whose turn it is not")
                cases.append(pytest.param(arch, b.covered, (), id=name, marks=slow))
            if b.rarely:
                slow = pytest.mark.slow("a tile, or an arch, whose turn it is not")
                cases.append(pytest.param(arch, b.covered, b.rarely, id=name, marks=slow))
    metafunc.parametrize(("arch", "covered", "tiles"), cases)


@pytest.fixture(scope="session")
def check_binaries() -> Callable[[Toolchain, str, Covered, tuple[Any, ...], int], None]:
    def check(
        toolchain: Toolchain, arch: str, covered: Covered, tiles: tuple[Any, ...], registers: int
    ) -> None:
        """The spec with each of these tiles: no spills, no scratch, matrix instructions where the
        arch multiplies so, no access to memory of an unknown kind, arguments where we pack them, no
        more shared memory and registers than there are."""
        row, kernel, spec = toolchain.arch_row(arch), covered.kernel, covered.spec
        if kernel.entry == "attention_decode":
            if "attention_decode" not in row.tiles:
                pytest.skip(f"{arch} has no tiles for attention_decode")
            if not tiles and all(t.beyond(spec) for t in row.tiles["attention_decode"]):
                pytest.skip(f"{arch} has only lean tiles for attention_decode")
        precision = getattr(getattr(spec, "forward", spec), "precision", None)
        of = "gemm" if "gemm" in kernel.operation else kernel.operation or "attention_bwd"
        if precision and not any(t.precision == precision for t in row.tiles[of]):
            pytest.skip(f"{arch} has no {precision} products in {of}")
        stored = getattr(spec, "dtype_kv", None) or getattr(spec, "dtype_pages", None)
        if stored is not None and stored.is_fp8 and stored not in row.fp8_dtypes:
            assert not tiles
            pytest.skip(f"{arch} has no instructions that convert {stored}")
        if kernel.operation == "gemm" and spec.dtype.is_fp8 and spec.dtype not in row.matrix_dtypes:
            assert not tiles
            pytest.skip(f"{arch} does not multiply {spec.dtype}")
        if not tiles and kernel.operation == "attention_bwd" and spec.forward.head_dim > 256:
            pytest.skip(f"{arch} has not the shared memory for head dims of 512")
        if not tiles and arch == "sm_75":
            pytest.skip("sm_75 has neither bfloat16 products nor the shared memory of later archs")
        assert tiles, "every covering spec has a tile on every arch"
        for tile in tiles:
            _, kernels = build_binary(toolchain, spec, arch, tile, kernel)
            (facts,) = kernels.values()
            assert (facts.spills, facts.scratch_bytes) == (0, 0), tile
            assert (32 if covered.products else 2) <= facts.registers <= registers, tile
            assert covered.products <= facts.shared_bytes <= row.shared_bytes_per_block, tile
            if facts.matrix_instructions >= 0:
                expected = covered.products and (
                    spec.dtype in row.matrix_dtypes or precision is not None
                )
                assert (facts.matrix_instructions > 0) == expected, tile
            # Where a compiler does not know whose memory an address is in, it takes slower
            # accesses.
            assert facts.extra.get("flat_instructions", 0) == 0, tile
            assert kernel.signature(spec).placed(facts).layout == facts.parameters

    return check
