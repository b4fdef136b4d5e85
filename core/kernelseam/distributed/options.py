"""Options of distributed attentions: attention's own, and those of where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.descriptors.attention.options import (
    ResultOptions,
    ScoreNumbers,
    ScoreOperands,
    ScoreScalars,
)
from kernelseam.descriptors.common.options import options_of, scalar, scalars_of
from kernelseam.descriptors.common.validation import flag
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

SAME_EVERYWHERE = ("scale", "softcap")
"""Numbers of scores that do not depend on where a query and a key lie: the calls of a plan, each of
which has a part of both, take them as they are."""


@dataclass(frozen=True, kw_only=True)
class DistributedOptions(ResultOptions, ScoreOperands, ScoreScalars):
    """What the distributed attentions take beside q, k, v and the group."""

    out_dtype: Any = scalar(None, None, "The result's dtype. [q's]")
    deterministic: bool = scalar(True, flag, "The same gradients every time.")
    backend: str | None = scalar(None, None, "Of the tensors' device.")
    implementation: str | None = scalar(None, None, "That of every call.")
    bwd_implementation: str | None = scalar(None, None, "That of every call of the gradients.")


def shared(options: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of scores that every call takes alike, checked. Raises InvalidValue, for others
    too."""
    known = options_of(DistributedOptions)
    for name in scalars_of(ScoreNumbers):
        if name not in SAME_EVERYWHERE and options[name] is not None:
            raise InvalidValue(
                name,
                options[name],
                "depends on where queries and keys lie, and ranks hold parts of them",
                "Call kernelseam.attention on one device",
            )
    return {n: known[n].checked(options[n]) for n in SAME_EVERYWHERE}
