"""Types of the public functions; ``helpers/typed_calls.py`` has what mypy makes of them."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import kernelseam
import pytest
from kernelseam.ops import signatures


def functions() -> dict[str, Callable[..., Any]]:
    found = {
        f"kernelseam.{n}": f
        for n in kernelseam.__all__
        if isinstance(f := getattr(kernelseam, n), types.FunctionType)
    }
    for library in ("torch", "jax"):
        if find_spec(library) is not None:
            interop = importlib.import_module(f"kernelseam.interop.{library}")
            found |= {f"{library}.{n}": getattr(interop, n) for n in interop.__all__}
    return found


# where(…) is what its arguments are: a value that is traced, an array or a number
@pytest.mark.parametrize("name", sorted({*functions()} - {"kernelseam.where"}))
def test_no_public_function_returns_any(name: str) -> None:
    function = functions()[name]
    overloads = typing.get_overloads(function)
    for f in overloads or [function]:
        said = inspect.signature(f).return_annotation
        assert said not in ("Any", inspect.Signature.empty), name


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_functions_are_listed_before_their_library_is_imported(library: str) -> None:
    """For completion in editors and shells."""
    interop = importlib.import_module(f"kernelseam.interop.{library}")
    assert (
        dir(interop) == sorted(" ".join(interop._NAMES.values()).split()) == sorted(interop.__all__)
    )


OVERLOADED = {
    "kernelseam.attention": signatures.Dense,
    "kernelseam.attention_varlen": signatures.Packed,
    "kernelseam.attention_paged": signatures.Paged,
    "kernelseam.fused_qkv_projection": signatures.QkvArrays,
    "torch.attention": signatures.DenseTensors,
    "torch.attention_varlen": signatures.PackedTensors,
    "torch.fused_qkv_projection": signatures.QkvTensors,
    "jax.attention": signatures.DenseJax,
}


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_have_the_parameters_of_the_function(name: str) -> None:
    """Each of them, none more, with the same defaults for those by position and the same types."""
    if name not in functions():
        pytest.skip(f"{name.partition('.')[0]} is not installed")
    function, options = functions()[name], OVERLOADED[name]
    whole = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    assert len(overloads) >= 2
    for f in overloads:
        own = dict(inspect.signature(f).parameters)
        assert own.pop("options").annotation == f"Unpack[{options.__name__}]"
        assert own.keys() | options.__annotations__.keys() == whole.keys()
        assert not own.keys() & options.__annotations__.keys()
        for n, p in own.items():
            assert p.kind == whole[n].kind, n
