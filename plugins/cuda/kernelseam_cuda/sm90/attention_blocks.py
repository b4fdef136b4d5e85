"""Which blocks of keys the tiles of cuda_kernels/sm90/attention/forward.h visit, where a mask is no
band: the kernel definition of visible_blocks.h, and what the forward is given of it."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.contract import (
    WORKSPACE_ALIGNMENT,
    ArchRow,
    Device,
    Launch,
    LaunchConfig,
    Launches,
)
from kernelseam.costs import Work
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.expressions.text import structure_of
from kernelseam.kernels.attention.arguments import OPERANDS, SEQUENCES, VIEWS
from kernelseam.kernels.attention.scores import (
    SCORES,
    score_constants,
    score_values,
    with_expression,
)
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import most

from kernelseam_cuda.sm90.attention_tiles import ATTENTION, HopperAttentionTile
from kernelseam_cuda.sm90.kernel import HopperKernel

_WORD_BYTES, _WORD_BLOCKS = 8, 32
_SECONDS = 4e-6
"""That the launch takes."""
_THREADS, _THREADS_OF_A_MASK = 512, 256
_BIAS_RATE = {2: 0.65, 4: 0.5}
_ALIBI_RATE, _MASK_RATE, _SCORE_MOD_RATE = 0.84, 0.7, 0.7
"""Of the rate that the loop reaches where scores are products, what is left with a bias of so many
bytes an element, with ALiBi, a mask in memory or of a mask_mod, and a score_mod of a few
operations: as measured (benchmarks/results/h200-scores.md)."""
_LEAST_RATE = 0.45
"""Dearer functions leave less. But what they take they take in any kernel, and the shared kernel's
cost counts none of it: it took 1.3 to 3 times as long with each that was timed."""
_UNTIMED_RATE = 0.05
"""Of a bias whose rows are copied by elements, which was not timed: any other kernel that takes a
problem comes before."""
VISITED = (
    "visited",
    Structure(
        (
            *(("blocks", "pointer"), ("blocks_batch", "i64"), ("blocks_head", "i64")),
            *(("blocks_tile", "i32"), ("words", "i32")),
        ),
        ("base", "batch", "head", "tile", "words"),
    ),
)
"""The parameter of both."""


def is_banded(spec: AttentionSpec) -> bool:
    """Whether what a query sees is a range of keys by its place."""
    return not spec.mask and (spec.expression is None or not has_mask_mod(spec))


def by_element(spec: AttentionSpec) -> bool:
    """Whether scores or masks are computed element by element, not by a factor, a cap or a band."""
    return bool(spec.alibi or spec.bias or spec.expression) or not is_banded(spec)


def rows_may_share(spec: AttentionSpec) -> bool:
    """Whether heads that share keys may share a tile's rows, and its keys be in parts: of scores
    and masks by element, with a mask_mod alone that does not tell heads apart."""
    if not by_element(spec):
        return True
    if spec.alibi or spec.bias or spec.mask or not spec.expression:
        return False
    structure = structure_of(spec.expression)
    return not structure.has_score and "h" not in structure.seen[0].reads


def element_rate(p: AttentionProblem) -> float:
    """What part of the loop's rate is left by scores or masks that are computed by element."""
    s, rate = p.spec, 1.0
    if s.bias and not _rows_are_wide(p):
        return _UNTIMED_RATE
    if s.bias:
        rate *= _BIAS_RATE[s.bias.itemsize]
    if s.alibi:
        rate *= _ALIBI_RATE
    if not is_banded(s):
        rate *= _MASK_RATE
    if s.expression and structure_of(s.expression).has_score:
        rate *= _SCORE_MOD_RATE
    return max(rate, _LEAST_RATE)


def _rows_are_wide(p: AttentionProblem) -> bool:
    """Whether a bias's rows are copied by 16 bytes (plane.h), as far as strides tell."""
    assert p.spec.bias is not None
    *outer, column = p.bias_strides
    return column == 1 and not any(x * p.spec.bias.itemsize % 16 for x in outer)


def usable(
    spec: AttentionSpec, tiles: tuple[HopperAttentionTile, ...]
) -> tuple[HopperAttentionTile, ...]:
    """Of the tiles those for such scores, with a bias's rows in shared memory."""
    own = tuple(t for t in tiles if t.has_bias is (spec.bias is not None))
    if not by_element(spec):
        return tuple(t for t in own if not t.by_element)
    size, follows = spec.bias.itemsize if spec.bias else 0, not is_banded(spec)
    # Beside more than two consumers there are registers for ALiBi or a bias, and not for more.
    few = bool(
        follows or spec.softcap or spec.expression or (spec.bias and (spec.alibi or spec.prefix))
    )
    for_elements = (t for t in own if t.groups <= 2 or not (few or t.is_plain))
    fitting = (replace(t, bias_size=size, follows=follows) for t in for_elements)
    return tuple(t for t in fitting if t.fits)


def has_mask_mod(spec: AttentionSpec) -> bool:
    """Whether its functions hide pairs: there may be gaps among the queries that see a key, so that
    the gradients list their blocks."""
    return spec.expression is not None and structure_of(spec.expression).has_mask


def by_pair(spec: AttentionSpec) -> bool:
    """Whether the gradients compute scores by element or walk over lists: no plain band."""
    return by_element(spec) or spec.prefix  # a mask_mod is by element, too


def mask_axes(p: AttentionProblem) -> tuple[bool, bool]:
    """Whether the mask tells entries and heads apart, so that tiles of each have words."""
    s = p.spec
    reads = structure_of(s.expression).seen[0].reads if s.expression else frozenset()
    ragged = s.lengths or s.prefix or s.q_view == "packed" or s.kv_view == "paged"
    return bool(ragged or "b" in reads or p.mask_strides[0]), bool(
        "h" in reads or p.mask_strides[1]
    )


