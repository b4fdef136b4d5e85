"""FlashAttention's tests (tests/test_flash_attn.py of 2.x): lengths, head dims, kinds of heads and
masks. Batches are of 1, for NumPy; dropout is not had here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from benchmarks.judging.case import Case

LENGTHS = (
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
)
DIMS = (32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256)
HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}
MASKS = ("full", "causal", "local", "causal-local", "alibi", "softcap")
CACHE_LENGTHS = ((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048))
SPLIT_LENGTHS = ((1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000))
FEW = 600
"""Rows up to which gradients are computed."""


def cases() -> Iterator[Case]:
    """Every length with every head dim once; of the other parameters each in turn."""
    yield from _dense()
    yield from _packed()
    yield from _cached()
    yield from _split()


def _options(mask: str, s_q: int, s_k: int) -> dict[str, object]:
    options: dict[str, object] = {}
    if "causal" in mask:
        options["causal"] = "bottom right"
    if "local" in mask:
        options["window"] = (s_k // 3, 0 if "causal" in mask else s_k // 5)
    if mask == "alibi":
        options["slopes"] = True
    if mask == "softcap":
        options["softcap"] = 50.0
    return options


def _dense() -> Iterator[Case]:
    turns = zip(cycle(HEADS.items()), cycle(MASKS), cycle(("f16", "bf16", "f16")), strict=False)
    for s_q, s_k in LENGTHS:
        for dim in DIMS:
            (kind, (heads, kv_heads)), mask, dtype = next(turns)
            yield Case(
                f"test_flash_attn_output[{s_q}-{s_k}-{dim}-{kind}-{mask}-{dtype}]",
                (1, heads, s_q, dim),
                (1, kv_heads, s_k, dim),
                (1, kv_heads, s_k, dim),
                dtype,
                gradients=max(s_q, s_k) <= FEW,
                **_options(mask, s_q, s_k),  # type: ignore[arg-type]
            )


def _packed() -> Iterator[Case]:
    turns = zip(cycle(MASKS[:4]), cycle(HEADS.items()), cycle(("bf16", "f16")), strict=False)
    for s_q, s_k in LENGTHS:
        if max(s_q, s_k) > 1024:
            continue
        for dim in DIMS[::2]:
            mask, (kind, (heads, kv_heads)), dtype = next(turns)
            q_lengths, k_lengths = (s_q, max(1, s_q - 17)), (s_k - 20, s_k)
            yield Case(
                f"test_flash_attn_varlen_output[{s_q}-{s_k}-{dim}-{kind}-{mask}-{dtype}]",
                (2, heads, s_q, dim),
                (2, kv_heads, s_k, dim),
                (2, kv_heads, s_k, dim),
                dtype,
                q_lengths=q_lengths,
                k_lengths=k_lengths,
                gradients=max(s_q, s_k) <= FEW // 2,
                **_options(mask, s_q, s_k),  # type: ignore[arg-type]
            )


def _cached() -> Iterator[Case]:
    turns = zip(cycle(MASKS[:4]), cycle(HEADS.items()), strict=False)
    for s_q, s_k in CACHE_LENGTHS:
        for dim in (59, 64, 128):
            for page_size in (0, 256):
                mask, (kind, (heads, kv_heads)) = next(turns)
                where = f"paged{page_size}" if page_size else "dense"
                yield Case(
                    f"test_flash_attn_kvcache[{s_q}-{s_k}-{dim}-{kind}-{mask}-{where}]",
                    (2, heads, s_q, dim),
                    (2, kv_heads, s_k, dim),
                    (2, kv_heads, s_k, dim),
                    "f16",
                    k_lengths=(max(s_q, s_k - 20), s_k) if page_size else None,
                    page_size=page_size,
                    **_options(mask, s_q, s_k),  # type: ignore[arg-type]
                )


def _split() -> Iterator[Case]:
    masks = cycle(MASKS[:5])
    for s_q, s_k in SPLIT_LENGTHS:
        for dim in (32, 40, 59, 64, 80, 96, 111, 128)[:: 1 if s_k < 5000 else 4]:
            mask = next(masks)
            yield Case(
                f"test_flash_attn_splitkv[{s_q}-{s_k}-{dim}-{mask}]",
                (1, 12, s_q, dim),
                (1, 12, s_k, dim),
                (1, 12, s_k, dim),
                "f16",
                **_options(mask, s_q, s_k),  # type: ignore[arg-type]
            )
