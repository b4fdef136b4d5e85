"""On a GPU: attention that torch differentiates, its gradients held to torch's own, on torch's streams."""

from __future__ import annotations

from typing import Any

import pytest

import kernelseam
from kernelseam.interop import torch as ks

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("gpu is missing: torch sees no device here", allow_module_level=True)
if {d.backend for d in kernelseam.devices()} <= {"numpy"}:
    pytest.skip("gpu is missing: no plugin here knows torch's device", allow_module_level=True)
own = torch.nn.functional.scaled_dot_product_attention
LIMITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}


def tensors(*shapes: tuple[int, ...], dtype: str = "float16", seed: int = 0) -> list[Any]:
    made = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(s, generator=made, device="cuda").to(getattr(torch, dtype)).requires_grad_() for s in shapes
    ]


def agree(got: Any, want: Any, inputs: list[Any], limit: float) -> None:
    dout = torch.randn(got.shape, generator=torch.Generator("cuda").manual_seed(9), device="cuda").to(got.dtype)
    torch.testing.assert_close(got.double(), want.double(), rtol=limit, atol=limit)
    mine = torch.autograd.grad(got, inputs, dout)
    theirs = torch.autograd.grad(want, inputs, dout.to(want.dtype))
    for x, a, b in zip(inputs, mine, theirs, strict=True):
        assert (a.dtype, a.device, a.shape) == (x.dtype, x.device, x.shape)
        assert (a.double() - b.double()).abs().max() < limit * b.double().abs().max()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(dtype: str, causal: bool) -> None:
    q, k, v = tensors((2, 8, 333, 64), (2, 2, 333, 64), (2, 2, 333, 64), dtype=dtype)
    want = own(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
    agree(ks.attention(q, k, v, causal=causal), want, [q, k, v], LIMITS[dtype])


def test_a_bias_that_repeats() -> None:
    q, k, v, bias = tensors((2, 4, 130, 64), (2, 4, 257, 64), (2, 4, 257, 64), (1, 4, 130, 257))
    want = own(*(x.double() for x in (q, k, v)), attn_mask=bias.double())
    agree(ks.attention(q, k, v, bias=bias), want, [q, k, v, bias], LIMITS["float16"])


def test_sinks() -> None:
    q, k, v = tensors((2, 4, 130, 64), (2, 4, 130, 64), (2, 4, 130, 64))
    (sinks,) = tensors((4,), dtype="float32", seed=1)
    x = q.double() @ k.double().mT / 8
    x = torch.cat([x, sinks.double()[None, :, None, None].expand(2, 4, 130, 1)], -1)
    want = torch.softmax(x, -1)[..., :-1] @ v.double()
    agree(ks.attention(q, k, v, sinks=sinks), want, [q, k, v, sinks], LIMITS["float16"])


def test_packed_sequences() -> None:
    offsets = [3, 50, 50, 301]
    q, k, v = tensors((310, 4, 64), (310, 2, 64), (310, 2, 64))
    parts = [torch.zeros(3, 4, 64, device="cuda")]
    for a, b in zip(offsets, offsets[1:], strict=False):
        rows = (x[None, a:b].transpose(1, 2).double() for x in (q, k, v))
        if b > a:
            parts.append(own(*rows, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    want = torch.cat([*parts, torch.zeros(9, 4, 64, device="cuda")])
    where = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    agree(ks.attention_varlen(q, k, v, where, where, 251, 251, causal=True), want, [q, k, v], LIMITS["float16"])


def test_gradients_are_the_same_bits_every_time() -> None:
    q, k, v = tensors((2, 8, 300, 64), (2, 2, 300, 64), (2, 2, 300, 64))
    first, second = (torch.autograd.grad(ks.attention(q, k, v, causal=True).sum(), [q, k, v]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_torchs_current_stream() -> None:
    """Inputs that a stream is still writing are read after it, forward and backward alike."""
    q, k, v = tensors((2, 8, 512, 64), (2, 8, 512, 64), (2, 8, 512, 64))
    want = torch.autograd.grad(own(q, k, v).sum(), [q, k, v])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.empty_like(x) for x in (q, k, v)]
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, (q, k, v), strict=True):
            x.copy_(y.detach())
            x.requires_grad_()
        found = torch.autograd.grad(ks.attention(*late).sum(), late)
    stream.synchronize()
    for a, b in zip(found, want, strict=True):
        assert (a.float() - b.float()).abs().max() < LIMITS["float16"] * b.float().abs().max()
