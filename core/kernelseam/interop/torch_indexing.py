"""How torch indexes captured tensors where it calls a user's function itself. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Tensor = Any


class AsKernelsIndex(TorchFunctionMode):  # type: ignore[misc]
    """Indices mean what they mean in a trace (``expressions.evaluation.place``): they are of one
    element, also one by one (x[h][i]); negative ones count from the end, and others outside of the
    tensor are moved to its last element, where torch raises IndexError, or on a GPU loses the
    context. Slices, which no trace has, stay torch's."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__getitem__ and _is_of_elements(args[1]):
            return _Indexed(args[0])[args[1]]
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Indexed:
    of: Tensor
    at: tuple[Any, ...] = ()

    def __getitem__(self, more: Any) -> Any:
        at = (*self.at, *(more if isinstance(more, tuple) else (more,)))
        if len(at) < self.of.ndim:
            return _Indexed(self.of, at)
        return self.of[tuple(_place(i, n) for i, n in zip(at, self.of.shape, strict=True))]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.of.shape[len(self.at) :])

    def __len__(self) -> int:
        return self.shape[0]


def _is_of_elements(at: Any) -> bool:
    each = at if isinstance(at, tuple) else (at,)
    return not any(isinstance(i, slice) or i is None or i is Ellipsis for i in each)


def _place(index: Any, extent: int) -> Tensor:
    i = torch.as_tensor(index).long()
    return torch.where(i < 0, i + extent, i).clamp(0, extent - 1)
