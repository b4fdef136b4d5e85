"""On a GPU: what torch compiles, with CUDA graphs too, and ours as torch's flash attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kernelseam
import pytest
from attention_formula import attention
from kernelseam.interop import torch as ks
from torch_gpu import torch

pytestmark = [
    pytest.mark.gpu,
    # torch's own, of the graph with which it begins
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "helpers"))
from torch_operators import functions, samples  # noqa: E402

LIBRARY = tuple(samples())
FUNCTIONS = [n for n in functions() if n != "fused_qkv_projection"]  # whose tables are made there
DEVICE = "cuda"


def moved(x: Any) -> Any:
    if isinstance(x, list):
        return [moved(y) for y in x]
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().to(DEVICE).requires_grad_(x.requires_grad)


def several(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("name", LIBRARY)
def test_opcheck(name: str) -> None:
    called, operands, options = samples()[name]
    if options.get("out_dtype") is torch.float64:  # the shared kernels have none
        options = {n: x for n, x in options.items() if n != "out_dtype"}
    operator = getattr(torch.ops.kernelseam, called).default
    found = torch.library.opcheck(operator, tuple(moved(x) for x in operands), options)
    assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_plain_functions_compile_whole(name: str, mode: str) -> None:
    """With CUDA graphs (reduce-overhead) replayed over new numbers in the same places."""
    torch._dynamo.reset()
    function = functions()[name]
    operands = [moved(x).detach() for x in function.operands]

    def call(*operands: Any) -> Any:
        return [torch.sin(x) * 2 for x in several(function.plain(*operands))]

    run = torch.compile(call, fullgraph=True, mode=mode)
    for i in range(4):
        now = [x * (1 + 0.1 * i) if x.is_floating_point() else x for x in operands]
        torch.compiler.cudagraph_mark_step_begin()
        got = [x.clone() for x in run(*now)]
        for a, b in zip(got, call(*now), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_training_step_that_is_compiled(mode: str) -> None:
    torch._dynamo.reset()
    made = torch.Generator(DEVICE).manual_seed(0)
    x, w, out = (
        (0.1 * torch.randn(s, generator=made, device=DEVICE)).bfloat16().requires_grad_()
        for s in ((2, 128, 512), (768, 512), (512, 512))
    )

    def loss(x: Any, w: Any, out: Any) -> Any:
        q, k, v = ks.fused_qkv_projection(x, w, None, 8, 2)
        y = ks.attention(q, k, v, causal=True)
        return ks.fused_output_projection_residual(y, out, residual=x).float().square().mean()

    want = torch.autograd.grad(loss(x, w, out), (x, w, out))
    run = torch.compile(loss, fullgraph=True, mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(run(x, w, out), (x, w, out))
        for a, b in zip(got, want, strict=True):
            error = (a.double() - b.double()).abs().max()
            assert error <= 2e-2 * b.double().abs().max()


def test_the_lse_has_a_gradient() -> None:
    made = torch.Generator(DEVICE).manual_seed(0)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        q, k, v = (
            torch.randn(2, 4, 130, 64, generator=made, device=DEVICE).to(dtype).requires_grad_()
            for _ in range(3)
        )
        out, lse = ks.attention(q, k, v, return_lse=True)
        got = torch.autograd.grad(out.float().sin().sum() + lse.square().sum(), (q, k, v))
        true = [x.detach().double().requires_grad_() for x in (q, k, v)]
        y, of = attention(*true)
        want = torch.autograd.grad(y.sin().sum() + of.square().sum(), true)
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b).abs().max() < limit * b.abs().max()


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_sdpa_by_ours(causal: bool) -> None:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("torch is too old: no registry of flash attentions")
    made = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(2, 8, 333, 64, generator=made, device=DEVICE).half().requires_grad_()
        for _ in range(3)
    )
    own = torch.nn.functional.scaled_dot_product_attention
    want = own(*(x.double() for x in (q, k, v)), is_causal=causal)
    expected = torch.autograd.grad(want.square().sum(), (q, k, v))
    ks.register_flash_attention()
    torch.nn.attention.activate_flash_attention_impl("kernelseam")
    try:
        with (
            kernelseam.trace() as launches,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
            torch.autograd.set_multithreading_enabled(False),  # a trace is of its own thread
        ):
            got = own(q, k, v, is_causal=causal)
            mine = torch.autograd.grad(got.double().square().sum(), (q, k, v))
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert len(launches) >= 3
    torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3)
    for a, b in zip(mine, expected, strict=True):
        assert (a.double() - b.double()).abs().max() < 1e-2 * b.double().abs().max()
