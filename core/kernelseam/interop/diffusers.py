"""Ours as an attention of diffusers: ``register()``, then
``model.set_attention_backend("kernelseam")``.

diffusers is imported by ``register`` and never before; nothing else here needs it.
"""

from __future__ import annotations

import importlib
from enum import Enum
from typing import Any

from kernelseam.errors import InvalidValue
from kernelseam.interop.optional_libraries import library

__all__ = ["NAME", "register"]

NAME = "kernelseam"
OLDEST = (0, 42)
TESTED = "0.42.1"


def register() -> tuple[str, ...]:
    """Register our attention with diffusers' dispatcher under the name "kernelseam", and return the
    names that are registered.

    A model then takes it by ``model.set_attention_backend("kernelseam")``, a block of code by
    ``diffusers.models.attention_dispatch.attention_backend("kernelseam")``. The dispatcher's names
    are a closed enumeration: a member is added to it. Registering again changes
    nothing. Raises InvalidValue where diffusers is missing, older than 0.42, or has another
    dispatcher than is known.
    """
    found = library("diffusers", OLDEST, TESTED)
    dispatcher: Any = importlib.import_module("diffusers.models.attention_dispatch")
    try:
        names, registry = dispatcher.AttentionBackendName, dispatcher._AttentionBackendRegistry
        name = _member(names)
        constraints = [dispatcher._check_device, dispatcher._check_shape]
        ours: Any = importlib.import_module(f"{__package__}.diffusers_attention")
        registry.register(name, constraints=constraints)(ours.attention)
        registry._supported_arg_names[name] = _Every(registry._supported_arg_names[name])
        known = names(NAME) is name and registry._backends[name] is ours.attention
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unknown(found, str(error)) from error
    if not known:
        raise _unknown(found, "the name is not found again")
    return (NAME,)


class _Every(set[str]):
    """Names of options that the dispatcher hands over and does not drop: all of them, which the
    attention takes or refuses."""

    def __contains__(self, name: object) -> bool:
        return True


def _member(names: Any) -> Any:
    """The enumeration's member of our name, added at the first call."""
    if NAME in names.__members__.values():
        return names(NAME)
    if not (issubclass(names, str) and issubclass(names, Enum)):
        raise TypeError("AttentionBackendName is no enumeration of str")
    member = str.__new__(names, NAME)
    member._name_, member._value_, member.__objclass__ = NAME.upper(), NAME, names
    member._sort_order_ = len(names)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    return member


def _unknown(found: Any, why: str) -> InvalidValue:
    return InvalidValue(
        "diffusers",
        found.__version__,
        f"its attention dispatcher is not the one that is known: {why}",
        f"Install diffusers {TESTED}, which is tested",
    )
