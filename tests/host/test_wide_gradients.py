"""Gradients with head dims of 512, in the shapes of NVIDIA's tiles: columns shared by four warps,
keys and queries apart."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.kernels.attention.backward_tile import backward_tiles
from kernelseam.plugins import Plugins


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_of_512_columns(hostcpp: Plugins, dtype: str) -> None:
    backend = hostcpp.backend("hostcpp")
    device = next(d for d in backend.runtime.devices() if d.arch == "host")
    rng = np.random.default_rng(0)
    shapes = ((1, 2, 41, 512), (1, 1, 50, 512), (1, 1, 50, 500), (1, 2, 41, 500))
    q, k, v, dout = ((rng.standard_normal(s) / 2).astype(dtype) for s in shapes)
    out, lse = kernelseam.attention(q, k, v, causal=True, return_lse=True)
    here = [backend.runtime.from_host(x, device) for x in (dout, q, k, v, out, lse)]
    with kernelseam.trace() as launches:
        found = kernelseam.attention_bwd(*here, causal=True)
    assert [r.kernel for r in launches].count("attention_backward") == 2
    expected = kernelseam.attention_bwd(
        *(x.astype(np.float64) for x in (dout, q, k, v, out, lse)), causal=True
    )
    bound = 6e-3 if dtype == "float16" else 1e-5
    for name in ("dq", "dk", "dv"):
        made: Any = backend.runtime.to_host(getattr(found, name)).astype(np.float64)
        wanted = getattr(expected, name)
        assert np.abs(made - wanted).max() <= bound * np.abs(wanted).max(), name


def test_archs_without_the_memory_refuse_by_name(hostcpp: Plugins) -> None:
    """And those that have it do not."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    from kernelseam_cuda.plugin import backend

    toolchain = backend().toolchain
    assert toolchain is not None
    widest = {}
    for dtype in ("bfloat16", "float32"):
        forward = kernelseam.Attention(
            batch=1, num_heads=1, S_q=8, S_k=8, head_dim=512, dtype=dtype, lse=0
        )
        spec = kernelseam.AttentionBwd(forward=forward).problem().spec
        widest[dtype] = [a for a in toolchain.archs if backward_tiles(spec, toolchain.arch_row(a))]
    assert widest == {
        "bfloat16": [a for a in toolchain.archs if a != "sm_75"],
        "float32": ["sm_80", "sm_90a", "sm_100a", "sm_103"],
    }
    device = toolchain.arch_row("sm_86").product
    problem = kernelseam.AttentionBwd(forward=forward).problem()
    from kernelseam.kernels import shared_implementations

    (shared,) = (i for i in shared_implementations(toolchain) if i.operation == "attention_bwd")
    assert shared.supports(problem, device) == (
        "no tile of sm_86 takes float32 with head dims 512 and 512: of the wider a block keeps its "
        "own rows and a ring of the others', up to 256 columns in 101376 bytes of shared memory"
    )
