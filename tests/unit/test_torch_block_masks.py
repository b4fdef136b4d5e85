"""torch's BlockMask as it is: its lists say what is seen."""

from __future__ import annotations

from typing import Any

import kernelseam as ks
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: the masks are torch's")
from kernelseam.interop import torch as ks_torch  # noqa: E402
from torch.nn.attention.flex_attention import (  # noqa: E402
    BlockMask,
    create_block_mask,
)

B, H, G, S, L, D = 2, 4, 2, 200, 300, 16


def inputs() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    return torch.randn(B, H, S, D), torch.randn(B, G, L, D), torch.randn(B, G, L, D)


@pytest.mark.slow("create_block_mask imports torch's compiler, 30 s")
@pytest.mark.parametrize("size", [64, (128, 32)])
@pytest.mark.parametrize("apart", [True, False])
def test_of_create_block_mask(size: Any, apart: bool) -> None:
    widths = torch.tensor([5, 50, 190, 7])

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j < widths[h]) & (j >= b * 20) if apart else (i >= j) & (i - j < 33)

    given = (B, H) if apart else (None, None)
    blocks = create_block_mask(mask, *given, S, L, device="cpu", BLOCK_SIZE=size)
    q, k, v = inputs()
    got = ks.attention(q, k, v, block_mask=blocks)
    b, h, i, j = (torch.arange(n) for n in (B, H, S, L))
    seen = mask(b[:, None, None, None], h[:, None, None], i[:, None], j).expand(B, H, S, L)
    want = ks.attention(q, k, v, mask=seen)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for block_mask, mask_mod in ((blocks, None), (None, mask)):
        out = ks_torch.attention(*leaves, block_mask=block_mask, mask_mod=mask_mod)
        found = torch.autograd.grad(out.square().sum(), leaves)
        if mask_mod is None:
            kept = found
    for x, y in zip(kept, found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_made_where_the_masks_tensors_lie() -> None:
    kinds = torch.tensor([0, 1, 1, 2] * 75, dtype=torch.bfloat16)
    own = ks.block_mask(lambda b, h, i, j: kinds[i] == kinds[j], None, None, S, L, block_size=32)
    assert own.words.dtype == torch.int32 and own.words.shape == (1, 1, 7, 1, 2)
    q, k, v = inputs()
    want = ks.attention(q, k, v, mask=kinds[:S, None] == kinds)
    torch.testing.assert_close(ks.attention(q, k, v, block_mask=own), want)
    plain = ks.block_mask(lambda b, h, i, j: i >= j, None, None, S, L, like=q)
    assert isinstance(plain.words, torch.Tensor) and plain.words.device == q.device


def listed(*rows: list[int]) -> tuple[Any, Any]:
    counts = torch.tensor([[[len(x) for x in rows]]], dtype=torch.int32)
    indices = torch.tensor([[[x + [0] * (5 - len(x)) for x in rows]]], dtype=torch.int32)
    return counts, indices


def dense(rows: tuple[list[int], ...]) -> Any:
    seen = torch.zeros(S, L, dtype=torch.bool)
    for r, columns in enumerate(rows):
        for c in columns:
            seen[64 * r : 64 * r + 64, 64 * c : 64 * c + 64] = True
    return seen


def test_lists_decide() -> None:
    """Those that are made by hand need not be what a mask_mod says: a block that is in no list is
    hidden, one of the full list is seen, and one of the other list is masked."""
    mixed, full = ([1], [4, 0], [], [2]), ([2], [], [], [0, 3])
    mask = {"mask_mod": lambda b, h, i, j: i >= j}
    blocks = BlockMask.from_kv_blocks(
        *listed(*mixed), *listed(*full), BLOCK_SIZE=64, seq_lengths=(S, L), **mask
    )
    q, k, v = inputs()
    i, j = torch.arange(S)[:, None], torch.arange(L)
    seen = dense(full) | dense(mixed) & (i >= j)
    want = ks.attention(q, k, v, mask=seen)
    torch.testing.assert_close(ks.attention(q, k, v, block_mask=blocks), want)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = []
    for options in ({"block_mask": blocks}, {"mask": seen}):
        out = ks_torch.attention(*leaves, **options)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    q, k, v = (x.detach() for x in leaves)
    plain = BlockMask.from_kv_blocks(*listed(*mixed), BLOCK_SIZE=64, seq_lengths=(S, L))
    want = ks.attention(q, k, v, mask=dense(mixed))
    torch.testing.assert_close(ks.attention(q, k, v, block_mask=plain), want)
    plain.kv_num_blocks[0, 0, 0] = 0  # what is kept of it is not stale
    want = ks.attention(q, k, v, mask=dense(([], *mixed[1:])))
    torch.testing.assert_close(ks.attention(q, k, v, block_mask=plain), want)
