"""Scores and masks that users write, under torch's autograd: gradients against torch's own of the
formula."""

from __future__ import annotations

import math
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam.errors import InvalidValue

torch = pytest.importorskip("torch", reason="torch is missing: these are torch's tensors")
from kernelseam.interop import torch as kt  # noqa: E402
from torch_mods import MODS, B, H, grids  # noqa: E402

S, L, D = 20, 28, 16


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def formula(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
    x = (q @ k.mT) / math.sqrt(q.shape[-1])
    at = grids(*x.shape[2:])
    if score_mod is not None:
        x = score_mod(x, *at)
    if mask_mod is not None:
        x = x.masked_fill(~mask_mod(*at), -math.inf)
    return torch.softmax(x, -1).nan_to_num() @ v


@pytest.mark.parametrize("name", MODS)
def test_gradients_of_mods(name: str) -> None:
    """By q, k, v and by every captured tensor that wants one."""
    mods = MODS[name](S, L)
    q, k, v = (drawn(B, H, n, D, seed=s) for s, n in enumerate((S, L, L)))
    arriving = drawn(B, H, S, D, seed=9).detach()
    wants = [q, k, v, *_learnt(mods)]
    want = formula(q, k, v, *mods)
    expected = torch.autograd.grad(want, wants, arriving, allow_unused=True)
    got = kt.attention(q, k, v, score_mod=mods[0], mask_mod=mods[1])
    loose = name in ("sandwich", "t5")
    near = {"rtol": 1e-5, "atol": 1e-6} if loose else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(got, want, **near)
    found = torch.autograd.grad(got, wants, arriving)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **near)


def _learnt(mods: Any) -> list[Any]:
    from kernelseam.expressions.scores import score_expression

    return [x for x in score_expression(*mods).arrays if getattr(x, "requires_grad", False)]


def same_gradients(got: Any, want: Any, inputs: tuple[Any, ...], **near: float) -> None:
    found, expected = (torch.autograd.grad(x, inputs) for x in (got, want))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **near)


def test_indices_outside_of_a_captured_tensor_have_gradients_too() -> None:
    """The forward counts negative ones from the end, and moves others to the last element."""
    q, k, v = (drawn(B, H, n, D, seed=s) for s, n in enumerate((S, L, L)))
    table, one = drawn(H, 9, seed=7), drawn(1, seed=8)
    got = kt.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * one[h] + table[h][i - j])
    distance = torch.arange(S)[:, None] - torch.arange(L)
    at = torch.where(distance < 0, distance + 9, distance).clamp(0, 8)
    want = (((q @ k.mT) / math.sqrt(D) * one + table[:, at]).softmax(-1)) @ v
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    same_gradients(got.sin().sum(), want.sin().sum(), (q, k, v, table, one))


def test_functions_of_other_libraries_have_gradients_too() -> None:
    """And arrays, beside the tensor that wants one."""
    q, k, v = (drawn(B, H, n, D, seed=s) for s, n in enumerate((S, L, L)))
    t, added = drawn(H, seed=7), np.linspace(-1, 1, L).astype(np.float32)
    got = kt.attention(q, k, v, score_mod=lambda s, b, h, i, j: np.tanh(s * t[h]) + added[j])
    x = torch.tanh((q @ k.mT) / math.sqrt(D) * t[:, None, None]) + torch.from_numpy(added)
    want = x.softmax(-1) @ v
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    same_gradients(got.sin().sum(), want.sin().sum(), (q, k, v, t))


def test_the_lse_has_gradients_too() -> None:
    q, k, v = (drawn(B, H, n, D, seed=s) for s, n in enumerate((S, L, L)))
    t = drawn(H, seed=7)
    out, lse = kt.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s * t[h], causal=False, return_lse=True
    )
    x = (q @ k.mT) / math.sqrt(D) * t[:, None, None]
    loss = out.sum() + (lse**2).sum()
    want = (x.softmax(-1) @ v).sum() + (x.logsumexp(-1) ** 2).sum()
    same_gradients(loss, want, (q, k, v, t))


def test_beside_the_other_options() -> None:
    """A captured tensor's gradient is that of what the other options make of a score."""
    q, k, v = (drawn(B, n, H, D, seed=s) for s, n in enumerate((S, L, L)))
    t, slopes = drawn(H, seed=7), torch.linspace(0.1, 0.3, H)
    got = kt.attention(
        *(q, k, v),
        score_mod=lambda s, b, h, i, j: s * t[h],
        softcap=2.0,
        alibi_slopes=slopes,
        kv_lengths=torch.tensor([L, 11], dtype=torch.int32),
        layout="bshd",
        scale=0.3,
    )
    rows = []
    for b, n in enumerate((L, 11)):
        x, y, z = (a[b].transpose(0, 1) for a in (q, k[:, :n], v[:, :n]))
        s = 2 * torch.tanh(0.3 * (x @ y.mT) / 2)
        distance = (torch.arange(n) - torch.arange(S)[:, None] - (n - S)).abs()
        s = (s - slopes.double()[:, None, None] * distance) * t[:, None, None]
        rows.append((s.softmax(-1) @ z).transpose(0, 1))
    want = torch.stack(rows)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    same_gradients(got.sin().sum(), want.sin().sum(), (q, k, v, t), rtol=1e-6, atol=1e-6)


def test_packed_sequences() -> None:
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = (drawn(12, H, D, seed=s) for s in range(3))

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() < 3

    got = kt.attention_varlen(q, k, v, offsets, offsets, 7, 7, mask_mod=near)
    rows = []
    for a, e in ((0, 5), (5, 12)):
        x, y, z = (t[a:e].transpose(0, 1) for t in (q, k, v))
        i = torch.arange(e - a)
        s = (x @ y.mT / math.sqrt(D)).masked_fill(~near(0, 0, i[:, None], i), -math.inf)
        rows.append((s.softmax(-1) @ z).transpose(0, 1))
    want = torch.cat(rows)
    torch.testing.assert_close(got, want)
    same_gradients(got.sum(), want.sum(), (q, k, v))
    t = drawn(H)
    with pytest.raises(InvalidValue, match="captures a tensor that wants a gradient"):
        mod = lambda s, b, h, i, j: s * t[h]  # noqa: E731
        kt.attention_varlen(q, k, v, offsets, offsets, 7, 7, score_mod=mod)


def test_refusals() -> None:
    q, k, v = (drawn(B, H, S, D, seed=s) for s in range(3))
    bias = drawn(S, S)
    with pytest.raises(InvalidValue, match=r"bias.requires_grad = True: gradients do not flow"):
        kt.attention(q, k, v, bias=bias, mask_mod=MODS["window"](S, S)[1])
    plain = q.detach(), k.detach(), v.detach()
    with pytest.raises(InvalidValue, match="score_gradient = True: the attention has no score_mod"):
        out, lse = ks.attention(*plain, return_lse=True)
        ks.attention_bwd(out, *plain, out, lse, score_gradient=True)
    t = drawn(H)
    with pytest.raises(InvalidValue, match=r"captured_0.requires_grad = True"):
        ks.attention(*plain, score_mod=lambda s, b, h, i, j: s * t[h])
