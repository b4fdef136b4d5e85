"""On a GPU: what torch differentiates, its gradients held to torch's own in float64, on torch's
streams."""

from __future__ import annotations

from typing import Any

import kernelseam
import pytest
from kernelseam.interop import torch as ks
from torch_gpu import torch

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
own, linear = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.linear
LIMITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}


def tensors(*shapes: tuple[int, ...], dtype: str = "float16", seed: int = 0) -> list[Any]:
    made = torch.Generator(DEVICE).manual_seed(seed)
    return [
        torch.randn(s, generator=made, device=DEVICE).to(getattr(torch, dtype)).requires_grad_()
        for s in shapes
    ]


def agree(got: Any, want: Any, inputs: list[Any], limit: float) -> None:
    """One result or several: they, and the gradients for the same random gradients of them."""
    got, want = ([x] if isinstance(x, torch.Tensor) else x for x in (got, want))
    made = torch.Generator(DEVICE).manual_seed(9)
    douts = [torch.randn(x.shape, generator=made, device=DEVICE).to(x.dtype) for x in got]
    for x, y in zip(got, want, strict=True):
        scale = max(1.0, float(y.detach().abs().max()))
        torch.testing.assert_close(x.double(), y.double(), rtol=limit, atol=limit * scale)
    mine = torch.autograd.grad(got, inputs, douts)
    theirs = torch.autograd.grad(
        want, inputs, [d.to(y.dtype) for d, y in zip(douts, want, strict=True)]
    )
    for x, a, b in zip(inputs, mine, theirs, strict=True):
        assert (a.dtype, a.device, a.shape) == (x.dtype, x.device, x.shape)
        assert (a.double() - b.double()).abs().max() < limit * b.double().abs().max()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(dtype: str, causal: bool) -> None:
    q, k, v = tensors((2, 8, 333, 64), (2, 2, 333, 64), (2, 2, 333, 64), dtype=dtype)
    want = own(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
    agree(ks.attention(q, k, v, causal=causal), want, [q, k, v], LIMITS[dtype])


def test_a_write_counts_in_a_tensors_version() -> None:
    q, k, v, out = (x.detach() for x in tensors(*[(1, 2, 64, 64)] * 4))
    for _ in range(3):
        before = out._version
        kernelseam.attention(q, k, v, out=out)
        assert out._version > before and q._version == 0


def angles(rows: int, half: int) -> tuple[Any, Any]:
    at = torch.arange(rows, device=DEVICE)[:, None] / 100.0 ** (
        torch.arange(half, device=DEVICE) / half
    )
    return torch.cos(at), torch.sin(at)


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """[B, heads, S, D] in float64: the first half of the elements with the second, position by
    position."""
    (a, b), c, s = x.chunk(2, -1), cos.double(), sin.double()
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def projected(x: Any, weight: Any, bias: Any, heads: tuple[int, int], rotary: Any) -> list[Any]:
    """q, k and v [B, heads, S, D] in float64, as torch differentiates them."""
    h, g = heads
    y = linear(x.double(), weight.double(), None if bias is None else bias.double())
    q, k, v = y.unflatten(-1, (h + 2 * g, -1)).transpose(1, 2).split([h, g, g], 1)
    return [q, k, v] if rotary is None else [rotated(q, *rotary), rotated(k, *rotary), v]


def test_a_layer_of_attention() -> None:
    """Gradients through projection, attention, projection and residual, in float32; three launches
    forward."""
    x, weight, bias, w, b = tensors(
        (2, 77, 96), ((4 + 2 * 2) * 32, 96), (256,), (96, 128), (96,), dtype="float32"
    )
    with torch.no_grad():
        weight.mul_(0.1)
    rotary = angles(77, 16)
    with kernelseam.trace() as launches:
        q, k, v = ks.fused_qkv_projection(x, weight, bias, 4, 2, 32, rotary=rotary)
        got = ks.fused_output_projection_residual(ks.attention(q, k, v, causal=True), w, b, x)
    assert len(launches) == 3
    out = own(*projected(x, weight, bias, (4, 2), rotary), is_causal=True, enable_gqa=True)
    want = linear(out.transpose(1, 2).flatten(2), w.double(), b.double()) + x.double()
    agree(got, want, [x, weight, bias, w, b], 1e-4)


def test_gradients_are_the_same_bits_every_time() -> None:
    q, k, v = tensors((2, 8, 300, 64), (2, 2, 300, 64), (2, 2, 300, 64))
    first, second = (
        torch.autograd.grad(ks.attention(q, k, v, causal=True).sum(), [q, k, v]) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", [(16, 16), (16, 4)], ids=["plain", "grouped"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_batch_invariant_gradients_do_not_depend_on_the_batch(
    dim: int, heads: tuple[int, int]
) -> None:
    """Of one entry, alone and first of nine: where a launch ends its sums may not change order."""
    q_heads, kv_heads = heads
    of_queries, of_keys = (9, q_heads, 600, dim), (9, kv_heads, 600, dim)
    whole = [x.detach() for x in tensors(of_queries, of_keys, of_keys, of_queries)]

    def gradients(q: Any, k: Any, v: Any, dout: Any) -> dict[str, Any]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=DEVICE)
        forward = kernelseam.Attention.from_arrays(
            q, k, v, out, lse, causal=True, batch_invariant=True
        )
        kernelseam.plan(forward).bind()()
        found = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        kernelseam.plan(kernelseam.AttentionBwd(forward=forward, dout=dout, **found)).bind()()
        return found

    alone = gradients(*(x[:1].clone() for x in whole))
    for name, x in gradients(*whole).items():
        assert torch.equal(x[:1], alone[name]), name


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


def test_products_on_torchs_current_stream() -> None:
    """As for attention: what is still being written is read after it."""
    x, weight, w = tensors((2, 64, 96), ((4 + 2 * 2) * 32, 96), (128, 96))

    def gradients(x: Any, weight: Any, w: Any) -> Any:
        q, k, v = ks.fused_qkv_projection(x, weight, None, 4, 2, 32)
        y = ks.fused_output_projection_residual(q, w.T.contiguous(), None, x)
        return torch.autograd.grad(y.sum() + ks.bmm(k, v.mT).sum(), [x, weight, w])

    want = gradients(x, weight, w)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(t) for t in (x, weight, w)]
        torch.cuda._sleep(100_000_000)
        for t, y in zip(late, (x, weight, w), strict=True):
            t.copy_(y.detach())
            t.requires_grad_()
        found = gradients(*late)
    stream.synchronize()
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
