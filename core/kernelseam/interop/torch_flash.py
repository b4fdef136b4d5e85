"""Ours as torch's implementation of flash attention: what scaled_dot_product_attention calls where
it chooses that backend. Imports torch, of which 2.11 and later have the hook."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.interop import torch_attention
from kernelseam.ops.attention import attention, attention_paged

Tensor = Any
NAME = "kernelseam"


def register_flash_attention() -> None:
    """Register ours with torch.nn.attention under the name "kernelseam".

    ``torch.nn.attention.activate_flash_attention_impl("kernelseam")`` then puts it in place for the
    accelerator that torch sees, ``restore_flash_attention_impl()`` torch's own again. Raises
    InvalidValue where this torch has no such registry.
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise InvalidValue(
            "torch",
            torch.__version__,
            "has no torch.nn.attention.register_flash_attention_impl",
            "Update it, or call kernelseam.interop.torch.scaled_dot_product_attention",
        )
    register(NAME, register_fn=activate)


@dataclass
class Activated:
    """Holds the registered kernels until ``remove``."""

    library: Any

    def remove(self) -> None:
        """Give torch's own kernels their place back."""
        self.library._destroy()
        self.library = None


def activate(device: str | None = None) -> Activated:
    """Put our kernels in the place of torch's for tensors of a type of device, by default the
    accelerator that torch sees. Raises InvalidValue where there is none."""
    if device is None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise InvalidValue(
                "device",
                None,
                "torch sees no accelerator here",
                "Call kernelseam.interop.torch.scaled_dot_product_attention, which needs none",
            )
        device = accelerator.type
    library, key = torch.library.Library("aten", "IMPL"), torch._C._dispatch_key_for_device(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # it was asked for
        for name, kernel in {
            "_scaled_dot_product_flash_attention": _dense_forward,
            "_scaled_dot_product_flash_attention_backward": _dense_backward,
            "_flash_attention_forward": _forward,
            "_flash_attention_forward_no_dropout_inplace": _forward_into,
            "_flash_attention_backward": _backward,
        }.items():
            library.impl(name, kernel, key)
    return Activated(library)


def _refuse(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p != 0:
        raise InvalidValue("dropout_p", dropout_p, "must be 0", "Drop out outside of the attention")
    if return_debug_mask:
        raise InvalidValue("return_debug_mask", True, "must be False", "Leave it out")


def _auxiliary(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A random state, an offset and a debug mask, none of which is used."""
    state = torch.zeros(2, dtype=torch.uint64, device=like.device)
    return state, torch.zeros((), dtype=torch.uint64, device=like.device), like.new_empty(0)


def _window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    """torch's −1 is no bound."""
    bounds = tuple(None if x is None or x < 0 else x for x in (left, right))
    return None if bounds == (None, None) else (bounds[0], bounds[1])


def _dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Rows [B, H, S, D]; the result lies as query does."""
    _refuse(dropout_p, return_debug_mask)
    with torch.no_grad():
        out, lse = attention(
            query,
            key,
            value,
            causal=is_causal,
            scale=scale,
            out=torch.empty_like(query),
            return_lse=True,
        )
    return out, lse, None, None, query.shape[2], key.shape[2], *_auxiliary(query)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Rows [B, S, H, D], or packed [T, H, D] with offsets; keys in pages with a block table."""
    _refuse(dropout_p, return_debug_mask)
    if num_splits not in (None, 0, 1):
        raise InvalidValue(
            "num_splits", num_splits, "the split is chosen by the device", "Pass 1, or leave it out"
        )
    operands = {"q": query, "k": key, "v": value, "alibi_slopes": alibi_slopes}
    options: dict[str, Any] = {
        "causal": is_causal,
        "scale": scale,
        "window": _window(window_size_left, window_size_right),
        "batch_invariant": num_splits == 1,
        "return_lse": True,
    }
    given = {n: x for n, x in operands.items() if x is not None}
    with torch.no_grad():
        if block_table is not None:
            del given["k"], given["v"]
            pages = {"k_pages": key, "v_pages": value, "block_table": block_table}
            packed = {} if cum_seq_q is None else {"cu_seqlens_q": cum_seq_q, "max_seqlen_q": max_q}
            result = attention_paged(**given, **pages, kv_lengths=seqused_k, **packed, **options)
        elif cum_seq_q is None:
            result = attention(**given, kv_lengths=seqused_k, layout="bshd", **options)
        else:
            if seqused_k is not None:
                raise InvalidValue(
                    "seqused_k", "given", "packed sequences end at their offsets", "Leave it out"
                )
            offsets = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
            longest = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
            result = torch_attention.forward({**given, **offsets}, {**options, **longest})
    return *result, *_auxiliary(query)


def _forward_into(out: Tensor, *operands: Any, **options: Any) -> Tensor:
    result, lse, *_ = _forward(*operands, **options)
    out.copy_(result)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    layout: str = "bshd",
) -> Any:
    _refuse(dropout_p)
    operands = {"q": query, "k": key, "v": value}
    options: dict[str, Any] = {
        "causal": is_causal,
        "scale": scale,
        "window": _window(window_size_left, window_size_right),
    }
    if cum_seq_q is None:
        options["layout"] = layout
    else:
        operands |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
        options |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    with torch.no_grad():
        result = torch_attention.gradients(
            grad_out,
            None,
            operands,
            out,
            logsumexp,
            bias_gradient=False,
            sink_gradient=False,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **options,
        )
    return result.dq, result.dk, result.dv


def _dense_backward(*given: Any, **options: Any) -> Any:
    return _backward(*given, layout="bhsd", **options)
