"""What tiles of Hopper's gradients become where they are few.

Few KV heads with many query heads each: a group's heads are shared out over tiles of the same keys,
each with gradients of keys and values of its own in the workspace, in 16 bits, which another launch
adds up in float32. And where nothing is masked, the tiles of as many heads as run at once begin at
queries that lie apart (cuda_kernels/sm90/attention/backward/tiles.h)."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from kernelseam.contract import Device
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.frozen import changed
from kernelseam.kernels.elements import divide_up

from kernelseam_cuda.sm90.attention_blocks import by_pair, has_mask_mod
from kernelseam_cuda.sm90.attention_bwd_cost import BackwardTile

_TILE_STEPS, _SUM_STEPS = 1.5, 3
"""Steps that a tile's first loads and its stores take, and the launch that adds up."""
_APART = 1.75
"""Steps between the first blocks of neighbouring tiles, where there are several sections: closer
ones wait for each other (H200: 4 × 16 heads × 4096 of 64 columns, one step, 1365 µs, in order
1294; of 128 columns, two steps, 2269 and 2352)."""
_STEP_BYTES = 6 << 20
"""Of the parts' gradients, written and read in the time of a step, about 2 µs."""


def takes_parts(problem: AttentionBwdProblem, tile: BackwardTile) -> bool:
    """Whether the problem's heads can be shared out as the tile's are. A batch-invariant result
    does not depend on how many tiles there are, packed rows may be nobody's, and what is by element
    or listed is by KV head: not there."""
    spec = problem.spec.forward
    dense = (spec.q_view, spec.kv_view) == ("strided", "strided")
    dense = dense and not by_pair(spec)
    divides = problem.forward.head_group % tile.head_parts == 0
    return tile.head_parts == 1 or (dense and divides and not spec.batch_invariant)


def for_problem(problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> BackwardTile:
    """The tile as the problem's launch has it."""
    tile = shared_out(problem, tile, device)
    together = _staggered_heads(problem, tile, device) if can_stagger(problem.spec, tile) else 0
    return replace(tile, staggered=together) if together else tile


def can_stagger(spec: AttentionBwdSpec, tile: BackwardTile) -> bool:
    """Whether tiles that add in order may begin at queries that lie apart: all of them meet all
    queries. The order depends on how many tiles run at once, which a batch-invariant result may
    not."""
    s = spec.forward
    masked = s.causal or s.window or s.prefix or has_mask_mod(s)
    return tile.in_order and not masked and not s.batch_invariant and s.kv_view == "strided"


def takes_staggered(problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> bool:
    """Whether all tiles run of as many heads as the tile says: they wait for each other."""
    if not tile.staggered:
        return True
    key_tiles, _ = _extents(problem, tile)
    fits = tile.staggered * key_tiles * tile.cluster <= device.limits.compute_units
    return fits and can_stagger(problem.spec, tile)


def _extents(problem: AttentionBwdProblem, tile: BackwardTile) -> tuple[int, int]:
    """Of a head: its tiles of keys, and the blocks of queries that each may meet."""
    p = problem.forward
    return divide_up(p.S_k, tile.keys), divide_up(p.S_q, tile.step)


def _staggered_heads(problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
    """As many KV heads, or parts of them, as run at once, where sections of so many take fewer
    steps than tiles that start a step behind the one before; else 0."""
    (key_tiles, query_blocks), p = _extents(problem, tile), problem.forward
    blocks, heads = key_tiles * tile.cluster, p.batch * p.kv_heads * tile.head_parts
    units = device.limits.compute_units
    if not heads or not 1 < blocks <= units:
        return 0
    steps = p.head_group // tile.head_parts * query_blocks + _TILE_STEPS
    sections = divide_up(heads, units // blocks)
    if sections > 1 and query_blocks < _APART * key_tiles:
        return 0
    in_order = divide_up(heads * blocks, units) * steps + key_tiles - 1
    return divide_up(heads, sections) if sections * steps < in_order else 0


def shared_out(problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> BackwardTile:
    """The tile with a group's heads in as many parts as should take the fewest steps."""
    heads = problem.forward.head_group
    if heads == 1:
        return tile
    units = max(device.limits.compute_units // tile.cluster, 1)
    forms = (replace(tile, head_parts=n) for n in range(1, heads + 1) if heads % n == 0)
    taken = (t for t in forms if takes_parts(problem, t))
    return min(taken, key=lambda t: _steps(problem, t, units))


def _steps(problem: AttentionBwdProblem, tile: BackwardTile, units: int) -> float:
    """The launch's, of ``units`` tiles at a time: in waves where all tiles are as long; else handed
    out the longest first, they end within an eighth of the longest."""
    p, spec, parts = problem.forward, problem.spec.forward, tile.head_parts
    key_tiles, query_blocks = _extents(problem, tile)
    waves = key_tiles * p.batch * p.kv_heads * parts / units
    longest = p.head_group // parts * query_blocks
    if spec.causal:
        mean = longest * p.visible / max(p.S_q * p.S_k, 1)
        steps = max(longest + _TILE_STEPS, waves * (mean + _TILE_STEPS) + longest / 8)
    else:
        steps = ceil(waves) * (longest + _TILE_STEPS)
    if parts == 1:
        return steps
    columns = spec.head_dim + spec.value_dim
    moved = 2 * parts * p.batch * p.kv_heads * p.S_k * columns * spec.dtype.itemsize
    return steps + _SUM_STEPS + moved / _STEP_BYTES


def with_parts(
    problem: AttentionBwdProblem, tile: BackwardTile, size: int
) -> tuple[AttentionBwdProblem, dict[str, int], int]:
    """The problem whose KV heads are the parts; where behind ``size`` bytes of the workspace their
    gradients lie, by name; and the workspace's bytes."""
    places = dict[str, int]()
    if tile.head_parts == 1:
        return problem, places, size
    p, spec = problem.forward, problem.spec.forward
    heads, strides = p.kv_heads * tile.head_parts, {}
    for name, width in (("dk", spec.head_dim), ("dv", spec.value_dim)):
        matrix = p.S_k * width
        strides[f"{name}_strides"] = heads * matrix, matrix, width
        places[name] = size
        size += divide_up(p.batch * heads * matrix * spec.dtype.itemsize, 256) * 256
    return changed(problem, forward=replace(p, kv_heads=heads), **strides), places, size
