"""Experts as Transformers' experts interface has them, by grouped products. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.interop.torch_grouped import grouped_mm

Tensor = Any


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What a module of experts gives for ``hidden_states`` [tokens, hidden], each token that of its
    experts ``top_k_index`` [tokens, k] times ``top_k_weights`` [tokens, k], summed in float32.

    Tokens are sorted by expert, and both projections are one launch each, whose sizes the host does
    not learn. An index of ``num_experts`` or more is no expert here (expert parallelism): its rows
    come behind the last group, are not computed, and count as 0.
    """
    tokens, chosen = top_k_index.shape
    experts = top_k_index.reshape(-1)
    ordered, order = torch.sort(experts)
    numbers = torch.arange(self.num_experts, device=experts.device, dtype=ordered.dtype)
    offs = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    absent = None
    if getattr(self, "_is_expert_parallel", False):
        absent = (ordered >= self.num_experts).unsqueeze(-1)
        ordered = ordered.clamp(max=self.num_experts - 1)

    def linear(x: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        y = grouped_mm(x.to(weight.dtype), weight if self.is_transposed else weight.mT, offs)
        if self.has_bias:
            y = y + getattr(self, f"{name}_bias")[ordered]
        return y if absent is None else y.masked_fill(absent, 0)

    x = hidden_states[order // chosen]
    if absent is not None:
        x = x.masked_fill(absent, 0)  # and so its gradient, which is undefined there
    if self.has_gate:
        x = self._apply_gate(linear(x, "gate_up_proj"))
    else:
        x = self.act_fn(linear(x, "up_proj"))
    x = linear(x, "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    x = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    result = x[places].view(tokens, chosen, -1).sum(dim=1)
    return result.to(hidden_states.dtype)
