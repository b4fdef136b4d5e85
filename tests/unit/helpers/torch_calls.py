"""The public functions on tensors: the plain ones of ``public_calls`` and those of
kernelseam.interop.torch, and values that no option of theirs takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from kernelseam.interop import torch as ks
from public_calls import FUNCTIONS, Arguments, PublicCall, f32

_OF_ARRAYS = ("out", "stream", "beta", "q_scales", "k_scales", "v_scales", "latent")
"""Parameters that the differentiable functions do not have."""


def tensor(x: Any) -> Any:
    """An array as a tensor, in tuples and lists too; what torch has no dtype for as it is."""
    if type(x) is np.ndarray:
        try:
            return torch.from_numpy(x if x.flags.writeable else x.copy())
        except (TypeError, ValueError):
            return x
    return type(x)(map(tensor, x)) if type(x) in (tuple, list) else x


def _of_torch(name: str, plain: str = "", **more: Any) -> PublicCall:
    """A function of kernelseam.interop.torch with the arguments of the plain one."""
    call = getattr(ks, name)
    own = inspect.signature(call).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in own.values())

    def arguments() -> Arguments:
        given = FUNCTIONS[plain or name].arguments()
        taken = {n: x for n, x in given.items() if n in own or (open_ended and n not in own)}
        for n in ("out", "stream"):
            taken.pop(n, None)
        defaults = {n: p.default for n, p in own.items() if p.default is not p.empty}
        return {**defaults, **taken, **more}

    return PublicCall(call, arguments)


def _sdpa() -> Arguments:
    q, k = f32(2, 4, 5, 8), f32(2, 2, 6, 8)
    return {
        "query": q,
        "key": k,
        "value": k.copy(),
        "attn_mask": np.ones((2, 1, 5, 1), bool),
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": True,
    }


def _on_tensors(public: PublicCall) -> PublicCall:
    def call(**arguments: Any) -> Any:
        return public.call(**{n: tensor(x) for n, x in arguments.items()})

    return PublicCall(call, public.arguments, names=public.names)


INTEROP = {
    f"torch.{name}": _on_tensors(public)
    for name, public in {
        **{n: _of_torch(n) for n in ks.__all__ if n in FUNCTIONS},
        "fused_qkv_projection paged": _of_torch(
            "fused_qkv_projection", "fused_qkv_projection paged"
        ),
        "scaled_dot_product_attention": PublicCall(ks.scaled_dot_product_attention, _sdpa),
    }.items()
}
PLAIN = {name: _on_tensors(public) for name, public in FUNCTIONS.items()}

CALLS = {**PLAIN, **INTEROP}


def arguments_of(name: str) -> Arguments:
    """Right ones, as tensors."""
    given = {n: tensor(x) for n, x in CALLS[name].arguments().items()}
    # traced calls make new gradients
    return {**given, "da": None, "db": None, "beta": 0.0} if "da" in given else given


Wrong = tuple[Any, ...]
_FLAGS = (
    *("causal", "return_lse", "batch_invariant", "latent", "a_transposed", "b_transposed"),
    *("deterministic", "bias_gradient", "sink_gradient", "a_gradient", "b_gradient"),
    *("sum_repeats", "has_bias", "input_gradient", "weight_gradient", "is_causal", "enable_gqa"),
)
_COUNTS = (
    *("max_seqlen_q", "max_seqlen_k", "num_heads", "num_kv_heads", "head_dim"),
    *("first_position", "q_scale_block", "scale_block"),
)
OPTIONS: dict[str, Wrong] = {
    **dict.fromkeys(_FLAGS, (1, "no", None)),
    **dict.fromkeys(("scale", "softcap", "alpha", "beta", "dropout_p"), ("x", True, (1,))),
    **dict.fromkeys(_COUNTS, (2.5, "x", -1)),
    **dict.fromkeys(("layout", "kv_layout", "rotary_style", "precision"), (3, "", "other")),
    **dict.fromkeys(("backend", "implementation", "bwd_implementation"), (3, "", "nobody")),
    **dict.fromkeys(("out_dtype", "bias_dtype"), ("", "int8", torch.int8)),
    "window": (3, (1,), (2.5, 1)),
}
"""Values of each option that are refused."""
Spoil = Callable[[Any], Any]
OPERANDS: tuple[Spoil, ...] = (
    lambda x: x[None],
    lambda x: x.double() if x.dtype == torch.float32 else x.float(),
    lambda x: 3.0,
)
"""What makes an operand one that is refused: another rank, another dtype, no tensor."""
