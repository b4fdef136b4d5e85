"""Ours as an attention of Transformers: ``register()``, then ``attn_implementation="kernelseam"``;
and as its experts, ``experts_implementation="kernelseam"``.

Transformers is imported by ``register`` and never before; nothing else here needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from kernelseam.interop.optional_libraries import library

__all__ = ["NAME", "register"]

NAME = "kernelseam"
OLDEST = (4, 57)
TESTED = "4.57.1, 5.17.0 and 5.24.0"


def register() -> tuple[str, ...]:
    """Register our attention, the masks that it takes, and our experts, with Transformers under the
    name "kernelseam", and return the names that are registered.

    A model then takes it by ``attn_implementation="kernelseam"``, when it is loaded or later by
    ``model.set_attn_implementation("kernelseam")``; its experts by ``experts_implementation`` or
    ``model.set_experts_implementation("kernelseam")``, where Transformers has an interface for
    them (5.0 and later). Registering again changes nothing. Raises
    InvalidValue where Transformers is missing or older than 4.57.
    """
    library("transformers", OLDEST, TESTED)
    attention: Any = importlib.import_module("transformers.modeling_utils").AttentionInterface
    masks: Any = importlib.import_module("transformers.masking_utils").AttentionMaskInterface
    ours: Any = importlib.import_module(f"{__package__}.transformers_attention")
    masking: Any = importlib.import_module(f"{__package__}.transformers_mask")
    attention.register(NAME, ours.attention_forward)
    masks.register(NAME, masking.attention_mask)
    if importlib.util.find_spec("transformers.integrations.moe") is not None:
        interface: Any = importlib.import_module("transformers.integrations.moe").ExpertsInterface
        experts: Any = importlib.import_module(f"{__package__}.transformers_experts")
        interface.register(NAME, experts.experts_forward)
    return (NAME,)
