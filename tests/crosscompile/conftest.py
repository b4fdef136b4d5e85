"""What every vendor's covering binaries must hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernelseam.contract import Toolchain
from kernelseam.kernels import Covered, build_binary, covering


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "covered" in metafunc.fixturenames:
        metafunc.parametrize("covered", [
            pytest.param(c, id=str(c).replace(" ", "-"), marks=[pytest.mark.slow] * (not c.often))
            for c in covering(getattr(metafunc.module, "KERNELS", ()))
        ])


@pytest.fixture(scope="session")
def check_binaries() -> Callable[[Toolchain, str, Covered, int], None]:
    def check(toolchain: Toolchain, arch: str, covered: Covered, registers: int) -> None:
        """Every tile of the spec: no spills, no scratch, matrix instructions for products of halves alone, no access to
        memory of an unknown kind, arguments where we pack them, no more shared memory and registers than there are."""
        row, half, spec = toolchain.arch_row(arch), covered.half, covered.spec
        if half.archs and arch not in half.archs:
            pytest.skip(f"{half.entry} is for {', '.join(half.archs)}")
        tiles = covered.tiles(row)
        assert tiles, "every covering spec has a tile on every arch"
        for tile in tiles:
            _, kernels = build_binary(toolchain, spec, arch, tile, half)
            (facts,) = kernels.values()
            assert (facts.spills, facts.scratch_bytes) == (0, 0), tile
            assert (32 if covered.products else 2) <= facts.registers <= registers, tile
            assert covered.products <= facts.shared_bytes <= row.shared_bytes_per_block, tile
            if facts.matrix_instructions >= 0:
                halves = covered.products and spec.dtype.itemsize == 2
                assert (facts.matrix_instructions > 0) == halves, tile
            # Where a compiler does not know whose memory an address is in, it takes slower accesses.
            assert facts.extra.get("flat_instructions", 0) == 0, tile
            assert half.signature(spec).placed(facts).layout == facts.parameters

    return check
