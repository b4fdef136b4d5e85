"""The public definitions of FlashInfer-Bench as rows: attention over pages and of ragged batches,
latent attention, linear layers and experts, as published models have them.

A definition's name says its constant axes; how many tokens, keys and sequences there are is chosen
here. Definitions of norms, rotations, sampling, sparse selections and linear attention are of no
operation of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.comparing.attention import AttentionRow
from benchmarks.comparing.decoding import DecodeRow
from benchmarks.comparing.gemm import GemmRow
from benchmarks.comparing.grouped import GroupedRow
from benchmarks.comparing.paging import PagedRow
from benchmarks.comparing.rows import NamedRow

SUITE = "definitions"
_row = partial(NamedRow, suite=SUITE)
"""Of a definition with numbers for its variable axes."""
HEADS = (
    *((5, 1, 128), (6, 1, 128), (8, 1, 128), (16, 1, 128), (16, 2, 128), (20, 4, 128)),
    *((24, 4, 128), (24, 8, 128), (28, 4, 128), (32, 2, 128), (32, 4, 128), (32, 8, 128)),
    *((32, 16, 128), (40, 10, 128), (48, 8, 128), (8, 1, 256)),
)
"""Heads, KV heads, head dim."""
UNPUBLISHED = {
    "gqa_paged_decode_h24_kv4_d128_ps1",
    "gqa_ragged_prefill_causal_h24_kv4_d128",
    "gqa_paged_decode_h8_kv1_d256_ps64",
    "gqa_paged_prefill_causal_h8_kv1_d256_ps64",
}
LATENT_HEADS = (8, 16)
WEIGHTS = (
    *((128, 2048), (256, 3072), (256, 7168), (2048, 4096), (2048, 5376), (3072, 3072)),
    *((3072, 6144), (3072, 8192), (3584, 3584), (3584, 18944), (4096, 4096), (4096, 5376)),
    *((4096, 14336), (4096, 22016), (4608, 3584), (4608, 4096), (5120, 2048), (5120, 3072)),
    *((5120, 4096), (5120, 5120), (5120, 8192), (5120, 14336), (5120, 17408), (5120, 17920)),
    *((5120, 25600), (5376, 4096), (5376, 21504), (6144, 4096), (6144, 5120), (6144, 6144)),
    *((7168, 5120), (7680, 5120), (8192, 3072), (8192, 6144), (8192, 8192), (8192, 28672)),
    *((8192, 29696), (10240, 5120), (10240, 8192), (16384, 3072), (16384, 16384)),
    *((16384, 53248), (18432, 16384), (21504, 5376), (28672, 4096), (28672, 5120)),
    *((34816, 5120), (35840, 5120), (37888, 3584), (44032, 4096), (51200, 5120)),
    *((57344, 8192), (59392, 8192), (106496, 16384)),
)
"""N and K of a linear layer's weight."""
EXPERTS = (
    ("ds_routing_topk8_ng8_kg4_e32_h7168_i2048", 32, 1, 7168, 2048),
    ("ds_routing_topk8_ng1_kg1_e48_h7168_i2048", 48, 1, 7168, 2048),
    ("renorm_topk8_e128_h2048_i768", 128, 8, 2048, 768),
    ("renorm_topk8_e128_h4096_i1536", 128, 8, 4096, 1536),
    ("renorm_topk10_e128_h2048_i512", 128, 10, 2048, 512),
)
"""Of e4m3 in blocks: experts on one device, those that a token takes of them on average, hidden and
intermediate size."""
TOKENS = (16, 4096)
"""Rows of a linear layer and of experts: of decoding and of a prefill."""
RAGGED = (2048, 2000, 1536, 1024, 777, 512, 391)
"""Rows of the sequences of a ragged batch."""
SIDE = 128
"""Of a block of e4m3 values with one scale."""


def definition_rows() -> list[NamedRow]:
    rows = [*_attention(), *_latent(), *_linear(), *_experts()]
    return [r for r in rows if r.title not in UNPUBLISHED]


def _attention() -> Iterator[NamedRow]:
    for h, kv, d in HEADS:
        shape = f"h{h}_kv{kv}_d{d}"
        for page in (1, 64):
            of = f"{shape}_ps{page}"
            yield _row(f"gqa_paged_decode_{of}", DecodeRow(64, 4096, h, kv, d, page))
            chunks = PagedRow(((8, 512, 2048),), h, kv, d, page)
            yield _row(f"gqa_paged_prefill_causal_{of}", chunks)
        yield _row(f"gqa_ragged_prefill_causal_{shape}", _ragged(h, kv, d, d))


def _ragged(heads: int, kv_heads: int, d: int, d_v: int) -> AttentionRow:
    return AttentionRow(
        SUITE,
        len(RAGGED),
        heads,
        max(RAGGED),
        d,
        True,
        kv_heads=kv_heads,
        D_v=d_v if d_v != d else 0,
        packed=RAGGED,
    )


def _latent() -> Iterator[NamedRow]:
    for h in LATENT_HEADS:
        for page in (1, 64):
            of = f"h{h}_ckv512_kpe64_ps{page}"
            decode = DecodeRow(64, 4096, h, 1, 576, page, latent=512)
            yield _row(f"mla_paged_decode_{of}", decode)
            chunks = PagedRow(((8, 512, 2048),), h, 1, 576, page, latent=512)
            yield _row(f"mla_paged_prefill_causal_{of}", chunks)
        ragged = _ragged(h, h, 192, 128)
        yield _row(f"mla_ragged_prefill_causal_h{h}_qk192_vo128", ragged)


def _linear() -> Iterator[NamedRow]:
    for n, k in WEIGHTS:
        for tokens in TOKENS:
            row = GemmRow(SUITE, 1, tokens, n, k, "float16", b_transposed=True)
            yield _row(f"gemm_n{n}_k{k}", row)


def _experts() -> Iterator[NamedRow]:
    """Both products: gate and up together, and down."""
    for name, experts, each, hidden, inner in EXPERTS:
        for tokens in TOKENS:
            for k, n in ((hidden, 2 * inner), (inner, hidden)):
                row = GroupedRow(SUITE, experts, tokens * each, k, n, "drawn", block=SIDE)
                yield _row(f"moe_fp8_block_scale_{name}", row)
