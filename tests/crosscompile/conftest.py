"""What every vendor's covering binaries must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernelseam.contract import Toolchain
from kernelseam.kernels import HALVES, build_binary, covering_specs, tiles_of


def spec_id(spec: Any) -> str:
    """A short name of a spec for test ids."""
    parts = [spec.operation, spec.dtype.value]
    if spec.operation == "gemm":
        turns = "NT"[spec.a_transposed] + "NT"[spec.b_transposed]
        parts += [f"to-{spec.dtype_c}", turns, spec.view, str(spec.vector_a)]
    else:
        parts += [f"{spec.head_dim}-{spec.value_dim}", *["causal"] * spec.causal, *["lse"] * spec.lse, str(spec.vector)]
    return "-".join(parts)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "covering_spec" in metafunc.fixturenames:
        metafunc.parametrize("covering_spec", covering_specs(), ids=spec_id)


@pytest.fixture(scope="session")
def check_binaries() -> Callable[[Toolchain, str, Any, int], None]:
    def check(toolchain: Toolchain, arch: str, spec: Any, registers: int) -> None:
        """Every tile of the spec: no spills, no scratch, matrix instructions for the halves, arguments where we pack
        them, no more shared memory and registers than there are."""
        row = toolchain.arch_row(arch)
        tiles = tiles_of(toolchain, spec, arch)
        assert tiles, "every covering spec has a tile on every arch"
        for tile in tiles:
            _, kernels = build_binary(toolchain, spec, arch, tile)
            (facts,) = kernels.values()
            assert (facts.spills, facts.scratch_bytes) == (0, 0), tile
            assert 32 <= facts.registers <= registers, tile
            assert 0 < facts.shared_bytes <= row.shared_bytes_per_block, tile
            if facts.matrix_instructions >= 0:
                assert (facts.matrix_instructions > 0) == (spec.dtype.itemsize == 2), tile
            assert facts.parameters == HALVES[spec.operation].signature(spec).layout

    return check
