"""Experts as Transformers' experts interface has them, by grouped products. Imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernelseam import epilogues
from kernelseam.epilogues import Activation, Epilogue
from kernelseam.interop.torch_grouped import grouped_mm

Tensor = Any


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What a module of experts gives for ``hidden_states`` [tokens, hidden], each token that of its
    experts ``top_k_index`` [tokens, k] times ``top_k_weights`` [tokens, k], summed in float32.

    Tokens are sorted by expert in numbers alone: the first projection gathers its rows and applies
    the gate, the second scatters its results, times the router's weights, so that those of a token
    lie together. Both are one launch each, whose sizes the host does not learn. An index of
    ``num_experts`` or more is no expert here (expert parallelism): its rows come behind the last
    group, are not computed, and count as 0.

    A gate is applied by torch, behind the first projection, where it is the module's own, where its
    activation has no epilogue (``_ACTIVATIONS``), where a bias within it wants a gradient, which
    operators cannot give, and in float64, whose epilogues devices do not compute.
    """
    tokens, chosen = top_k_index.shape
    experts, weights = top_k_index.reshape(-1), top_k_weights.reshape(-1)
    ordered, order = torch.sort(experts)
    numbers = torch.arange(self.num_experts, device=experts.device, dtype=ordered.dtype)
    offs = torch.searchsorted(ordered, numbers, right=True, out_int32=True)

    def linear(
        x: Tensor, name: str, experts: Tensor, epilogue: Epilogue | None = None, **rows: Tensor
    ) -> Tensor:
        """With its bias, which an epilogue adds itself."""
        weight = getattr(self, name)
        matrices = weight if self.is_transposed else weight.mT
        y = grouped_mm(x.to(weight.dtype), matrices, offs, epilogue=epilogue, **rows)
        absent = None
        if getattr(self, "_is_expert_parallel", False):
            absent = (experts >= self.num_experts).unsqueeze(-1)
            experts = experts.clamp(max=self.num_experts - 1)
        if self.has_bias and epilogue is None:
            y = y + getattr(self, f"{name}_bias")[experts]
        return y if absent is None else y.masked_fill(absent, 0)

    first = "gate_up_proj" if self.has_gate else "up_proj"
    taken = torch.div(order, chosen, rounding_mode="floor").int()
    epilogue = _epilogue(self, first)
    x = linear(hidden_states, first, ordered, epilogue, a_indices=taken)
    if epilogue is None:
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
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


def _relu_squared(x: Any) -> Any:
    return epilogues.relu(x) * epilogues.relu(x)


_ACTIVATIONS: dict[str, Activation] = {
    "GELUActivation": epilogues.gelu,
    "GELUTanh": epilogues.gelu_tanh,
    "NewGELUActivation": epilogues.gelu_tanh,
    "QuickGELUActivation": epilogues.quick_gelu,
    "ReLU": epilogues.relu,
    "ReLUSquaredActivation": _relu_squared,
    "SiLU": epilogues.silu,
    "SiLUActivation": epilogues.silu,
}
"""By the names of Transformers' and torch's modules."""


def _epilogue(module: Any, name: str) -> Epilogue | None:
    """What makes of the first projection, ``name``, the input of the second; None where it is
    torch's to do."""
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
    gate = getattr(type(module), "_apply_gate", None)
    # that of Transformers' interface: halves of the columns, activation(gate)·up
    if module.has_gate and getattr(gate, "__name__", "") != "_default_apply_gate":
        return None
    if activation is None or getattr(module, name).dtype == torch.float64:
        return None
    if not module.has_bias:
        own = partial(_gate if module.has_gate else _plain, activation)
        return epilogues.gated(own) if module.has_gate else own
    bias = getattr(module, f"{name}_bias")
    if bias.requires_grad and torch.is_grad_enabled():
        return None
    if not module.has_gate:
        return partial(_biased, activation, bias)
    return epilogues.gated(partial(_biased_gate, activation, *bias.chunk(2, -1)))


# Functions of the module, whose partials torch's compiler reads.


def _plain(activation: Activation, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return activation(acc)


def _biased(activation: Activation, bias: Any, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return activation(acc + bias[batch, n])


def _gate(activation: Activation, gate: Any, up: Any, m: Any, n: Any, batch: Any) -> Any:
    return activation(gate) * up


def _biased_gate(
    activation: Activation, of_gate: Any, of_up: Any, gate: Any, up: Any, m: Any, n: Any, batch: Any
) -> Any:
    return activation(gate + of_gate[batch, n]) * (up + of_up[batch, n])
