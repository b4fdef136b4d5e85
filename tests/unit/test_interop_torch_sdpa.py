"""scaled_dot_product_attention with torch's own semantics, held to torch's; ours in the place of
torch's flash attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kernelseam
import pytest
from kernelseam.interop import torch as ks
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernelseam.interop import torch_flash  # noqa: E402
from torch_operators import cells, ints  # noqa: E402

theirs = torch.nn.functional.scaled_dot_product_attention


def random(*shape: int, seed: int = 0) -> Any:
    return cells(*shape, seed=seed).detach().double().requires_grad_()


def visible(*shape: int) -> Any:
    """A random mask with a row that sees nothing."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.6
    mask[..., 0, :] = False
    return mask


def added(mask: Any) -> Any:
    made = torch.where(mask, random(*mask.shape, seed=3).detach(), -torch.inf)
    return made.requires_grad_()


Case = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), {}),
    "scale": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), {"scale": 0.7}),
    "causal": ((2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8), {"is_causal": True}),
    "causal, fewer queries": ((2, 3, 4, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"is_causal": True}),
    "causal, more queries": ((2, 3, 7, 8), (2, 3, 4, 8), (2, 3, 4, 8), {"is_causal": True}),
    "gqa": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "gqa causal": (
        (2, 6, 5, 8),
        (2, 3, 5, 8),
        (2, 3, 5, 8),
        {"enable_gqa": True, "is_causal": True},
    ),
    "mask": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": visible(5, 7)}),
    "mask of a batch": (
        (2, 3, 5, 8),
        (2, 3, 7, 8),
        (2, 3, 7, 8),
        {"attn_mask": visible(2, 1, 5, 7)},
    ),
    "mask of keys": (
        (2, 3, 5, 8),
        (2, 3, 7, 8),
        (2, 3, 7, 8),
        {"attn_mask": visible(2, 1, 2, 7)[:, :, 1:]},
    ),
    "added": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": added(visible(3, 5, 7))}),
    "added to a batch": (
        (2, 3, 5, 8),
        (2, 3, 7, 8),
        (2, 3, 7, 8),
        {"attn_mask": added(visible(2, 1, 5, 7))},
    ),
    "no heads": ((3, 5, 8), (3, 7, 8), (3, 7, 8), {"attn_mask": visible(3, 5, 7)}),
    "no batch": ((5, 8), (7, 8), (7, 4), {"attn_mask": visible(5, 7)}),
    "more axes": (
        (2, 2, 3, 5, 8),
        (2, 2, 3, 7, 8),
        (2, 2, 3, 7, 8),
        {"attn_mask": visible(2, 1, 3, 5, 7)},
    ),
    "repeated": ((2, 3, 5, 8), (1, 1, 7, 8), (1, 3, 7, 8), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_semantics_and_gradients_are_torchs(name: str) -> None:
    *shapes, options = CASES[name]
    q, k, v = (random(*s, seed=i) for i, s in enumerate(shapes))
    wanted = [q, k, v, *(x for x in options.values() if getattr(x, "requires_grad", False))]
    got = ks.scaled_dot_product_attention(q, k, v, **options)
    whole = dict(options)
    if name == "repeated":
        k, v = (x.expand(2, 3, 7, 8) for x in (k, v))
    want = theirs(q, k, v, **whole)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)
    dout = random(*want.shape, seed=9).detach()
    mine, other = (torch.autograd.grad(y, wanted, dout) for y in (got, want))
    for a, b in zip(mine, other, strict=True):
        assert b.nan_to_num().abs().max() > 1e-3
        torch.testing.assert_close(a, b.nan_to_num())


