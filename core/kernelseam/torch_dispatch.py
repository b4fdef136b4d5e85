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
    """What ``calling.operate`` does, by one of torch's operators. Raises InvalidValue for a
    stream."""
    if stream is not None:
        raise InvalidValue(
            "stream",
            "given",
            "a traced call runs on the stream that is current when it runs",
            "Leave it out, and make the stream torch's current one",
        )
    assert _operators is not None  # the package registers them
    return _operators()[work](arrays, options, backend, implementation)


def operator_of(name: str) -> Any:
    """What takes a function's part while torch compiles its caller."""
    assert _operators is not None  # the package registers them
    return _operators()[name]


def recorded(arrays: Iterable[object]) -> bool:
    """Whether torch follows each operation on these tensors, though they have memory: a dispatch
    mode is active (to count, checkpoint or fake operations), or torch.jit.trace records."""
    torch: Any = sys.modules.get("torch")
    tensor: Any = getattr(torch, "Tensor", None)
    if tensor is None or not _is_followed(torch):
        return False
    return all(isinstance(x, tensor) and not x.is_nested for x in arrays)


def _is_followed(torch: Any) -> bool:
    modes: int = torch._C._len_torch_dispatch_stack()
    return modes > 0 or torch._C._get_tracing_state() is not None


def stands_for_others(arrays: Iterable[object]) -> bool:
    """Whether tensors have no memory because torch traces the call: under a transform of
    torch.func, in a backward of batched gradients (``is_grads_batched``), with all arrays on
    torch's device "meta", or of classes that dispatch for themselves (fake and functional tensors),
    all of them or under a mode that takes care of the rest. A DTensor stands for its
    shards. Nested tensors stand for themselves."""
    torch: Any = sys.modules.get("torch")
    plain: Any = getattr(torch, "Tensor", None)
    given = list(arrays)
    tensors: list[Any] = [x for x in given if plain is not None and isinstance(x, plain)]
    if not tensors or any(x.is_nested for x in tensors):
        return False
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None:
        return True
    if any(map(functorch.is_legacy_batchedtensor, tensors)):
        return True
    if len(tensors) == len(given) and all(x.is_meta for x in tensors):
        return True
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if any(isinstance(x, dtensor) for x in tensors):
        return True
    dispatching = [type(x).__torch_dispatch__ is not plain.__torch_dispatch__ for x in tensors]
    return all(dispatching) or (any(dispatching) and torch._C._len_torch_dispatch_stack() > 0)
