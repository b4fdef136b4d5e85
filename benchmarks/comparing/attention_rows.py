"""The rows of the suites of attention's forward."""

from __future__ import annotations

from typing import Any

from benchmarks.comparing.attention import ADVERSARIAL, AttentionRow


def forward_rows() -> list[AttentionRow]:
    """The table of the peers' own figures, full and causal."""
    problems = [
        (batch, heads, S, D)
        for D, heads in ((64, 32), (128, 16), (256, 8))
        for batch, S in ((16, 1024), (4, 4096), (1, 16384))
    ]
    rows = []
    for causal in (False, True):
        rows += [AttentionRow("attention", *p, causal) for p in problems]
        rows.append(AttentionRow("attention", 4, 32, 4096, 128, causal, kv_heads=8))
        rows.append(AttentionRow("attention", 32, 12, 512, 64, causal, dtype="float16"))
    return rows


VARIED = (4096, 3000, 2048, 2000, 1536, 1024, 1000, 777, 512, 391)
"""Rows of packed sequences, 16384 in all."""


def option_rows() -> list[AttentionRow]:
    """Options that cost little in Hopper's kernel, on one problem of each head dim."""

    def row(D: int, heads: int, causal: bool, **options: Any) -> AttentionRow:
        lengths = options.get("packed") or (4096,) * 4
        return AttentionRow(
            "attention-options", len(lengths), heads, max(lengths), D, causal, **options
        )

    rows = []
    for causal in (False, True):
        rows += [row(96, 16, causal), row(192, 16, causal, D_v=128)]
        rows += [row(128, 16, causal, softcap=30.0), row(128, 16, causal, sinks=True)]
        rows.append(row(128, 16, causal, lengths=(4096, 3000, 2000, 1001)))
        rows.append(row(128, 16, causal, packed=VARIED))
        rows.append(row(64, 32, causal, packed=VARIED))
    for D, heads in ((64, 32), (128, 16), (256, 8)):
        rows += [row(D, heads, False, window=(1023, 0)), row(D, heads, False, window=(256, 256))]
    rows += [
        row(64, 32, True, softcap=30.0),
        row(64, 32, True, sinks=True),
        row(256, 8, True, softcap=30.0),
    ]
    return rows


def few_rows() -> list[AttentionRow]:
    """Few queries at the end of many keys."""
    few = [
        *((1, 64, 4096), (1, 256, 8192), (8, 16, 2048), (1, 128, 16384), (4, 32, 8192)),
        *((1, 512, 32768), (2, 9, 4096), (16, 5, 4096), (1, 48, 1000)),
    ]
    rows = [
        AttentionRow("attention-few", batch, 32, S, 128, True, kv_heads=8, keys=keys)
        for batch, S, keys in few
    ]
    rows += [
        AttentionRow("attention-few", batch, 16, S, D, causal, keys=keys)
        for batch, S, keys in few[:4]
        for D, causal in ((64, True), (128, False))
    ]
    return rows


def small_rows() -> list[AttentionRow]:
    """Problems that do not fill a device, or hardly."""
    return [
        AttentionRow("attention-small", batch, heads, S, D, True, kv_heads=kv_heads)
        for batch in (1, 2, 4, 8)
        for heads, kv_heads in ((16, 0), (32, 8))
        for S in (64, 128, 256, 512, 1024)
        for D in (64, 128)
    ]


def adversarial_rows() -> list[AttentionRow]:
    problems = ((32, 64, False), (16, 128, False), (16, 128, True), (8, 256, False))
    return [
        AttentionRow("attention-adversarial", 4, heads, 4096, D, causal, scores=kind, least=0.9)
        for kind in ADVERSARIAL
        for heads, D, causal in problems
    ]
