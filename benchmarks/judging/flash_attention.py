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
PACKED_LENGTHS = ((1, 147), *LENGTHS)
CAUSAL_LENGTHS = (
    (1, 239),
    (3, 799),
    (127, 512),
    (127, 513),
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (1023, 1024),
)
CACHE_LENGTHS = (
    (1, 128),
    (1, 339),
    (3, 1024),
    (64, 800),
    (64, 256),
    (3, 799),
    (64, 2048),
    (16, 20000),
    (1, 131072),
    (16, 131072),
    (128, 128),
)
SPLIT_LENGTHS = (
    (3, 1024),
    (1, 339),
    (64, 800),
    (3, 799),
    (64, 2048),
    (16, 20000),
    (16, 100000),
    (128, 128),
    (256, 256),
)
DIMS = (32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256)
PACKED_DIMS = (32, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
CACHE_DIMS = (32, 59, 64, 80, 128, 256)
ALL_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}
CACHE_HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 3)}
MASKS = ("full", "causal", "local", "causal-local", "alibi", "softcap")
CAUSAL_MASKS = ("causal", "causal-local")
FEW, MANY = 600, 5000
"""Rows up to which gradients are computed, and keys from which a test's head dims are taken in
turn, not each."""


def cases() -> Iterator[Case]:
    """Every length with every head dim once; of the other parameters each in turn."""
    yield from _dense()
    yield from _packed()
    yield from _causal()
    yield from _packed_causal()
    yield from _cached()
    yield from _split()


def _dims(dims: tuple[int, ...], s_k: int, at: int) -> tuple[int, ...]:
    return dims if s_k < MANY else (dims[at % len(dims)],)


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
    for s_q, s_k in PACKED_LENGTHS:
        for dim in PACKED_DIMS:
            mask, (kind, (heads, kv_heads)), dtype = next(turns)
            yield Case(
                f"test_flash_attn_varlen_output[{s_q}-{s_k}-{dim}-{kind}-{mask}-{dtype}]",
                (2, heads, s_q, dim),
                (2, kv_heads, s_k, dim),
                (2, kv_heads, s_k, dim),
                dtype,
                q_lengths=(s_q, max(1, s_q - 17)),
                k_lengths=(s_k - 20, s_k),
                gradients=max(s_q, s_k) <= FEW // 2,
                **_options(mask, s_q, s_k),  # type: ignore[arg-type]
            )


def _causal() -> Iterator[Case]:
    turns = zip(
        cycle(CAUSAL_MASKS), cycle(("f16", "bf16", "bf16")), cycle((0, 0, 0, 1)), strict=False
    )
    for lengths in CAUSAL_LENGTHS:
        for dim in ALL_DIMS:
            mask, dtype, swapped = next(turns)
            s_q, s_k = lengths[::-1] if swapped else lengths
            yield Case(
                f"test_flash_attn_causal[{s_q}-{s_k}-{dim}-{mask}-{dtype}]",
                (1, 9, s_q, dim),
                (1, 9, s_k, dim),
                (1, 9, s_k, dim),
                dtype,
                gradients=max(s_q, s_k) <= FEW // 2,
                **_options(mask, s_q, s_k),  # type: ignore[arg-type]
            )


def _packed_causal() -> Iterator[Case]:
    turns = zip(cycle(CAUSAL_MASKS), cycle((0, 256, 512)), cycle(("f16", "bf16")), strict=False)
    for s_q, s_k in CAUSAL_LENGTHS:
        for dim in ALL_DIMS[::3]:
            mask, page_size, dtype = next(turns)
            where = f"paged{page_size}" if page_size else "packed"
            yield Case(
                f"test_flash_attn_varlen_causal[{s_q}-{s_k}-{dim}-{mask}-{dtype}-{where}]",
                (2, 9, s_q, dim),
                (2, 9, s_k, dim),
                (2, 9, s_k, dim),
                dtype,
                q_lengths=None if page_size else (s_q, max(1, s_q - 17)),
                k_lengths=(max(s_q, s_k - 20), s_k),
                page_size=page_size,
                **_options(mask, s_q, s_k),  # type: ignore[arg-type]
            )


def _cached() -> Iterator[Case]:
    turns = zip(cycle(MASKS[:4]), cycle(CACHE_HEADS.items()), strict=False)
    for at, (s_q, s_k) in enumerate(CACHE_LENGTHS):
        for dim in _dims(CACHE_DIMS, s_k, at):
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
    for at, (s_q, s_k) in enumerate(SPLIT_LENGTHS):
        for dim in _dims(ALL_DIMS, s_k, at):
            mask = next(masks)
            yield Case(
                f"test_flash_attn_splitkv[{s_q}-{s_k}-{dim}-{mask}]",
                (1, 12, s_q, dim),
                (1, 12, s_k, dim),
                (1, 12, s_k, dim),
                "f16",
                **_options(mask, s_q, s_k),  # type: ignore[arg-type]
            )
