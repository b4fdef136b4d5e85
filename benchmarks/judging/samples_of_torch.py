"""torch's samples of scaled_dot_product_attention: its OpInfo's shapes, and those of its memory
efficient kernel. Dropout is not had here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from benchmarks.judging.case import Case

BATCH, S_Q, S_K, HEADS, DIM = 4, 3, 6, 4, 8
DTYPES = ("f32", "f16", "bf16")


def cases() -> Iterator[Case]:
    """q of three axes and of four, broadcast over the batch, causal from the top left, a mask that
    is added; with gradients."""
    q, k = (BATCH, HEADS, S_Q, DIM), (BATCH, HEADS, S_K, DIM)
    shapes = {"3d": ((1, BATCH, S_Q, DIM), (1, BATCH, S_K, DIM)), "4d": (q, k)}
    for dtype, (name, (of_q, of_k)), causal in product(DTYPES, shapes.items(), (True, False)):
        yield Case(
            f"scaled_dot_product_attention[{name}-{'causal' if causal else 'full'}-{dtype}]",
            of_q,
            of_k,
            of_k,
            dtype,
            causal="top left" if causal else "",
            gradients=True,
        )
    for dtype in DTYPES:
        start = "scaled_dot_product_attention"
        yield Case(f"{start}[attn_mask-{dtype}]", q, k, k, dtype, bias=(S_Q, S_K), gradients=True)
        wide = (BATCH, HEADS, S_K, DIM + 8)
        yield Case(f"{start}[diff_v_head_dim-{dtype}]", q, k, wide, dtype, gradients=True)
    for dtype, corner, scale in product(DTYPES, ("top left", "bottom right"), (None, 1.0)):
        of_q, of_k = (4, 4, 11, 8), (4, 4, 32, 8)
        name = f"_efficient_attention_forward[{corner}-{scale}-{dtype}]"
        yield Case(name, of_q, of_k, of_k, dtype, scale=scale, causal=corner, gradients=True)
