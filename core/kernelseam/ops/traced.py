"""Calls that torch traces, handed over to operators that torch knows.

Where torch compiles, exports or transforms a function, its tensors stand for others and have no
memory: nothing can be described or launched. What takes their part is registered from above, by
``register``; nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kernelseam.errors import InvalidValue

Operator = Callable[..., dict[str, Any]]
"""``operator(arrays, options, backend, implementation)``: the results by their names, as
``calling.operate`` returns them."""

_operators: Callable[[], Mapping[Any, Operator]] | None = None


def register(operators: Callable[[], Mapping[Any, Operator]]) -> None:
    """Name what loads the operators, by the function that works the call out; it is asked at the
    first traced call."""
    global _operators
    _operators = operators


def hand_over(
    work: Callable[..., None],
    arrays: Mapping[str, Any],
    options: tuple[Any, ...],
    backend: str | None,
    implementation: str | None,
    stream: object,
    wording: object = None,
) -> dict[str, Any]:
    """What ``calling.operate`` does, by one of torch's operators. Raises InvalidValue where there
    is none, and for a stream."""
    operator = None if _operators is None else _operators().get(work)
    if operator is None:
        raise InvalidValue(
            "torch",
            "traced",
            "this function has no operator that torch can trace",
            "Call it outside of what is compiled, exported or transformed",
        )
    if stream is not None:
        raise InvalidValue(
            "stream",
            "given",
            "a traced call runs on the stream that is current when it runs",
            "Leave it out, and use torch.cuda.stream(…)",
        )
    return operator(arrays, options, backend, implementation)


def stands_for_others(arrays: Iterable[object]) -> bool:
    """Whether some array is a tensor without memory of its own: of a class that dispatches for
    itself (fake, functional, distributed ones) or of a transform of torch.func; or whether all are
    on torch's device "meta"."""
    torch: Any = sys.modules.get("torch")
    plain: Any = getattr(torch, "Tensor", None)
    if plain is None:
        return False
    meta = True
    for x in arrays:
        if not isinstance(x, plain):
            meta = False
            continue
        if type(x).__torch_dispatch__ is not plain.__torch_dispatch__:
            return True
        meta = meta and x.is_meta
    return meta or torch._C._functorch.peek_interpreter_stack() is not None
