"""Attention over sequences, and products by experts, that several devices hold, on
torch.distributed: the same functions on a process group, and the same numbers. Importing this
imports torch.
"""

from typing import TYPE_CHECKING

from kernelseam.lazy import imported_at_use

if TYPE_CHECKING:
    from kernelseam.distributed.calls import attention, attention_varlen, explain
    from kernelseam.distributed.costs import Machine
    from kernelseam.distributed.decoding import attention_paged, shard_lengths
    from kernelseam.distributed.experts import grouped_mm
    from kernelseam.distributed.projections import output_projection, qkv_projection, shard_qkv
    from kernelseam.distributed.sharding import shard, unshard
    from kernelseam.distributed.transfers import measured

__all__ = [
    "Machine",
    "attention",
    "attention_paged",
    "attention_varlen",
    "explain",
    "grouped_mm",
    "measured",
    "output_projection",
    "qkv_projection",
    "shard",
    "shard_lengths",
    "shard_qkv",
    "unshard",
]

_NAMES = {
    ".calls": "attention attention_varlen explain",
    ".costs": "Machine",
    ".decoding": "attention_paged shard_lengths",
    ".experts": "grouped_mm",
    ".projections": "output_projection qkv_projection shard_qkv",
    ".sharding": "shard unshard",
    ".transfers": "measured",
}
__getattr__, __dir__ = imported_at_use(globals(), _NAMES)
