"""attention-gym's masks and score modifications, by their names, and those of FlexAttention's
tests: the functions are written anew from what their documentation says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.judging.case import Case

HEADS, LENGTH, DIM = 4, 96, 32
Function = Callable[..., Any]
DOCUMENTS = torch.repeat_interleave(torch.arange(5), torch.tensor([20, 31, 5, 28, 12]))
STARTS = torch.tensor([0, 20, 51, 56, 84, 96])


def cases() -> Iterator[Case]:
    """Each in float16 and float32; score modifications with gradients."""
    shape = (2, HEADS, LENGTH, DIM)
    for dtype in ("f32", "f16"):
        for name, mask in masks().items():
            yield Case(f"{name}[{dtype}]", shape, shape, shape, dtype, mask_mod=mask)
        for name, score in scores().items():
            yield Case(
                f"{name}[{dtype}]", shape, shape, shape, dtype, score_mod=score, gradients=True
            )


def masks() -> dict[str, Function]:
    """attn_gym.masks, on a sequence of 96, as a canvas 12 wide and 8 high."""
    wide, high, global_rows = 12, 8, torch.arange(LENGTH) % 19 == 0
    prefix_of = torch.tensor([0, 0, 0, 3, 3])
    intervals = torch.tensor([[0, 40], [10, 60], [60, 96]])
    tree = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) > 0.5
    tree.fill_diagonal_(True)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def neighbourhood(place: Function) -> Function:
        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            (x, y), (kx, ky) = place(q), place(k)
            x, y = x.clamp(2, wide - 3), y.clamp(1, high - 2)
            return ((x - kx).abs() <= 2) & ((y - ky).abs() <= 1)

        return mask

    def plainly(index: Any) -> tuple[Any, Any]:
        return index % wide, index // wide

    def in_tiles(index: Any) -> tuple[Any, Any]:
        tile, inside = index // 8, index % 8  # of 4 × 2
        return (tile % 3) * 4 + inside % 4, (tile // 3) * 2 + inside // 4

    def shared_prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        mine = DOCUMENTS[q]
        first = prefix_of[mine]
        own = (k >= STARTS[mine]) & (q >= k)
        return own | ((mine != first) & (k >= STARTS[first]) & (k < STARTS[first + 1]))

    def block_diffusion(b: Any, h: Any, q: Any, k: Any) -> Any:
        half, size = LENGTH // 2, 8
        clean_q, clean_k = q >= half, k >= half
        i, j = (q % half) // size, (k % half) // size
        within = (i == j) & (clean_q == clean_k)
        return within | ((i > j) & clean_k & ~clean_q) | ((i >= j) & clean_k & clean_q)

    return {
        "causal_mask": causal,
        "generate_sliding_window": lambda b, h, q, k: (q - k <= 16) & (q >= k),
        "generate_dilated_sliding_window": lambda b, h, q, k: (
            ((q - k).abs() <= 16) & ((q - k).abs() % 4 == 0)
        ),
        "generate_global_sliding_window": lambda b, h, q, k: (
            ((q - k).abs() <= 4) | global_rows[q] | global_rows[k]
        ),
        "generate_prefix_lm_mask": lambda b, h, q, k: (k < 23) | (q >= k),
        "generate_doc_mask_mod": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
        "generate_packed_causal_doc_mask_mod": lambda b, h, q, k: (
            (k >= STARTS[DOCUMENTS[q]]) & (q >= k)
        ),
        "generate_shared_prefix_mask_mod": shared_prefix,
        "generate_natten": neighbourhood(plainly),
        "generate_tiled_natten": neighbourhood(in_tiles),
        "generate_vision_cross_attention_mask_mod": lambda b, h, q, k: (
            (q >= intervals[k // 32, 0]) & (q < intervals[k // 32, 1])
        ),
        "generate_block_diffusion_mask": block_diffusion,
        "generate_spatial_head_mask_mod": lambda b, h, q, k: (
            (k < 16) | (q < 16) | ((q - k).abs() < 32)
        ),
        "generate_temporal_head_mask_mod": lambda b, h, q, k: (
            (k < 16) | (q < 16) | (((q - 16) % 20 - (k - 16) % 20).abs() < 4)
        ),
        "generate_jetspec_tree_causal_mask_mod": lambda b, h, q, k: (
            (k < 64) | tree[q % 32, (k - 64).clamp(0, 31)]
        ),
        "batchify_mask_mod": lambda b, h, q, k: (q // 24 == k // 24) & (q % 24 >= k % 24),
    }


def scores() -> dict[str, Function]:
    """attn_gym.mods, and the functions of torch's test_flex_attention."""
    random = torch.Generator().manual_seed(1)
    table = torch.randn(2 * LENGTH, generator=random)
    by_head = torch.rand(HEADS, generator=random) + 0.5
    distances = torch.randint(0, 6, (2, LENGTH, LENGTH), generator=random, dtype=torch.int32)
    spatial = torch.randn(HEADS, 6, generator=random)
    full = torch.randn(2, HEADS, LENGTH, LENGTH, generator=random)
    never = -math.inf

    def causal(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q >= k, s, never)

    return {
        "generate_alibi_bias": lambda s, b, h, q, k: (
            s + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS))
        ),
        "generate_tanh_softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
        "generate_sandwich_bias": lambda s, b, h, q, k: s + table[q - k + LENGTH] * by_head[h],
        "generate_graphormer_spatial_bias": lambda s, b, h, q, k: (
            s + spatial[h, distances[b, q, k]]
        ),
        "generate_activation_score_mod": lambda s, b, h, q, k: torch.log(torch.sigmoid(s) + 0.5),
        "test_flex_attention:_identity": lambda s, b, h, q, k: s,
        "test_flex_attention:_times_two": lambda s, b, h, q, k: s * 2,
        "test_flex_attention:_squared": lambda s, b, h, q, k: s * s,
        "test_flex_attention:_causal": causal,
        "test_flex_attention:_inverse_causal": lambda s, b, h, q, k: torch.where(q <= k, s, never),
        "test_flex_attention:_rel_bias": lambda s, b, h, q, k: s + (q - k),
        "test_flex_attention:_rel_causal": lambda s, b, h, q, k: torch.where(
            q >= k, s + (q - k), never
        ),
        "test_flex_attention:_trig": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b),
        "test_flex_attention:_trig2": lambda s, b, h, q, k: (
            torch.cos(s) * torch.sin(s) + torch.tan(b)
        ),
        "test_flex_attention:_generate_windowed": lambda s, b, h, q, k: torch.where(
            q + 40 >= k, s, never
        ),
        "test_flex_attention:_head_offset": lambda s, b, h, q, k: s * by_head[h],
        "test_flex_attention:captured buffer of all": lambda s, b, h, q, k: s + full[b, h, q, k],
        "test_flex_attention:index of a where": lambda s, b, h, q, k: (
            s + table[torch.where(q > k, q - k, 0)]
        ),
        "test_flex_attention:logical ops": lambda s, b, h, q, k: torch.where(
            torch.logical_or(q >= k, torch.logical_not(h < 2)), s, never
        ),
        "test_flex_attention:silu": lambda s, b, h, q, k: torch.nn.functional.silu(s),
        "test_flex_attention:padded dense causal": lambda s, b, h, q, k: torch.where(
            (q < 90) & (q >= k), s, torch.where(q >= 90, s, never)
        ),
    }
