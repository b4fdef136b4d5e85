"""A mask with the blocks that it leaves, as a value: made once, and used by many calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.errors import InvalidValue
from kernelseam.expressions.block_bits import unpacked
from kernelseam.expressions.blocks import WORD, Blocks
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

SIZE = 128
"""Queries, and keys, of a block where nothing else is said."""
_TORCH = "torch.nn.attention.flex_attention"


@dataclass(frozen=True, eq=False)
class BlockMask:
    """``mask_mod`` over ``q_len`` queries and ``kv_len`` keys, with the blocks of ``block_size``
    (queries, keys) that it leaves.

    Made by ``kernelseam.block_mask``, or of torch's ``BlockMask``. It tells what arrays held that
    ``mask_mod`` captures when it was made: make it anew where they change.
    """

    mask_mod: Callable[..., Any]
    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    words: Any = field(repr=False)
    """int32 [B, H, block rows, words, 2], as ``expressions.blocks`` has it; B and H may be 1."""
    decides: bool = False
    """Whether a block is hidden, or seen whole, by its list alone, whatever mask_mod says: so are
    those of torch's."""

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(*self.block_size, self.decides)

    def states(self) -> npt.NDArray[Any]:
        """[B, H, block rows, block columns] on the host: 0 for an empty block, 1 for a mixed one, 2
        for one that is seen whole. It waits for the device."""
        words = self.words
        host = np.asarray(words.cpu() if hasattr(words, "cpu") else words)
        columns = -(-self.kv_len // self.block_size[1])
        states: npt.NDArray[Any] = unpacked(host, columns).sum(-1, dtype=np.int8)
        return states

    def __str__(self) -> str:
        found = self.states()
        shares = [float((found == n).mean()) if found.size else 0.0 for n in range(3)]
        named = zip(("empty", "mixed", "whole"), shares, strict=True)
        q, kv = self.block_size
        return f"blocks of {q}×{kv}: " + ", ".join(f"{x:.0%} {name}" for name, x in named)


def is_block_mask(x: Any) -> bool:
    """Whether it is one of ours, or of torch's."""
    own = isinstance(x, BlockMask)
    return own or (type(x).__module__ == _TORCH and hasattr(x, "kv_num_blocks"))


def block_mask_of(given: Any) -> BlockMask:
    """A block mask as it is given: ours, or torch's. Raises InvalidValue for another object."""
    if isinstance(given, BlockMask):
        return given
    if is_block_mask(given):
        return _of_torch(given)
    raise InvalidValue(
        "block_mask",
        type(given).__name__,
        "must be a block mask",
        "Make it by kernelseam.block_mask, or by torch's create_block_mask",
    )


_made: weakref.WeakKeyDictionary[Any, tuple[Any, BlockMask]] = weakref.WeakKeyDictionary()


def _of_torch(given: Any) -> BlockMask:
    """Of torch's lists; remembered while these are what they were."""
    lists = _lists(given)
    state = tuple((id(x), getattr(x, "_version", 0)) for x in lists if x is not None)
    state = (*state, given.mask_mod)
    if (known := _made.get(given)) is not None and known[0] == state:
        return known[1]
    sizes, lengths, words = words_of_torch(given)
    made = BlockMask(given.mask_mod, *lengths, sizes, words, True)
    _made[given] = state, made
    return made


def _lists(given: Any) -> list[Any]:
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return [getattr(given, n) for n in names]


def words_of_torch(given: Any) -> tuple[tuple[int, int], tuple[int, int], Any]:
    """(block size, lengths, words) of torch's block mask, by torch's own operations."""
    size, lists = given.BLOCK_SIZE, _lists(given)
    q_size, kv_size = (size, size) if isinstance(size, int) else size
    q_len, kv_len = given.seq_lengths
    columns = -(-kv_len // kv_size)
    mixed = _dense(lists[0], lists[1], columns)
    whole = mixed & False if lists[2] is None else _dense(lists[2], lists[3], columns)
    return (q_size, kv_size), (q_len, kv_len), _packed(mixed | whole, whole)


def _dense(counts: Any, indices: Any, columns: int) -> Any:
    """Bools [B, H, block rows, block columns] of torch's lists; a list may be longer than there are
    blocks, and what is behind its count is not read."""
    listed = indices.long()
    at = listed.new_ones(listed.shape).cumsum(-1) - 1
    inside = (at < counts.unsqueeze(-1)) & (listed < columns)
    listed = listed.where(inside, listed.new_full((), columns))
    found = listed.new_zeros((*listed.shape[:-1], columns + 1)).bool()
    return found.scatter(-1, listed, True)[..., :columns]


def _packed(some: Any, whole: Any) -> Any:
    """``block_bits.packed`` on tensors."""
    columns = some.shape[-1]
    words = -(-columns // WORD)
    bits = some.new_zeros((*some.shape[:-1], words * WORD, 2)).long()
    bits[..., :columns, 0], bits[..., :columns, 1] = some, whole
    bits = bits.unflatten(-2, (words, WORD))
    place = bits.new_ones(WORD).cumsum(0) - 1
    joined = (bits << place[:, None]).sum(-2)
    return (joined - (joined >> (WORD - 1) << WORD)).int()  # as a word with a sign
