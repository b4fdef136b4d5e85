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

    Tokens are sorted by expert in numbers alone: the first projection gathers its rows, the second
    scatters its results, times the router's weights, so that those of a token lie together. Both
    are one launch each, whose sizes the host does not learn. An index of ``num_experts`` or more is
    no expert here (expert parallelism): its rows come behind the last group, are not computed, and
    count as 0.
    """
    tokens, chosen = top_k_index.shape
    experts, weights = top_k_index.reshape(-1), top_k_weights.reshape(-1)
    ordered, order = torch.sort(experts)
    numbers = torch.arange(self.num_experts, device=experts.device, dtype=ordered.dtype)
    offs = torch.searchsorted(ordered, numbers, right=True, out_int32=True)

    def linear(x: Tensor, name: str, experts: Tensor, **rows: Tensor) -> Tensor:
        weight = getattr(self, name)
        matrices = weight if self.is_transposed else weight.mT
        y = grouped_mm(x.to(weight.dtype), matrices, offs, **rows)
        absent = None
        if getattr(self, "_is_expert_parallel", False):
            absent = (experts >= self.num_experts).unsqueeze(-1)
            experts = experts.clamp(max=self.num_experts - 1)
        if self.has_bias:
            y = y + getattr(self, f"{name}_bias")[experts]
        return y if absent is None else y.masked_fill(absent, 0)

    taken = torch.div(order, chosen, rounding_mode="floor").int()
    if self.has_gate:
        x = self._apply_gate(linear(hidden_states, "gate_up_proj", ordered, a_indices=taken))
    else:
        x = self.act_fn(linear(hidden_states, "up_proj", ordered, a_indices=taken))
    places = {"out_indices": order.int()}
    if self.has_bias or getattr(self, "has_post_expert_norm", False):  # come before the weights
        x = linear(x, "down_proj", experts, **places)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x)
        x = x * weights.unsqueeze(-1)
    else:
        x = linear(x, "down_proj", experts, out_factors=weights[order].float(), **places)
    result = x.view(tokens, chosen, -1).sum(dim=1, dtype=torch.float32)
    return result.to(hidden_states.dtype)
