"""Attention's results and gradients on torch tensors that have memory, without torch's graph: what
the autograd functions and the operators share. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kernelseam.descriptors.attention.options import GradientOptions
from kernelseam.descriptors.common.options import scalars_of
from kernelseam.interop.torch_function import with_rows
from kernelseam.ops.attention import DENSE, PACKED
from kernelseam.ops.attention_bwd import (
    CLEARED_GRADIENTS,
    WORDING,
    AttentionGradients,
    gradient_values,
    gradient_work,
    gradients_by,
)
from kernelseam.ops.attention_work import CLEARED_ATTENTION, attention_work
from kernelseam.ops.calling import operate
from kernelseam.ops.fast_path import PLAIN

Tensor = Any
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
_FUNCTIONS = ("score_mod", "mask_mod", "block_mask")
_NONE = (None, None, None)


def forward(
    operands: Mapping[str, Tensor], options: Mapping[str, Any], fills_lse: bool = True
) -> Any:
    """The result, or (result, lse) where the options ask for it. Rows of no sequence are 0, and in
    the LSE −inf: where ``fills_lse``, as gradients do not read them."""
    arrays, given = {**operands}, {**options}
    functions: Any = tuple(map(given.pop, _FUNCTIONS, _NONE))
    where = given.pop("backend", None), given.pop("implementation", None), None
    out = arrays.pop("out", None)
    if "cu_seqlens_q" not in operands:
        return DENSE.call(arrays, given, functions, out, where)
    result: Any = PACKED.call(arrays, given, functions, out, where, CLEARED_ATTENTION)
    if fills_lse and given.get("return_lse"):
        lse = result[1]
        lse.masked_fill_(rows_beyond(lse.shape[1], operands["cu_seqlens_q"]), -torch.inf)
    return result


class Usual(NamedTuple):
    """What a call with options that are plain numbers and names passes on."""

    backend: str | None
    implementation: str | None
    forward: tuple[Any, ...]
    """Values of ``AttentionOptions``, with an LSE."""
    backward: tuple[Any, ...]
    """Values of ``GradientOptions``."""
    bwd_options: dict[str, Any]
    """As ``gradients`` takes them."""

    def result(self, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(result, lse) as ``forward`` returns them, but that an LSE is not filled."""
        work = CLEARED_ATTENTION if "cu_seqlens_q" in operands else attention_work
        where = self.backend, self.implementation, None
        results = operate(work, operands, self.forward, *where, DENSE.wording)
        return results["out"], results["lse"]

    def gradients(
        self, dout: Tensor, operands: dict[str, Tensor], out: Tensor, lse: Tensor
    ) -> dict[str, Tensor] | None:
        """dq, dk and dv; None where the result's gradient is to be converted or copied first."""
        if not dout.dtype is out.dtype is operands["q"].dtype or dout.stride(-1) != 1:
            return None
        work = CLEARED_GRADIENTS if "cu_seqlens_q" in operands else gradient_work
        arrays = {**operands, "out": out, "lse": lse, "dout": dout}
        return operate(work, arrays, self.backward, self.backend, None, None, WORDING)


def usual(options: Mapping[str, Any]) -> Usual | None:
    """Of a call's options, backend and implementation among them."""
    kinds = tuple(map(type, options.values()))
    if not PLAIN.issuperset(kinds):
        return None
    return _usual(tuple(options), tuple(options.values()), kinds)


@lru_cache(256)
def _usual(names: tuple[str, ...], values: tuple[Any, ...], kinds: tuple[type, ...]) -> Usual:
    """``kinds``: as 1 is equal to True."""
    given = dict(zip(names, values, strict=True))
    backend, implementation = given.pop("backend", None), given.pop("implementation", None)
    own = {n: x for n, x in given.items() if n in _OF_GRADIENTS} | {"deterministic": True}
    return Usual(
        backend,
        implementation,
        tuple({**DENSE.defaults, **given, "return_lse": True}.values()),
        gradient_values(**own),
        {**own, "backend": backend, "implementation": None},
    )


_OF_GRADIENTS = frozenset(scalars_of(GradientOptions))


def gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    operands: Mapping[str, Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    bias_gradient: bool,
    sink_gradient: bool,
    implementation: str | None = None,
    **options: Any,
) -> AttentionGradients[Tensor]:
    """Gradients by q, k, v and what else is asked for, given those of the result and of its LSE, of
    which one may be None.

    The LSE's are those of an attention whose values are 0: a pass of its own, by whichever
    implementation is cheapest.
    """
    given = dict(operands)
    if bias_gradient and "bias" in given:
        given["bias"] = _apart(given["bias"])
    asked = {"bias_gradient": bias_gradient, "sink_gradient": sink_gradient, **options}
    parts = []
    if dout is not None:
        kind = given["q"].dtype
        if dout.dtype is not kind:
            dout = dout.to(kind)
        result = out if out.dtype is kind else out.to(kind)
        if dout.stride(-1) != 1:
            dout = with_rows(dout)
        parts.append(_gradients(dout, given, result, lse, asked, implementation))
    if dlse is not None:
        parts.append(_of_lse(dlse, given, out, lse, asked))
    return parts[0] if len(parts) == 1 else AttentionGradients(*map(_sum, *parts))


def _gradients(
    dout: Tensor,
    operands: Mapping[str, Tensor],
    out: Tensor,
    lse: Tensor,
    options: Mapping[str, Any],
    implementation: str | None = None,
) -> AttentionGradients[Tensor]:
    """``attention_bwd``; rows of no sequence are 0. To set all to 0 before takes fewer launches
    than to find these, and less memory traffic than to fill them behind a mask."""
    arrays, given = {**operands, "out": out, "lse": lse}, dict(options)
    work = CLEARED_GRADIENTS if "cu_seqlens_q" in operands else gradient_work
    functions: Any = tuple(map(given.pop, _FUNCTIONS, _NONE))
    asked, where = given.pop("score_gradient", False), (given.pop("backend", None), implementation)
    return gradients_by(work, dout, arrays, functions, asked, (*where, None), **given)


def gradients_ahead(
    operands: Mapping[str, Tensor], options: Mapping[str, Any], bwd_options: Mapping[str, Any]
) -> Callable[[], None]:
    """What compiles the gradients of a dense call: the forward's options, and the gradients'."""
    if operands.keys() != {"q", "k", "v"} or any(options.get(n) is not None for n in _FUNCTIONS):
        return lambda: None
    from kernelseam.ops.gradients_ahead import gradients_ahead

    chosen = bwd_options["deterministic"], bwd_options["implementation"]
    return gradients_ahead(operands, options, *chosen)


def _of_lse(
    dlse: Tensor,
    operands: Mapping[str, Tensor],
    out: Tensor,
    lse: Tensor,
    options: Mapping[str, Any],
) -> AttentionGradients[Tensor]:
    """Gradients of the LSE alone. The gradient of a score is p·(dp − delta), delta = Σ dout·out.
    That of the LSE is p·dlse: dp is 0 where v is, and delta is −dlse where out is 1 and dout is
    −dlse, in two parts where its dtype has fewer bits."""
    q, v = operands["q"], operands["v"]
    if options.get("layout", "bhsd") == "bshd" or "cu_seqlens_q" in operands:
        dlse = dlse.transpose(-1, -2)
    wide = 8  # columns: 16 bytes of halves
    values = v.new_zeros((*v.shape[:-1], wide))
    ones = out.new_zeros((*out.shape[:-1], wide), dtype=q.dtype)
    ones[..., :2] = 1
    high = -dlse.to(q.dtype)
    low = (-dlse - high).to(q.dtype)
    rows = torch.nn.functional.pad(torch.stack((high, low), -1), (0, wide - 2))
    result = _gradients(rows, {**operands, "v": values}, ones, lse, options)
    return result._replace(dv=torch.zeros_like(v, memory_format=torch.contiguous_format))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


def _apart(bias: Tensor) -> Tensor:
    """A bias each of whose elements has a gradient of its own: that of a stride of 0 would be their
    sum."""
    expanded = any(n > 1 and s == 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    return bias.contiguous() if expanded else bias


def rows_beyond(rows: int, offsets: Tensor) -> Tensor:
    """[rows]: which lie before the first sequence or after the last, and are not written. Nothing
    waits for it."""
    row = torch.arange(rows, device=offsets.device)
    return (row < offsets[0]) | (row >= offsets[-1])