def test_rows_that_are_not_contiguous_are_copied() -> None:
    """As torch does; with gradients."""
    q, k, v = (
        random(2, 3, 5, 8, seed=i).detach().mT.contiguous().mT.requires_grad_() for i in range(3)
    )
    assert q.stride(-1) != 1
    got, want = (f(q, k, v, is_causal=True) for f in (ks.scaled_dot_product_attention, theirs))
    torch.testing.assert_close(got, want)
    dout = random(*want.shape, seed=9).detach()
    for mine, other in zip(
        *(torch.autograd.grad(x, (q, k, v), dout) for x in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_it_compiles_whole_at_every_length() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        both = ks.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return both + ks.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    run = torch.compile(call, fullgraph=True, backend=counter)
    for n in (6, 10, 17, 33):
        q, k, v = random(2, 6, n, 8), random(2, 3, n + 1, 8), random(2, 3, n + 1, 8)
        mask = visible(n, n + 1)
        torch.testing.assert_close(run(q, k, v, mask), call(q, k, v, mask))
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_what_is_refused(refused: Refused) -> None:
    q, k = cells(2, 4, 5, 8), cells(2, 2, 5, 8)
    ours = ks.scaled_dot_product_attention
    refused(
        "dropout_p = 0.1: must be 0. Drop out outside of the attention.",
        lambda: ours(q, q, q, dropout_p=0.1),
    )
    refused(
        "is_causal = True: a mask is given as well. Pass what both allow as attn_mask.",
        lambda: ours(q, q, q, torch.ones(5, 5) > 0, is_causal=True),
    )
    refused(
        "enable_gqa = False: query has 4 heads, key 2 and value 2. Pass enable_gqa=True where "
        "groups of query's heads share one of key's.",
        lambda: ours(q, k, k),
    )
    refused(
        "attn_mask.dtype = torch.float16: must be bool, float32 or torch.float32 as query is. "
        "Convert it.",
        lambda: ours(q, q, q, torch.ones(5, 5).half()),
    )
    refused(
        "query = an array of shape [8]: must have 2 axes or more. Add axes with reshape.",
        lambda: ours(q[0, 0, 0], q, q),
    )


@pytest.fixture
def flash() -> Iterator[None]:
    """Ours for tensors of the host, where torch has no flash attention by these operators."""
    activated = torch_flash.activate("cpu")
    yield
    activated.remove()


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_of_torch_by_ours(flash: None, causal: bool) -> None:
    q, k, v = (cells(2, 4, 6, 8, seed=i) for i in range(3))
    with kernelseam.trace() as launches:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=0.3
        )
        got = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert [x.kernel for x in launches] == ["numpy_attention", "numpy_attention_bwd"]
    want = theirs(q, k, v, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, want)
    assert lse.shape == (2, 4, 6) and lse.dtype == torch.float32
    for a, b in zip(got, torch.autograd.grad(want.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


def test_flash_attention_of_packed_rows_by_ours(flash: None, refused: Refused) -> None:
    q, k, v = (cells(7, 4, 8, seed=i) for i in range(3))
    offsets = ints(0, 3, 7)
    rest = (4, 4, 0.0, True, False)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets, offsets, *rest, window_size_left=2, window_size_right=0
    )
    want = ks.attention_varlen(q, k, v, offsets, offsets, 4, 4, causal=True, window=(2, 0))
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(want.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)
    into = torch.empty_like(out)
    with torch.no_grad():
        again = torch.ops.aten._flash_attention_forward_no_dropout_inplace(
            into, q, k, v, offsets, offsets, *rest, window_size_left=2
        )
    assert torch.equal(into, out) and torch.equal(again, lse)
    refused(
        "dropout_p = 0.5: must be 0. Drop out outside of the attention.",
        lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, 4, 4, 0.5, True, False
        ),
    )


def test_flash_attention_over_pages_by_ours(flash: None) -> None:
    q = cells(2, 1, 4, 8, grad=False)
    k, v = cells(5, 4, 2, 8, grad=False), cells(5, 4, 2, 8, seed=1, grad=False)
    table, now = ints([3, 1, 0], [4, 2, 0]), ints(9, 6)
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, 1, 12, 0.0, True, False, seqused_k=now, block_table=table, num_splits=1
    )
    assert torch.equal(out, kernelseam.attention_paged(q, k, v, table, now, batch_invariant=True))


def test_registration_under_its_name(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    attention = torch.nn.attention
    ks.register_flash_attention()
    assert "kernelseam" in attention.list_flash_attention_impls()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    refused(
        "device = None: torch sees no accelerator here. Call "
        "kernelseam.interop.torch.scaled_dot_product_attention, which needs none.",
        lambda: attention.activate_flash_attention_impl("kernelseam"),
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    attention.activate_flash_attention_impl("kernelseam")
    try:
        assert attention.current_flash_attention_impl() == "kernelseam"
        names = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")
        assert "torch_flash" in names.partition("\nCUDA")[2].partition("\n")[0]
    finally:
        attention.restore_flash_attention_impl()
    names = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")
    assert "torch_flash" not in names


def test_a_torch_without_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(kernelseam.errors.InvalidValue, match=r"has no torch\.nn\.attention\.regis"):
        ks.register_flash_attention()
