"""What models launch most: the list of problems that a vendor's wheels of binaries are made of.

Binaries depend on dtypes, options and head dims, and through their tiles on extents: so each has
short and long sequences, few rows and many.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from kernelseam.samples.attention_bwd_case import case as gradients
from kernelseam.samples.attention_case import case as attention
from kernelseam.samples.case import Case
from kernelseam.samples.gemm_case import case as gemm
from kernelseam.samples.grouped_case import case as grouped
from kernelseam.samples.projection_case import case as projection

DTYPES = ("f16", "bf16")
HEAD_DIMS = (64, 128, 256)
HIDDEN = 4096


def common_cases() -> Iterator[Case]:
    """Attention, its gradients, decoding, pages, products and projections, in float16 and
    bfloat16."""
    for dtype in DTYPES:
        for dim, mask in product(HEAD_DIMS, ("", "-c")):
            kind = f"{dtype}-{dim}{mask}"
            yield from _attentions(kind)
            if not mask:
                yield from _decoding(kind)
        yield from _products(dtype)
        yield from _projections(dtype)


def _attentions(kind: str) -> Iterator[Case]:
    """Dense and packed, for inference and with what gradients need, and the gradients."""
    for length in (512, 4096):
        heads: dict[str, Any] = {"batch": 4, "num_heads": 16, "kv_heads": 16}
        dense = {**heads, "S_q": length, "S_k": length}
        sequences = (length,) * 4
        packed = {**dense, "q_sequences": sequences, "k_sequences": sequences}
        for given in (dense, packed):
            yield attention(kind, lse=False, **given)
            yield attention(kind, lse=True, **given)
            yield gradients(kind, **given)


def _decoding(kind: str) -> Iterator[Case]:
    """One query an entry over a cache, contiguous or of pages of 16 keys; and a prompt's queries
    over pages."""
    for batch, keys in ((1, 4096), (32, 1024), (64, 8192)):
        given: dict[str, Any] = {
            "batch": batch,
            "num_heads": 32,
            "kv_heads": 8,
            "S_k": keys,
            "kv_lengths": (keys,) * batch,
            "lse": False,
        }
        yield attention(kind, S_q=1, **{**given, "kv_lengths": None})
        yield attention(kind, S_q=1, **given)
        yield attention(kind, S_q=1, page_size=16, **given)
    for queries in (512, 4096):
        prompt: dict[str, Any] = {"q_sequences": (queries,) * 4, "S_q": queries, "S_k": queries}
        heads: dict[str, Any] = {"batch": 4, "num_heads": 32, "kv_heads": 8}
        heads["kv_lengths"] = (queries,) * 4
        yield attention(f"{kind}-c", lse=False, page_size=16, **prompt, **heads)


def _products(dtype: str) -> Iterator[Case]:
    """A layer's, forward and of its gradients; batched ones; one row and few; those of experts."""
    for transposes in ("nt", "nn", "tn"):
        for rows in (1, 16, 128, 4096):
            yield gemm(f"{dtype}-{transposes}", M=rows, N=HIDDEN, K=HIDDEN, batch=1, num_heads=1)
        for size in (64, 512):
            many: dict[str, Any] = {"M": size, "N": size, "K": size, "batch": 64, "num_heads": 1}
            yield gemm(f"{dtype}-{transposes}", **many)
    experts: dict[str, Any] = {"sizes": (512,) * 8, "N": HIDDEN, "K": HIDDEN}
    yield grouped(f"{dtype}-m-nt", **experts)
    yield grouped(f"{dtype}-m-nn", **experts)


def _projections(dtype: str) -> Iterator[Case]:
    """With rotary embedding and grouped heads, of a prompt and of one token."""
    heads: dict[str, Any] = {"hidden": HIDDEN, "num_heads": 32, "kv_heads": 8, "head_dim": 128}
    for batch, tokens in ((1, 4096), (32, 1)):
        given: dict[str, Any] = {"batch": batch, "S": tokens, **heads}
        yield projection("qkv_projection", dtype, **given)
        yield projection("qkv_projection", dtype, rotary="halves", **given)
        yield projection("output_projection", dtype, **given)
