"""Layers for the ``kernelize`` of Hugging Face's kernels: each is a forward alone, for modules that
have the parameters.

What ``kernelize`` may put in place of a module's forward has no constructor and no other members.
"""

from __future__ import annotations

from kernelseam.interop.torch import matmul2d
from kernelseam.interop.transformers_experts import experts_forward
from torch import Tensor, nn


class Experts(nn.Module):  # type: ignore[misc]
    """Experts as Transformers has them: ``gate_up_proj``, ``down_proj``, ``act_fn``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] → [tokens,
        hidden]: see ``kernelseam.interop.transformers_experts``."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class Linear(nn.Module):  # type: ignore[misc]
    """torch.nn.Linear."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] → [..., out_features]."""
        rows = input.reshape(-1, input.shape[-1])
        out = matmul2d(rows, self.weight, b_transposed=True, bias=self.bias)
        return out.reshape(*input.shape[:-1], self.weight.shape[0])
