"""What a serving engine does beside plain decoding, on one device: append and gather beside a copy
of as many bytes, pages that requests share beside plain paged decoding, FlashAttention-3's and
FlashInfer's cascade, and drafts that form a tree beside causal ones.

    python -m benchmarks.serving [--device cuda] [--small]

Times are medians of replays of a CUDA graph, of calls over several sets of memory in turn, more
than the L2 cache holds. ``--small`` is for a look at the output, on the host too: its times say
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kernelseam as ks
import torch

from benchmarks.comparing import flashinfer_peer
from benchmarks.comparing.attention import flash_attention_3

H, H_KV, D, PAGE = 32, 8, 128, 16
REQUESTS = 64
ROTATING_BYTES = 200e6
"""Of all sets of memory that calls take in turn."""
Run = Callable[[], object]
Tensor = Any


def seconds(runs: Sequence[Run], device: str, rounds: int = 9, launches: int = 12) -> float:
    """Of one run, each over memory of its own; on the host by its clock."""
    for run in runs:
        run()
    if device == "cpu":
        start = time.perf_counter()
        runs[0]()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), 1 + launches // len(runs)
    with torch.cuda.graph(graph):
        for _ in range(times):
            for run in runs:
                run()
    graph.replay()
    found = list[float]()
    for _ in range(rounds):
        start_event, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(float(start_event.elapsed_time(end)) * 1e-3 / (times * len(runs)))
    return statistics.median(found)


@dataclass(frozen=True)
class Cache:
    """Tokens of ``REQUESTS`` sequences of equal length, and an empty cache for them."""

    tokens: int
    device: str

    def arrays(self) -> dict[str, Tensor]:
        """One set of memory."""
        device, pages = self.device, self.tokens // PAGE
        bf16: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        of_pages = (pages, PAGE, H_KV, D)
        order = torch.randperm(pages, device=device)
        rows = torch.arange(PAGE, device=device)
        return {
            "q": torch.randn(self.tokens, H, D, **bf16),
            **{n: torch.randn(self.tokens, H_KV, D, **bf16) for n in "kv"},
            **{n: torch.empty(of_pages, **bf16) for n in ("k_pages", "v_pages")},
            **{
                n: torch.zeros(of_pages, device=device, dtype=torch.float8_e4m3fn)
                for n in ("k_stored", "v_stored")
            },
            **{n: torch.empty(of_pages[:3], device=device) for n in ("k_scales", "v_scales")},
            "slots": (order[:, None] * PAGE + rows).reshape(-1),
            "table": order.to(torch.int32).reshape(REQUESTS, -1),
            "q_out": torch.empty(self.tokens, H, D, **bf16),
            **{
                f"{n}_dense": torch.empty(REQUESTS, self.tokens // REQUESTS, H_KV, D, **bf16)
                for n in "kv"
            },
        }

    def runs(self, x: Mapping[str, Tensor], common: Mapping[str, Any]) -> dict[str, Run]:
        """By name, over a set of memory."""
        append: Any = ks.append_paged
        gather: Any = ks.gather_paged
        new = x["k"], x["v"], x["k_pages"], x["v_pages"]
        to_stored = x["k"], x["v"], x["k_stored"], x["v_stored"]
        table = {"block_table": x["table"], "kv_lengths": common["kv_lengths"]}
        packed = {**table, "cu_seqlens_q": common["cu_seqlens_q"]}
        rotated = {"q": x["q"], "out": x["q_out"], "rotary": common["rotary"]}
        norm = {"q_norm": common["norm"], "k_norm": common["norm"]}
        scales = {n: x[n] for n in ("k_scales", "v_scales")}
        dense = x["k_dense"], x["v_dense"]
        return {
            "append by slots": lambda: append(*new, slot_mapping=x["slots"]),
            "append by tables": lambda: append(*new, **packed),
            "with q, rotated": lambda: append(*new, **packed, **rotated),
            "with norms, to e4m3": lambda: append(
                *to_stored, **packed, **rotated, **norm, **scales
            ),
            "gather": lambda: gather(*new[2:], **table, out=dense),
        }

    @property
    def bytes(self) -> dict[str, int]:
        """Read and written by each."""
        kv, q = 2 * self.tokens * H_KV * D, 4 * self.tokens * H * D
        return {
            "append by slots": 4 * kv + 8 * self.tokens,
            "append by tables": 4 * kv,
            "with q, rotated": 4 * kv + q,
            "with norms, to e4m3": 3 * kv + q + 8 * self.tokens * H_KV,
            "gather": 4 * kv,
        }


def of_flashinfer(plans: Sequence[Callable[[], Run]], device: str) -> float | None:
    """Seconds of what they make, None where FlashInfer is not there or refuses, which is said."""
    try:
        return seconds([plan() for plan in plans], device)
    except Exception as e:  # it compiles at first use, which may fail in many ways
        print(f"FlashInfer: {type(e).__name__}: {e}".splitlines()[0][:200], file=sys.stderr)
        return None


def cache_rows(tokens: Sequence[int], device: str) -> Iterator[str]:
    for count in tokens:
        cache, each = Cache(count, device), count // REQUESTS
        options: dict[str, Any] = {"device": device, "dtype": torch.int32}
        common: dict[str, Any] = {
            "kv_lengths": torch.full((REQUESTS,), each, **options),
            "cu_seqlens_q": torch.arange(0, count + 1, each, **options),
            "rotary": tuple(torch.randn(each, D // 2, device=device) for _ in range(2)),
            "norm": torch.rand(D, device=device).to(torch.bfloat16),
        }
        sets = [cache.arrays() for _ in range(_sets(min(cache.bytes.values())))]
        by_name = [cache.runs(x, common) for x in sets]
        appends = [
            partial(
                flashinfer_peer.append,
                *(x["k"], x["v"], (x["k_pages"], x["v_pages"]), x["table"]),
                *(common["cu_seqlens_q"], common["kv_lengths"]),
            )
            for x in sets
        ]
        for name, size in cache.bytes.items():
            own = seconds([runs[name] for runs in by_name], device)
            memory = [
                [torch.zeros(size // 2, device=device, dtype=torch.uint8) for _ in range(2)]
                for _ in range(_sets(size))
            ]
            copied = seconds([partial(to.copy_, x) for to, x in memory], device)
            other = of_flashinfer(appends, device) if name == "append by tables" else None
            yield (
                f"| {count} | {name} | {own * 1e6:.1f} | {size / own / 1e9:.0f} "
                f"| {copied / own:.2f} | {_ratio(other, own)} |"
            )


def _ratio(other: float | None, own: float) -> str:
    return "–" if other is None else f"{other / own:.2f}"


def _sets(size: int) -> int:
    return max(2, min(6, int(ROTATING_BYTES / size)))


def _pages(count: int, device: str) -> tuple[Tensor, Tensor]:
    k, v = (
        torch.randn(count, PAGE, H_KV, D, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    return k, v


def prefix_row(batch: int, groups: int, shared: int, own: int, queries: int, device: str) -> str:
    """Requests in groups, keys that a group shares and that a request has, queries of each."""
    first, last = shared // PAGE, own // PAGE
    count = groups * first + batch * last
    order = torch.randperm(count, device=device).to(torch.int32)
    of_groups, of_entries = order.split((groups * first, batch * last))
    group = torch.arange(batch, device=device) * groups // batch
    table = torch.cat((of_groups.reshape(groups, first)[group], of_entries.reshape(batch, last)), 1)
    q = torch.randn(batch, queries, H, D, device=device, dtype=torch.bfloat16)
    lengths = torch.full((batch,), shared + own, device=device, dtype=torch.int32)
    pages, flash = _pages(count, device), flash_attention_3()
    plain: Any = partial(ks.attention_paged, q, *pages, table, lengths)
    grouped: Any = partial(plain, prefix_groups=groups)
    runs: dict[str, Run] = {"groups": grouped, "plain": plain}
    if not isinstance(flash, str):
        runs["FA3"] = partial(flash.fa3_decode, q, *pages, lengths, page_table=table, causal=True)
    expected = plain().float()
    error = float((grouped().float() - expected).norm() / expected.norm())
    found = {n: seconds([run], device) for n, run in runs.items()}
    plan = partial(flashinfer_peer.cascade, q, pages, table, first, [shared + own] * batch, groups)
    times = {**found, "FlashInfer": of_flashinfer([plan], device)}
    others = " | ".join(
        _ratio(times.get(n), found["groups"]) for n in ("plain", "FA3", "FlashInfer")
    )
    return (
        f"| {batch} | {groups} | {shared} + {own} | {queries} "
        f"| {found['groups'] * 1e6:.1f} | {others} | {error:.1e} |"
    )


def tree_row(batch: int, keys: int, drafts: int, device: str) -> str:
    """Drafts of each request that form a binary tree."""
    each = keys // PAGE
    pages = _pages(batch * each, device)
    table = torch.randperm(batch * each, device=device).to(torch.int32).reshape(batch, each)
    q = torch.randn(batch, drafts, H, D, device=device, dtype=torch.bfloat16)
    lengths = torch.full((batch,), keys, device=device, dtype=torch.int32)
    parents = [(i + 1) // 2 - 1 for i in range(drafts)]
    ancestors = torch.tensor(ks.tree_ancestors([parents] * batch), device=device)
    causal: Any = partial(ks.attention_paged, q, *pages, table, lengths)
    tree = partial(causal, causal=False, mask_mod=ks.tree_mask(ancestors, lengths))
    own, others = (seconds([run], device) for run in (tree, causal))
    return f"| {batch} | {keys} | {drafts} | {own * 1e6:.1f} | {own / others:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(arguments)
    small, device = given.small, given.device
    print("| tokens | what | µs | GB/s | of a copy's speed | FlashInfer / ours |")
    print("|---|---|---|---|---|---|")
    for row in cache_rows((1024,) if small else (2048, 8192, 32768), device):
        print(row, flush=True)
    print(
        "\n| requests | groups | keys | queries | µs | plain / ours | FA3 / ours "
        "| FlashInfer / ours | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    large = [(64, 1, 8192, 256, 1), (256, 1, 8192, 256, 1), (256, 4, 8192, 256, 1)]
    large += [(16, 1, 8192, 256, 1), (64, 1, 2048, 256, 1), (64, 1, 8192, 256, 4)]
    for shape in [(4, 2, 64, 16, 1)] if small else large:
        print(prefix_row(*shape, device), flush=True)
    print("\n| requests | keys | drafts | tree, µs | tree / causal |\n|---|---|---|---|---|")
    trees = [(64, 4096, 8), (16, 8192, 16), (64, 1024, 4)]
    for drafts in [(2, 64, 4)] if small else trees:
        print(tree_row(*drafts, device), flush=True)


if __name__ == "__main__":
    main()
