"""The unfused attention's softmax for every arch, no GPU needed: nothing spills, arguments are
where we pack them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_table
import pytest
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError
from kernelseam.kernels.attention.row_kernels import RowTile
from kernelseam.kernels.attention.softmax import SOFTMAX
from kernelseam.kernels.kernel import build

F16, BF16, F32 = DType.float16, DType.bfloat16, DType.float32
EVERYTHING = dict.fromkeys(("lse", "window", "prefix", "alibi", "softcap", "mask", "sinks"), True)
SPECS = {
    "f16": AttentionSpec(F16, 64, 64),
    "bf16-causal": AttentionSpec(BF16, 64, 64, True, True),
    "f16-everything": AttentionSpec(F16, 64, 64, bias=F16, **EVERYTHING),
    "f32-everything": AttentionSpec(F32, 64, 64, bias=F32, **EVERYTHING),
}


def _nvidia() -> Any:
    toolchain = pytest.importorskip(
        "kernelseam_cuda.toolchain", reason="nvrtc is missing: kernelseam-cuda is not installed"
    )
    from kernelseam_cuda.runtime import CudaRuntime

    return toolchain.CudaToolchain(CudaRuntime())


def _amd() -> Any:
    plugin = pytest.importorskip(
        "kernelseam_rocm.plugin", reason="hiprtc is missing: kernelseam-rocm is not installed"
    )
    return plugin.backend().toolchain


VENDORS: dict[str, tuple[Callable[[], Any], str]] = {
    arch: (_nvidia, "nvrtc") if arch.startswith("sm_") else (_amd, "hiprtc")
    for arch in kernel_table.ARCHS
}


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        pytest.param(
            arch, name, marks=[pytest.mark.slow("an arch whose turn it is not")] * ((i + j) % 4 > 0)
        )
        for i, arch in enumerate(VENDORS)
        for j, name in enumerate(SPECS)
    ],
)
def test_the_softmax(arch: str, name: str) -> None:
    vendor, compiler = VENDORS[arch]
    toolchain, spec = vendor(), SPECS[name]
    try:
        toolchain.compiler()
    except CompileError as e:
        pytest.skip(f"{compiler} is missing: {e.log}")
    _, facts = build(SOFTMAX, spec, RowTile(), toolchain, arch)
    assert (facts.spills, facts.scratch_bytes, facts.shared_bytes) == (0, 0, 0)
    assert 8 <= facts.registers <= 64, "eight warps and more on a scheduler"
    assert facts.parameters == SOFTMAX.signature(spec).layout
