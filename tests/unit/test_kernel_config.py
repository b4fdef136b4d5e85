"""``struct Config``: a kernel's constants, typed and with what they say."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from compile_matrix import compile_matrix
from kernelseam.contract import Toolchain
from kernelseam.errors import CompileError, PluginError
from kernelseam.kernels.attention.forward import AttentionDefinition
from kernelseam.kernels.config import CONFIG, Constants, ElementType, config_header
from kernelseam.kernels.kernel import build, bundle
from kernelseam.plugins import plugins

TEXTS = {"CAUSAL": "causal mask", "BN": "keys of a tile", "T": "element type", "FACTOR": "a factor"}


def test_members_are_typed_and_say_what_they_are() -> None:
    constants: Constants = {"CAUSAL": True, "BN": 64, "T": ElementType("bf16"), "FACTOR": 256.0}
    assert config_header(constants, TEXTS) == (
        "#pragma once\n"
        '#include "platform.h"\n'
        "struct Config {\n"
        "  static constexpr bool CAUSAL = true;  // causal mask\n"
        "  static constexpr int BN = 64;  // keys of a tile\n"
        "  typedef bf16 T;  // element type\n"
        "  static constexpr float FACTOR = 256.0f;  // a factor\n"
        "};\n"
    )


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"T": "bf16"}, r"constant T = 'bf16' is a str: give a bool, int, float or ElementType"),
        ({"BN": None}, r"constant BN = None is a NoneType: give"),
        ({"BM": 64}, r"constant BM has no text that says what it is: give one in texts"),
    ],
)
def test_other_types_and_unexplained_members_are_refused(constants: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        config_header(constants, TEXTS)


def toolchains() -> list[tuple[Toolchain, tuple[Any, ...]]]:
    backends = plugins().registry.backends.values()
    return [(b.toolchain, tuple(b.kernels or ())) for b in backends if b.toolchain is not None]


def test_every_kernel_explains_its_constants() -> None:
    found = toolchains()
    if not found:
        pytest.skip("no toolchain is installed")
    seen = set()
    for toolchain, own in found:
        for arch, covered in product(toolchain.archs, compile_matrix(own)):
            row, kernel = toolchain.arch_row(arch), covered.kernel
            if (arch, kernel.entry) in seen or not (tiles := covered.tiles(row)):
                continue
            seen.add((arch, kernel.entry))
            config_header(kernel.constants(covered.spec, tiles[0], row), kernel.texts)
    assert {entry for _, entry in seen} > {"attention_forward", "attention_backward", "gemm"}


class Forgetful(AttentionDefinition):
    """Its author forgot a constant."""

    def constants(self, *given: Any) -> Constants:
        constants = super().constants(*given)
        del constants["SECTIONS"]
        return constants


def test_a_forgotten_constant_does_not_compile() -> None:
    toolchain = pytest.importorskip("kernelseam_hostcpp").HostToolchain()
    spec = next(c.spec for c in compile_matrix() if c.kernel.entry == "attention_forward")
    kernel = Forgetful()
    tile = kernel.tiles(spec, toolchain.arch_row("host"))[0]
    assert CONFIG in dict(bundle(kernel, spec, tile, toolchain, "host").files)
    with pytest.raises(CompileError, match="SECTIONS"):
        build(kernel, spec, tile, toolchain, "host")
