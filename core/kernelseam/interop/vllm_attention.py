"""vLLM's attention backend over ``attention_paged``. Imports vLLM: its registry imports this when a
model asks for the backend.

vLLM's pages are [pages, H_kv, page size, D + D_v], keys beside values, in whatever order of axes it
has chosen: both are views, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from kernelseam.errors import InvalidValue
from kernelseam.expressions.scores import MaskMod
from kernelseam.interop.vllm import NAME
from kernelseam.interop.vllm_masks import batch_mask
from kernelseam.ops.attention import attention_paged, attention_varlen
from kernelseam.ops.cache import append_paged

Tensor = Any
SCALE_BYTES = 4
"""Behind each head's values of a token, where every token and head has a scale."""
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
"""Layers without a cache."""


class KernelseamBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM may ask of us: decoders and encoders; pages of 16 or 32 bits, and of e4m3 with
    scales of the tensor, of heads, or of tokens and heads."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[Any]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_per_token_head")
    ]

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
        return head_size % 8 == 0 and head_size <= 512

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Room for a scale behind each head's keys, and one behind its values."""
        if spec.kv_quant_mode != KVQuantMode.FP8_PER_TOKEN_HEAD or spec.state_content_bytes:
            return spec
        size = spec.dtype.itemsize * (spec.head_size + spec.head_size_v)
        return replace(spec, state_content_bytes=size + 2 * SCALE_BYTES)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, *others: Any, **options: Any
    ) -> str | None:
        if dtype is torch.float32 and str(kv_cache_dtype).startswith("fp8"):
            return "caches in e4m3 are for float16 and bfloat16"
        if dtype is torch.float32 and head_size > 256:
            return "head dims above 256 are for float16 and bfloat16"
        capability = next((x for x in (*others, *options.values()) if hasattr(x, "minor")), (9, 0))
        if str(kv_cache_dtype).startswith("fp8") and tuple(capability) < (8, 9):
            return "caches in e4m3 want compute capability 8.9"
        return None

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER_DECODER,
            *_ENCODERS,
        )

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

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
    causal: bool = True
    of_requests: Tensor | None = None
    """Where requests differ: int32 [B], 0 for those that are not causal."""
    ranges: Tensor | None = None
    """int32 [B, n, 2]: first and last positions of image tokens, which see each other."""
    prefix_groups: int | None = None
    masks: dict[Any, MaskMod] = field(default_factory=dict)
    """Made once for all layers that are alike."""


class KernelseamMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Takes a batch as it is. No graph of a whole step is promised to vLLM: its graphs of the
    pieces between attentions go on."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prefix_groups = _prefix_groups(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> KernelseamMetadata:
        """``common_prefix_len`` is always 0 in vLLM: pages that requests share are found in the
        block table where the configuration asks for it."""
        common = common_attn_metadata
        ranges = _ranges(common.mm_req_doc_ranges, common.seq_lens)
        of_requests = None if isinstance(common.causal, bool) else common.causal.int()
        if common.causal is False and ranges is not None:  # which a mask beside ranges has to know
            of_requests = torch.zeros_like(common.seq_lens)
        return KernelseamMetadata(
            common.num_actual_tokens,
            _rounded(common.max_query_len, 1),
            _rounded(common.max_seq_len, 256),
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            common.causal is True,
            of_requests,
            ranges,
            self.prefix_groups,
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
        self.attn_type, self.quantized = attn_type, get_kv_quant_mode(kv_cache_dtype)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.reach = None if sliding_window is None else sliding_window - 1
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
        options: dict[str, Any] = {
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": batch.max_query_len,
            "scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self.slopes,
            "sinks": None if self.sinks is None else self.sinks.float(),
            "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
            "out": output[:tokens],
        }
        if self.attn_type in _ENCODERS:
            attention_varlen(
                query[:tokens],
                key[:tokens],
                value[:tokens],
                cu_seqlens_k=batch.query_start_loc,
                max_seqlen_k=batch.max_query_len,
                causal=False,
                window=self._window(False),
                **options,
            )
            return output
        k, v = self._pages(kv_cache)
        options |= self._visible(layer, batch)
        if self._groups(batch, options):
            options["prefix_groups"] = batch.prefix_groups
        attention_paged(
            query[:tokens],
            k,
            v,
            batch.block_table,
            batch.seq_lens,
            max_seqlen_k=min(batch.max_seq_len, batch.block_table.shape[1] * k.shape[2]),
            kv_layout="hnd",
            **self._scales(layer, kv_cache, batch.seq_lens.shape[0]),
            **options,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys and values [T, H_kv, D] to their slots; padding has −1."""
        if self.attn_type in _ENCODERS:
            return
        rows = slot_mapping.shape[0]
        scales = self._scales(layer, kv_cache, None)
        append_paged(
            key[:rows],
            value[:rows],
            *self._pages(kv_cache),
            slot_mapping=slot_mapping,
            kv_layout="hnd",
            k_scales=scales.get("k_scales"),
            v_scales=scales.get("v_scales"),
        )

    def _window(self, causal: bool) -> tuple[int, int] | None:
        return None if self.reach is None else (self.reach, 0 if causal else self.reach)

    def _visible(self, layer: Any, batch: KernelseamMetadata) -> dict[str, Any]:
        """A causal mask and a window, or where that does not say it a mask_mod."""
        if batch.of_requests is None and batch.ranges is None:
            return {"causal": batch.causal, "window": self._window(batch.causal)}
        clamped = bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))
        if (self.reach, clamped) not in batch.masks:
            batch.masks[self.reach, clamped] = batch_mask(
                batch.query_start_loc,
                batch.seq_lens,
                self.reach,
                causal=batch.of_requests,
                ranges=batch.ranges,
                clamped=clamped,
            )
        return {"causal": False, "mask_mod": batch.masks[self.reach, clamped]}

    @staticmethod
    def _groups(batch: KernelseamMetadata, options: dict[str, Any]) -> bool:
        """Whether shared pages may be read once: not with what ``prefix_groups`` refuses."""
        others = ("window", "alibi_slopes", "mask_mod")
        return (
            batch.prefix_groups is not None
            and options["causal"]
            and not options["batch_invariant"]
            and all(options.get(n) is None for n in others)
        )

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, without the scales behind them."""
        half = kv_cache.shape[-1] // 2 if self._of_tokens else self.head_size
        ends = half + (half - SCALE_BYTES if self._of_tokens else kv_cache.shape[-1] - half)
        pages = kv_cache[..., : self.head_size], kv_cache[..., half:ends]
        if self.quantized == KVQuantMode.NONE:
            return pages
        k, v = (x.view(current_platform.fp8_dtype()) for x in pages)
        return k, v

    @property
    def _of_tokens(self) -> bool:
        return bool(self.quantized == KVQuantMode.FP8_PER_TOKEN_HEAD)

    def _scales(self, layer: Any, kv_cache: Tensor, batch: int | None) -> dict[str, Any]:
        """Of pages of 8 bits: the layer's, repeated over ``batch`` where it is given; or those
        behind each token's and head's values, [pages, H_kv, page size] of the same memory."""
        if self.quantized == KVQuantMode.NONE:
            return {}
        if not self._of_tokens:
            scales = layer._k_scale, layer._v_scale
            if batch is not None:
                scales = tuple(x.expand(batch, self.num_kv_heads) for x in scales)
            return dict(zip(("k_scales", "v_scales"), scales, strict=True))
        words, half = kv_cache.view(torch.float32), kv_cache.shape[-1] // 2 // SCALE_BYTES
        return {
            "k_scales": words[..., half - 1],
            "v_scales": words[..., 2 * half - 1],
            **({} if batch is None else {"scale_block": 1}),
        }


def _prefix_groups(config: Any) -> int | None:
    """vLLM's ``additional_config``: {"kernelseam": {"prefix_groups": n}}."""
    additional = getattr(config, "additional_config", None)
    given = additional.get("kernelseam", {}) if isinstance(additional, dict) else {}
    if unknown := set(given) - {"prefix_groups"}:
        raise InvalidValue(
            "additional_config.kernelseam",
            ", ".join(sorted(unknown)),
            "has prefix_groups only",
            "Leave it out",
        )
    found: int | None = given.get("prefix_groups")
    return found


def _ranges(by_request: dict[int, list[tuple[int, int]]] | None, lengths: Tensor) -> Tensor | None:
    """int32 [B, n, 2], n a power of two: another n is another kernel."""
    most = max(map(len, (by_request or {}).values()), default=0)
    if not by_request or not most:
        return None
    rows = torch.zeros(lengths.shape[0], _rounded(most, 1), 2, dtype=torch.int32)
    for request, ranges in by_request.items():
        if ranges:
            rows[request, : len(ranges)] = torch.tensor(ranges, dtype=torch.int32)
    return rows.to(lengths.device, non_blocking=True)


def _rounded(longest: int, least: int) -> int:
    """To a power of two: a plan is made for each, and lengths grow with every step."""
    return max(least, 1 << max(longest - 1, 0).bit_length())
