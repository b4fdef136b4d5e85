"""What an attention, and its gradients, ask of a device with a tile."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, TypeVar

from kernelseam.contract import ArchRow, Device
from kernelseam.costs import Work, predicted
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.attention.backward_tile import BackwardTile
from kernelseam.kernels.attention.ragged import expected_tiles, typical
from kernelseam.kernels.attention.tile import AttentionTile
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import divide_up, pad

Tile = TypeVar("Tile")
NARROW = 0.6
"""Of a tile's rate where rows are read element by element."""
LATENT = 0.43
"""Of a tile's rate where values are the keys' first columns: latent prefill and decoding over pages
reach 34 and 31 TFLOP/s where head dim 512 reaches 79 (H200)."""
STREAMED = 3.5
"""The norm of compute and memory time of a tile that loads keys and values ahead: 64 × 8 queries of
16,278 keys, which take 117 µs to compute and 128 to load, take 134 beside the start (H200)."""
STARTING = 0.55
"""The part of a block's start and end that the blocks before and after it do not hide."""
PAGED_SECONDS = 1.2e-6
"""Of a block that waits until it knows where the pages are."""
PACKED_SECONDS = 5.3e-7
"""Of a block that waits until it knows where its sequence begins and ends."""
AGAIN = 0.38
"""What a byte takes that a tile reads again, from the L2 cache, of one from memory: an H200's
cache is three times as fast, by 500 random problems (``python -m benchmarks choices``), and so are
the seconds above."""
ESTIMATED_RATE, ESTIMATED_BACKWARD = 0.4, 0.3
"""Rates of tiles that were not measured."""
PRODUCTS = {"both": 7, "keys": 4, "queries": 3}
"""Of the scores' size, of which five count: scores and dp are computed by keys and
by queries."""
PRODUCTS_ONCE = 5
"""With atomics: nothing is computed twice."""


def least_seconds(
    kernel: KernelDefinition,
    problem: AttentionProblem,
    tiles: Iterable[Tile],
    row: ArchRow,
    device: Device,
) -> Tile:
    """The tile whose launches have the least predicted time. Launches are made of those tiles alone
    whose kernel by itself takes no longer than the least so far: parts of keys add to it."""

    def seconds(kernel: KernelDefinition, problem: Any, tile: Any) -> float:
        return predicted(kernel.work(problem, tile, device), row.costs, device.limits)

    known = tuple(tiles)
    if len(known) == 1:
        return known[0]
    alone, best = [seconds(kernel, problem, t) for t in known], (inf, 0)
    for least, i in sorted(zip(alone, range(len(known)), strict=True)):
        if least > best[0]:
            break
        whole = 0.0
        for x in kernel.launches(problem, known[i], device).kernels:
            is_own = x.kernel is kernel and x.problem is problem
            whole += least if is_own else seconds(x.kernel, x.problem, x.tile)
        best = min(best, (whole, i))
    return known[best[1]]


def forward_work(p: AttentionProblem, tile: AttentionTile, device: Device) -> Work:
    """A block's queries meet the keys that are visible to its middle one, and half a step and half
    a tile more."""
    spec, shared = p.spec, p.head_group if tile.grouped else 1
    blocks = expected_tiles(p, tile.bm, shared) * tile.splits
    keys, most = tile_keys(p, tile.bm // shared, tile.bn)
    step = (
        2.0 * tile.bm * (pad(spec.head_dim) + pad(spec.value_dim, tile.column_warps)) / tile.splits
    )
    rate = (tile.rate or ESTIMATED_RATE) * (1.0 if spec.vector >= 16 else NARROW)
    rate *= LATENT if spec.latent else 1.0
    start = tile.block_seconds
    if spec.kv_view == "paged":
        start += PAGED_SECONDS
    if spec.q_view == "packed":
        start += PACKED_SECONDS
    usual = typical(p)
    return Work(
        usual.bytes_moved + again_bytes(usual, keys * blocks / tile.splits),
        blocks,
        step * keys,
        step * most,
        spec.dtype,
        rate,
        **starting(start, blocks, device),
    )


def starting(
    seconds: float, blocks: int, device: Device, again: float = STARTING, beside: int = 1
) -> dict[str, float]:
    """Fields of a launch's work, whose blocks take so long beside their keys: those of the first
    wave overlap with nothing, of later ones ``again``, a part, is not hidden. So many blocks
    ``beside`` each other on a compute unit start together."""
    units = max(device.limits.compute_units, 1)
    waves = max(-(-blocks // units), 1)
    later = -(-blocks // (units * beside)) - 1
    return {
        "start": seconds,
        "block_seconds": again * seconds * max(later, 0) / waves,
        "overlap": STREAMED,
    }


def again_bytes(p: AttentionProblem, keys: float) -> int:
    """What reading keys and values again costs, where all tiles read so many."""
    row = (p.spec.head_dim + p.spec.value_dim) * p.spec.kv.itemsize
    once = p.total_k or p.batch * p.S_k
    return round(AGAIN * row * max(keys - once * p.kv_heads, 0))


def backward_work(problem: AttentionBwdProblem, tile: BackwardTile, blocks: int) -> Work:
    """A block's own rows meet the visible ones of the other side."""
    p, spec = problem.forward, problem.spec.forward
    keys, most = keys_met(p, tile.own, tile.step, p.S_q, p.S_k)
    if tile.role == "keys":  # as many pairs, by the other side's rows
        keys, most = (
            keys * p.S_q * p.head_group / max(p.S_k, 1),
            float(divide_up(p.S_q, tile.step) * tile.step),
        )
        most *= p.head_group
    products = PRODUCTS_ONCE if tile.query_rows else PRODUCTS[tile.role]
    width = (3 * tile.width(spec.head_dim) + 2 * tile.width(spec.value_dim)) / 5
    step = 2.0 * tile.own * width * products
    if tile.role == "both":
        step /= 2  # of its blocks half own keys and half queries
    rate = (tile.rate or ESTIMATED_BACKWARD) * (1.0 if spec.vector >= 16 else NARROW)
    return Work(
        problem.bytes_moved, blocks, step * keys, step * most, spec.dtype, rate, tile.block_seconds
    )


def tile_keys(p: AttentionProblem, queries: int, step: int) -> tuple[float, float]:
    """Keys, in whole steps, that a tile of so many queries meets: on average, and at most."""
    usual = typical(p)
    keys, most = keys_met(usual, queries, step, usual.S_q, usual.S_k)
    return keys, most if usual is p else keys_met(p, queries, step, p.S_q, p.S_k)[1]


def keys_met(
    p: AttentionProblem, own: int, step: int, rows: int, others: int
) -> tuple[float, float]:
    """Rows of the other side, in whole steps, that a block meets: on average, and at most."""
    if not rows or not others:
        return 0.0, 0.0
    most = float(divide_up(others, step) * step)
    left, right = p.left, 0 if p.spec.causal else p.right
    if left is None and right is None:
        return most, most
    average = p.visible / rows
    edges = (left is not None) + (right is not None)  # each cuts tiles and steps in two
    widest = others if left is None or right is None else min(others, left + right + own)
    return min(average + edges * (own + step) / 2, most), min(float(widest + step), most)
