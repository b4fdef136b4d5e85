"""vLLM's attention backend over ``attention_paged``. Imports vLLM: its registry imports this when a
model asks for the backend.

vLLM's pages are [pages, H_kv, page size, D + D_v], keys beside values, in whatever order of axes it
has chosen: both are views, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from kernelseam.errors import InvalidValue
from kernelseam.interop.vllm import NAME
from kernelseam.ops.attention import attention_paged
from kernelseam.ops.cache import append_paged

Tensor = Any


class KernelseamBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM may ask of us: causal decoders over pages of 16 or 32 bits."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[Any]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return KernelseamImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return KernelseamMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)


@dataclass
class KernelseamMetadata:
    """A step's batch, by vLLM's names."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class KernelseamMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Takes a batch as it is. No graph of a whole step is promised to vLLM: its graphs of the
    pieces between attentions go on."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> KernelseamMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise InvalidValue(
                "causal",
                type(common.causal).__name__,
                f"{NAME} has causal decoders only",
                "Choose another backend",
            )
        return KernelseamMetadata(
            common.num_actual_tokens,
            _rounded(common.max_query_len, 1),
            _rounded(common.max_seq_len, 256),
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
        )


class KernelseamImpl(AttentionImpl):  # type: ignore[misc]
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise InvalidValue(
                "attn_type", attn_type, f"{NAME} has decoders only", "Choose another backend"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = logits_soft_cap or None
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes).float()
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KernelseamMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, H, D] over what ``do_kv_cache_update`` has written, into output [T, H, D_v].
        Rows beyond the batch's tokens are not written."""
        if output_scale is not None or output_block_scale is not None:
            raise InvalidValue(
                "output_scale", "given", f"{NAME} writes no quantized results", "Leave it out"
            )
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        if self.slopes is not None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)
        batch, tokens = attn_metadata, attn_metadata.num_actual_tokens
        k, v = self._pages(kv_cache)
        attention_paged(
            query[:tokens],
            k,
            v,
            batch.block_table,
            batch.seq_lens,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=min(batch.max_seq_len, batch.block_table.shape[1] * k.shape[2]),
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            alibi_slopes=self.slopes,
            sinks=None if self.sinks is None else self.sinks.float(),
            kv_layout="hnd",
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            out=output[:tokens],
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys and values [T, H_kv, D] to their slots; padding has −1."""
        rows = slot_mapping.shape[0]
        append_paged(
            key[:rows],
            value[:rows],
            *self._pages(kv_cache),
            slot_mapping=slot_mapping,
            kv_layout="hnd",
        )

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]


def _rounded(longest: int, least: int) -> int:
    """To a power of two: a plan is made for each, and lengths grow with every step."""
    return max(least, 1 << max(longest - 1, 0).bit_length())
