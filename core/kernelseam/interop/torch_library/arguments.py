"""Arguments of an operator, held to the rules of the functions on arrays before torch converts them
to its schema's types: a schema takes 1 or None for a bool, and torch's refusals name no remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kernelseam.descriptors.attention.options import AttentionOptions
from kernelseam.descriptors.common.options import options_of
from kernelseam.descriptors.common.precision import precision_name
from kernelseam.descriptors.common.validation import extent, flag, number
from kernelseam.descriptors.gemm.fields import scale_block_of
from kernelseam.descriptors.projection.fields import rotation_style
from kernelseam.dispatch import check_name
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import implementation_name, must_be_tensor
from kernelseam.interop.torch_library.dtypes import torch_dtype
from kernelseam.ops.projection import query_heads

Tensor = Any
Rule = Callable[[str, Any], Any]


_BY_KIND: dict[str, Rule] = {
    "bool": flag,
    "float": number,
    "int": extent,
    "SymInt": extent,
    "ScalarType": lambda n, x: torch_dtype(x, n),
    "List[float]": lambda n, x: [float(y) for y in x],
    "List[int]": lambda n, x: scale_block_of(x, True),
    "List[SymInt]": lambda n, x: scale_block_of(x, True),
}
_BY_NAME: dict[str, Rule] = {
    **{n: o.rule for n, o in options_of(AttentionOptions).items() if o.rule is not None},
    "num_heads": query_heads,
    **dict.fromkeys(("num_kv_heads", "head_dim"), lambda n, x: extent(n, x, 1)),
    "rotary_style": rotation_style,
    "precision": precision_name,
    "backend": check_name,
    "implementation": check_name,
    "bwd_implementation": implementation_name,
    "expression": lambda n, x: x,
}


class Arguments:
    """An operator's arguments by its schema; ``rules``: of options that it takes otherwise."""

    def __init__(self, schema: Sequence[Any], rules: Mapping[str, Rule]) -> None:
        self.operands: list[tuple[str, bool]] = []
        """Names, and whether each must be given."""
        self.lists: set[str] = set()
        """Those of operands that are lists of tensors."""
        self.rules: dict[str, tuple[Rule, bool]] = {}
        """Of each option, and whether None is one of its values."""
        self.defaults = {a.name: a.default_value for a in schema if a.kwarg_only}
        for a in schema:
            kind = str(a.real_type)
            optional = kind.startswith("Optional[")
            kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
            if kind in ("Tensor", "List[Tensor]"):
                if kind != "Tensor":
                    self.lists.add(a.name)
                self.operands.append((a.name, not optional))
            else:
                named = None if kind.startswith("List") else _BY_NAME.get(a.name)
                rule = rules.get(a.name) or named or _BY_KIND[kind]
                self.rules[a.name] = (rule, optional)

    def _named(self, tensors: Sequence[Any]) -> Iterator[tuple[str, bool, Any]]:
        """(name, whether it must be given, tensor), of lists for each of theirs."""
        for i, (name, needed) in enumerate(self.operands):
            x = tensors[i] if i < len(tensors) else None
            if name in self.lists and isinstance(x, list | tuple):
                yield from ((f"{name}[{g}]", True, y) for g, y in enumerate(x))
            else:
                yield name, needed, x

    def checked(self, tensors: Sequence[object], options: dict[str, Any]) -> dict[str, Any]:
        """The options, dtypes as torch's own. Raises InvalidValue for an operand that is no tensor
        or on another device than the first, and for an option of another type or outside of its
        range."""
        first: Any = None
        for name, needed, x in self._named(tensors):
            if needed if x is None else not isinstance(x, torch.Tensor):
                raise must_be_tensor(name, x)
            if x is not None:
                first = x if first is None else first
                if x.device != first.device:
                    raise InvalidValue(
                        name,
                        f"a tensor on {x.device}",
                        f"must be on {first.device}, as the others are",
                        f"Move {name}, or the others",
                    )
        result = dict(options)
        for name, x in options.items():
            rule, nullable = self.rules[name]
            if (x is None and nullable) or isinstance(x, _SYMBOLIC):
                continue
            if rule is extent and isinstance(x, int) and torch.compiler.is_dynamo_compiling():
                continue  # perhaps read from a tensor: the operator checks it where it runs
            given = rule(name, x)
            if isinstance(given, torch.dtype):
                result[name] = given
        return result


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that vary from call to call of what is compiled: of the right type."""
