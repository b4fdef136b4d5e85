"""An attention as data."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.descriptors.attention.options import ScoreScalars
from kernelseam.descriptors.attention.problem import scaled_row
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.samples.common import SHORT, CommonCase
from kernelseam.samples.operand_layout import OperandLayout


@dataclass(frozen=True)
class AttentionCase(ScoreScalars, CommonCase):
    """One attention. Field names are the descriptor's; q, k, v and out give the memory layouts."""

    name: str
    dtype: DType
    head_dim: int = 64
    value_dim: int = 64
    S_q: int = 65
    S_k: int = 129
    batch: int = 2
    num_heads: int = 2
    kv_heads: int = 2
    lse: bool = True
    q: OperandLayout = OperandLayout()
    k: OperandLayout = OperandLayout()
    v: OperandLayout = OperandLayout()
    out: OperandLayout = OperandLayout()
    packed: bool = False
    """q, k and v are slices of one [B, S, H + 2·H_kv, D] array."""
    view: str = "strided"
    """"strided"; or pointer lists of q, k, v and out: "host" or "device" (where the lists lie)."""
    scattered: bool = False
    """Pointer lists: heads in a random order with uneven gaps, else evenly spaced."""
    lse_gap: int = 0
    """Unused elements after every head's row of the LSE."""
    prefix: tuple[int, ...] | None = None
    """One per entry of the batch, as in q_sequences, k_sequences and kv_lengths."""
    alibi: tuple[float, ...] = ()
    """One slope per head."""
    alibi_batch: bool = False
    """Each entry of the batch has its own slopes: entry b's are (b + 1) times as steep."""
    bias: DType | None = None
    bias_layout: OperandLayout = OperandLayout()
    bias_data: str = "normal"
    """"normal" N(0,1), "holes" (−inf for a third of the pairs), "voids" (−inf for every third
    query), "low" (−60000 for half of the pairs), "lowest" (the most negative number for a third of
    the pairs and for every third query)."""
    mask: str = ""
    """What is masked: "random" a third of the pairs, "rows" every third query's keys, "keys" the
    same third of the keys for all queries, "all" everything."""
    mask_layout: OperandLayout = OperandLayout()
    sinks: tuple[float, ...] = ()
    """One per head."""
    q_sequences: tuple[int, ...] | None = None
    """Lengths: q and out are packed."""
    k_sequences: tuple[int, ...] | None = None
    """Lengths: k and v are packed."""
    margin: int = 0
    """Unused rows of packed memory before the first sequence and after the last."""
    kv_lengths: tuple[int, ...] | None = None
    page_size: int = 0
    """k and v are paged: shuffled pages, some of them unused, and a block table with invalid
    entries beyond the lengths."""
    shared_pages: tuple[int, ...] = ()
    """Of each entry, the first pages that it has in common with the entry before it."""
    prefix_groups: int | None = None
    dtype_out: DType | None = None
    dtype_kv: DType | None = None
    """That of k and v where they are stored in 8 bits."""
    dtype_q: DType | None = None
    """That of q where it is stored in 8 bits; k and v are, too."""
    scales: str = ""
    """What has scales of k and v, and of q of 8 bits: "tensor", "heads", "entries" (and heads), or
    "blocks"."""
    scale_block: int | None = None
    q_scale_block: int | None = None
    """Scales of q are those of blocks of so many queries, whatever those of k and v are of."""
    batch_invariant: bool = False
    latent: bool = False
    """v is the first columns of k."""
    row_scale_block: int | None = None
    """Columns of a latent key that share a scale in its row."""
    mods: str = ""
    """A score_mod and a mask_mod, by their name in ``samples.mods``, or in files."""
    blocks: tuple[int, int] | None = None
    """Queries and keys of the blocks by which the mask_mod is given as a block mask."""
    data: str = "normal"
    """"normal" N(0,1); with scores made "extreme" (sd 256), "falling" (near −512), "climbing" (4 a
    key); or with keys whose score is −inf: "holes" (every third), "voids" (all); or "faint": scores
    are the steps alone, values are not negative, and 0 where the score is the highest."""
    steps: tuple[tuple[int, float], ...] = ()
    """(first key, score): with the default scale, what keys from there to the next step gain."""
    steps_every: int = 1
    """Only every n-th query sees the steps."""
    ramp: bool = False
    """q[…,0] = √D and k[j,0] = j/16: later keys weigh more, so that a missing one shows."""

    operation = "attention"

    @property
    def scale_used(self) -> float:
        """The scale, with its default."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def out_dtype(self) -> DType:
        return self.dtype_out or self.dtype

    @property
    def q_dtype(self) -> DType:
        return self.dtype_q or self.dtype

    @property
    def kv_dtype(self) -> DType:
        return self.dtype_kv or self.dtype

    @property
    def key_width(self) -> int:
        """Elements of a row of k in memory."""
        if self.row_scale_block is None:
            return self.head_dim
        return scaled_row(self.head_dim, self.value_dim, self.row_scale_block)

    @property
    def keys(self) -> tuple[int, ...] | None:
        """How many keys each entry of the batch has, where they differ."""
        return self.kv_lengths if self.k_sequences is None else self.k_sequences


def case(kind: str, what: str = "", **fields: object) -> AttentionCase:
    """``kind`` is DTYPE-D[/D_v][-causal]."""
    dtype, dims, *mask = kind.split("-")
    head_dim, _, value_dim = dims.partition("/")
    name = "attention-" + kind.replace("/", "v") + ("-" + what if what else "")
    plain = AttentionCase(
        name, SHORT[dtype], int(head_dim), int(value_dim or head_dim), causal=bool(mask)
    )
    return replace(plain, **fields)  # type: ignore[arg-type]