def _extents(p: AttentionProblem, tile: HopperAttentionTile) -> tuple[int, int, int, int]:
    """Entries, heads, tiles of a head, words of a tile."""
    entries, heads = mask_axes(p)
    return (
        p.batch if entries else 1,
        p.num_heads // tile.group_heads if heads else 1,
        divide_up(p.S_q * tile.group_heads, tile.rows),
        divide_up(_key_blocks(p, tile), _WORD_BLOCKS),
    )


def _key_blocks(p: AttentionProblem, tile: HopperAttentionTile) -> int:
    return most(divide_up(p.S_k, tile.bn), 1)


def _tile_words(p: AttentionProblem, tile: HopperAttentionTile) -> int:
    """From one tile's words to the next tile's: with its rank, and of a mask with its rows, of 16
    bytes each."""
    words = _extents(p, tile)[3] + 1
    if not p.spec.mask:
        return words
    return (divide_up(words, 2) + _key_blocks(p, tile) * tile.bm) * 2


def visited_values(p: AttentionProblem, tile: HopperAttentionTile) -> dict[str, int | float]:
    """``VISITED`` but its address."""
    (entries, heads), (_, each, tiles, words) = mask_axes(p), _extents(p, tile)
    head = tiles * _tile_words(p, tile)
    return {
        "blocks_batch": each * head if entries else 0,
        "blocks_head": head if heads else 0,
        "blocks_tile": _tile_words(p, tile),
        "words": words,
    }


def with_blocks(launches: Launches, p: AttentionProblem, tile: HopperAttentionTile) -> Launches:
    """The launches with one in front that says which blocks the first of them visits."""
    first, *others = launches.kernels
    at = divide_up(launches.workspace_bytes, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    visiting = replace(first, workspace={**first.workspace, "blocks": at})
    own = {"blocks": at, "counter": first.workspace.get("counter", at)}  # else it counts nothing
    steps = (Launch(VISIBLE_BLOCKS, p, tile, own), visiting, *others)
    return replace(launches, steps=steps, workspace_bytes=at + blocks_bytes(p, tile))


def blocks_bytes(p: AttentionProblem, tile: HopperAttentionTile) -> int:
    """Of the words of all tiles."""
    entries, heads, tiles, _ = _extents(p, tile)
    return entries * heads * tiles * _tile_words(p, tile) * _WORD_BYTES


class HopperVisibleBlocks(HopperKernel):
    """A block for each tile that the mask tells apart; of a mask in memory four for each word of
    it."""

    operation = "attention"
    name = "sm90"
    entry = "attention_visible_blocks_sm90"
    source = "sm90/attention/visible_blocks.h"
    early = True
    """As the forward's blocks do while it ends."""
    operands = OPERANDS
    _signature = Signature(
        (
            ("score", SCORES),
            ("sequences", SEQUENCES),
            VISITED,
            ("counter", "pointer"),
            *((n, "i32") for n in ("q_tiles", "heads", "groups")),
        ),
        generated=True,
    )

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        return "it has no block to say anything of" if is_banded(problem.spec) else None

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[HopperAttentionTile, ...]:
        fits = (t for t in usable(spec, ATTENTION) if spec.head_dim <= t.head_dim)
        return tuple(fits)[:1]

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> HopperAttentionTile:
        raise NotImplementedError

    def launches(
        self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device
    ) -> Launches:
        """The forward has those of both."""
        raise NotImplementedError

    def constants(self, spec: AttentionSpec, tile: HopperAttentionTile, row: ArchRow) -> Constants:
        return {
            **score_constants(spec),
            "Q_VIEW": VIEWS[spec.q_view],
            "KV_VIEW": VIEWS[spec.kv_view],
            "LENGTHS": spec.lengths,
            **members(tile, "bn", "groups", "group_heads"),
            "IN_PARTS": tile.parts > 1,
            "IN_CLUSTER": tile.in_cluster,
        }

    def signature(self, spec: AttentionSpec) -> Signature:
        return with_expression(self._signature, spec)

    def grid(self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device) -> int:
        entries, heads, tiles, words = _extents(problem, tile)
        return entries * heads * tiles * (_WORD_BYTES // 2 * words if problem.spec.mask else 1)

    def config(
        self, problem: AttentionProblem, tile: HopperAttentionTile, row: ArchRow, device: Device
    ) -> LaunchConfig:
        threads = _THREADS_OF_A_MASK if problem.spec.mask else _THREADS
        return replace(super().config(problem, tile, row, device), block=(threads, 1, 1))

    def threads(self, tile: HopperAttentionTile, row: ArchRow) -> int:
        return _THREADS

    def shared_bytes(self, spec: AttentionSpec, tile: HopperAttentionTile) -> int:
        return 0

    def values(
        self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        entries, heads, tiles, _ = _extents(p, tile)
        return {
            **score_values(p),
            "S_q": p.S_q,
            "S_k": p.S_k,
            **visited_values(p, tile),
            "q_tiles": tiles,
            "heads": heads,
            "groups": entries * heads,
        }

    def work(self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device) -> Work:
        """A mask is read once, and an eighth of it written; captured arrays are small."""
        p, (entries, heads, _, _) = problem, _extents(problem, tile)
        read = entries * heads * p.S_q * p.S_k if p.spec.mask else 0
        return Work(read + read // 8, waiting=_SECONDS)


VISIBLE_BLOCKS = HopperVisibleBlocks()
