"""What every vendor's covering binaries must hold."""

from __future__ import annotations

from collections.abc import Callable

import kernel_table
import pytest
from kernelseam.contract import Toolchain
from kernelseam.kernels import Covered, build_binary, covering


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every arch of the module's toolchain with every covering binary, those of its own kernels
    among them."""
    if "covered" in metafunc.fixturenames:
        known = list(enumerate(covering(getattr(metafunc.module, "KERNELS", ()))))
        metafunc.parametrize(
            ("arch", "covered"),
            [
                pytest.param(
                    arch,
                    c,
                    id=f"{str(c).replace(' ', '-')}-{arch}",
                    marks=[pytest.mark.slow("an arch whose turn it is not")]
                    * kernel_table.rare(arch, i, c),
                )
                for arch in metafunc.module.TOOLCHAIN.archs
                for i, c in known
            ],
        )


@pytest.fixture(scope="session")
def check_binaries() -> Callable[[Toolchain, str, Covered, int], None]:
    def check(toolchain: Toolchain, arch: str, covered: Covered, registers: int) -> None:
        """Every tile of the spec: no spills, no scratch, matrix instructions where the arch
        multiplies so, no access to memory of an unknown kind, arguments where we pack them, no more
        shared memory and registers than there are."""
        row, kernel, spec = toolchain.arch_row(arch), covered.kernel, covered.spec
        if kernel.archs and arch not in kernel.archs:
            pytest.skip(f"{kernel.entry} is for {', '.join(kernel.archs)}")
        if kernel.entry == "attention_decode" and "attention_decode" not in row.tiles:
            pytest.skip(f"{arch} has no tiles for attention_decode")
        tiles, precision = covered.tiles(row), getattr(spec, "precision", None)
        if precision and not any(t.precision == precision for t in row.tiles["gemm"]):
            pytest.skip(f"{arch} has no {precision} products")
        stored = getattr(spec, "dtype_kv", None)
        if stored is not None and stored not in row.stored_dtypes:
            assert not tiles
            pytest.skip(f"{arch} has no instructions that convert {stored}")
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
