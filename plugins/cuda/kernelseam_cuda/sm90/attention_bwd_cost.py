"""What a launch of Hopper's gradients counts: blocks of sums, tiles of keys, and the work that
predicts its time."""

from __future__ import annotations

from kernelseam.costs import Work
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.attention.cost import keys_met
from kernelseam.kernels.elements import divide_up

from kernelseam_cuda.sm90.attention_blocks import by_element
from kernelseam_cuda.sm90.attention_bwd_tiles import HopperBackwardTile, HopperWideBackwardTile

BackwardTile = HopperBackwardTile | HopperWideBackwardTile
_SECTION_TILES = 128
"""A section has at least that many, divided by a cluster's blocks: about what runs at once. Twice
as many where heads share keys and none is hidden, so that fewer tiles of a head wait for each
other: 2 % (H100)."""
_NARROW_BELOW, _NARROW_BYTES = 1536, 16 << 20
"""Where a query sees fewer keys on average, its tiles' time no longer hides that what they meet
is loaded anew, and narrow sections take up to 19 % less time (H100)."""

_ELEMENT_RATE = 0.75
"""Of the loop's rate that scores and masks by element leave: 0.72 with a bias, 0.82 with a mask in
memory (H200)."""


def sees_fewer(p: AttentionProblem, keys: int) -> bool:
    """Whether a query sees fewer keys than these, on average."""
    return p.visible < keys * p.S_q


def head_blocks(p: AttentionProblem, rows: int) -> int:
    """Blocks of so many queries that a head has, as sums.h numbers them: of an entry, or of all
    packed sequences, each of which begins one."""
    return p.total_q // rows + p.batch if p.spec.q_view == "packed" else divide_up(p.S_q, rows)


def total_blocks(problem: AttentionBwdProblem, tile: BackwardTile) -> int:
    """Blocks of sums."""
    p = problem.forward
    entries = 1 if p.spec.q_view == "packed" else p.batch
    return entries * p.num_heads * head_blocks(p, tile.step)


def tile_count(problem: AttentionBwdProblem, tile: BackwardTile) -> dict[str, int]:
    """Tiles of a launch and blocks of its sums. Sections are of one width.

    ``cycle``: of so many sections one walks backwards, none where it is 0. The order of sums must
    not depend on the batch for a batch-invariant spec."""
    p = problem.forward
    key_tiles, query_blocks = divide_up(p.S_k, tile.keys), divide_up(p.S_q, tile.step)
    heads = p.batch * p.kv_heads
    row_bytes = (
        p.spec.head_dim * (p.spec.dtype.itemsize + 4) + p.spec.value_dim * p.spec.dtype.itemsize
    )
    head_bytes = p.S_q * row_bytes * p.head_group
    waves = 2 if p.head_group > 1 and not sees_fewer(p, p.S_k) else 1
    fewest = divide_up(_SECTION_TILES * waves // tile.cluster, key_tiles)
    section_bytes = tile.section_bytes
    if sees_fewer(p, _NARROW_BELOW):
        section_bytes = min(section_bytes, _NARROW_BYTES)
    section = tile.staggered or max(section_bytes // head_bytes, fewest)
    section = divide_up(heads, divide_up(heads, section))
    sections = divide_up(heads, section)
    cycle = 0 if p.spec.batch_invariant else 2 if p.head_group > 1 else sections
    packed = p.spec.q_view == "packed"
    return {
        "key_tiles": key_tiles,
        "total": key_tiles * heads,
        "section": section,
        "section_tiles": section * key_tiles,
        "cycle": cycle,
        "batch": p.batch,
        "kv_heads": p.kv_heads,
        "head_group": p.head_group,
        "head_parts": tile.head_parts,
        "query_blocks": query_blocks,
        "head_blocks": head_blocks(p, tile.step) if packed else query_blocks,
        "num_heads": p.num_heads,
    }


def row_work(problem: AttentionBwdProblem, tile: BackwardTile, row_bytes: int) -> Work:
    """Memory's: each row of queries is read and written once, ``row_bytes`` in all."""
    return Work(total_blocks(problem, tile) * tile.step * row_bytes)


def gradient_work(problem: AttentionBwdProblem, tile: BackwardTile) -> Work:
    """A tile's keys meet the queries that see its middle one, and half a step and half a tile
    more."""
    p = problem.forward
    keys, _ = keys_met(p, tile.keys, tile.step, p.S_q, p.S_k)
    met = keys * p.S_q / max(p.S_k, 1) * p.head_group
    longest = float(divide_up(p.S_q, tile.step) * tile.step * p.head_group)
    columns, value_columns = tile.columns(p.spec)
    operations = 2.0 * tile.keys * (3 * columns + 2 * value_columns)
    rate = tile.rate_in_order if tile.in_order and not tile.staggered else tile.rate
    if by_element(p.spec):
        rate *= _ELEMENT_RATE
    return Work(
        problem.bytes_moved,
        tile_count(problem, tile)["total"] * tile.cluster,
        operations * met / tile.cluster,
        operations * max(longest, met) / tile.cluster,
        p.spec.dtype,
        rate,
        tile.block_seconds,
    )
