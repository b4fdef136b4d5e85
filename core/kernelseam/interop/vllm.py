"""Ours as an attention backend of vLLM: ``--attention-backend KERNELSEAM``.

vLLM calls ``load`` by the entry point ``vllm.general_plugins`` in each of its processes. vLLM is
imported by ``register`` and never before; nothing else here needs it.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from kernelseam.errors import InvalidValue
from kernelseam.interop.optional_libraries import library

__all__ = ["NAME", "load", "register"]

NAME = "KERNELSEAM"
OLDEST = (0, 32)
TESTED = "0.32.0 and 0.33.0"
_PATH = "kernelseam.interop.vllm_attention.KernelseamBackend"


def register() -> tuple[str, ...]:
    """Register our attention over pages with vLLM under the name "KERNELSEAM", and return the names
    that are registered.

    An engine then takes it by ``--attention-backend KERNELSEAM``, or
    ``LLM(…, attention_backend="KERNELSEAM")``. Installed beside vLLM, kernelseam is registered by
    itself. Registering again changes nothing. Raises InvalidValue where vLLM is missing, older than
    0.32, or has another registry than is known.
    """
    found = library("vllm", OLDEST, TESTED)
    try:
        registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
        if NAME not in registry.AttentionBackendEnum.__members__:
            registry.register_backend(NAME, _PATH)
        known = registry.AttentionBackendEnum[NAME].get_path() == _PATH
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise _unknown(found, str(error)) from error
    if not known:
        raise _unknown(found, "the name is not found again")
    return (NAME,)


def load() -> None:
    """``register``, with a warning in the place of an error: vLLM runs without us."""
    try:
        register()
    except InvalidValue as error:
        warnings.warn(f"vLLM has no backend {NAME}: {error}", stacklevel=2)


def _unknown(found: Any, why: str) -> InvalidValue:
    return InvalidValue(
        "vllm",
        found.__version__,
        f"its registry of attention backends is not the one that is known: {why}",
        f"Install vllm of a tested version: {TESTED}",
    )
