"""Attention's options, which are defined once and named by several public functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, get_type_hints

import kernelseam
import pytest
from kernelseam.errors import InvalidValue
from kernelseam.ops import attention as ops
from kernelseam.ops import signatures
from kernelseam.ops.attention_options import PAGED, GradientOptions, Options


def functions() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Functions, and the options with the defaults that they have."""
    found: dict[str, tuple[Callable[..., Any], Any]] = {
        "attention": (kernelseam.attention, Options()),
        "attention_varlen": (kernelseam.attention_varlen, Options()),
        "attention_paged": (kernelseam.attention_paged, PAGED),
        "attention_bwd": (kernelseam.attention_bwd, GradientOptions()),
    }
    if find_spec("torch") is not None:
        from kernelseam.interop import torch as ks

        found["torch.attention"] = ks.attention, Options()
        found["torch.attention_varlen"] = ks.attention_varlen, Options()
    if find_spec("jax") is not None:
        from kernelseam.interop import jax as ks_jax

        found["jax.attention"] = ks_jax.attention, Options()
    return found


ARRAYS = {
    *("bias", "mask", "alibi_slopes", "sinks", "prefix_lengths"),
    *("q_scales", "k_scales", "v_scales"),
    *("kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "out"),
}
WAYS = {"backend", "implementation", "bwd_implementation", "stream", "deterministic"}


@pytest.mark.parametrize("name", functions())
def test_functions_name_the_options_with_their_types_and_defaults(name: str) -> None:
    function, options = functions()[name]
    types = get_type_hints(type(options))
    annotated = get_type_hints(function)
    for n, p in inspect.signature(function).parameters.items():
        if n not in types:
            # by position: an operand
            assert p.kind is p.POSITIONAL_OR_KEYWORD or n in ARRAYS | WAYS, n
        elif p.default is not p.empty:
            assert p.default == getattr(options, n), n
            if n != "out_dtype":  # other libraries have dtypes of their own
                assert annotated[n] == types[n], n


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_paged"])
def test_values_are_handed_on_in_the_order_of_the_options(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By position, in a plain tuple."""
    function, defaults = functions()[name]
    own = inspect.signature(function).parameters
    given = {n: f"the {n}" for n in Options._fields if n in own and n != "return_lse"}
    given["window"] = (1, 2)
    handed: list[Any] = []

    def operate(work: Any, arrays: Any, values: Any, *rest: Any) -> dict[str, Any]:
        handed.append((work, values))
        return {"out": None}

    monkeypatch.setattr(ops, "operate", operate)
    needed = [n for n, p in own.items() if p.default is p.empty and n not in given]
    assert function(*[n for n in needed if n != "return_lse"], **given) is None
    ((work, values),) = handed
    assert work is ops.attention_work and type(values) is tuple
    assert Options(*values) == defaults._replace(**given)


def test_every_option_is_some_functions() -> None:
    known = functions()
    taken = set().union(
        *(inspect.signature(known[n][0]).parameters for n in known if n.startswith("attention"))
    )
    assert taken > set(Options._fields) | set(GradientOptions._fields)
    # what gradients need not know: a new option must be put into one of the two
    assert set(Options._fields) - set(GradientOptions._fields) == {
        *("out_dtype", "return_lse", "batch_invariant", "latent", "kv_layout"),
        *("q_scale_block", "scale_block"),
    }


def test_torchs_operators_take_every_option() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from kernelseam.interop.torch_library import attention

    for names, operator in (
        (attention.FORWARD_DENSE, "attention"),
        (attention.FORWARD_VARLEN, "attention_varlen"),
        (attention.PAGED, "attention_paged"),
    ):
        # a window is given by its sides; latent keys only allow what an operator does not do
        lacking = set(Options._fields) - attention.TAKEN[names] - {"window", "latent"}
        own = set(inspect.signature(getattr(kernelseam, operator)).parameters)
        assert not lacking & own, operator


def test_options_are_typed_where_overloads_name_them() -> None:
    for taken in (signatures.Dense, signatures.Packed, signatures.Paged, signatures.DenseJax):
        types = get_type_hints(taken)
        for n, kind in get_type_hints(Options).items():
            if n in types and types[n] is not Any:
                assert types[n] == kind, (taken.__name__, n)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("causal", 1, "causal = 1: must be True or False. "),
        ("latent", None, "latent = None: "),
        ("scale", "x", "scale = x: "),
        ("scale_block", 0, "scale_block = 0: "),
        ("layout", "sbhd", "layout = sbhd: must be one of "),
        ("kv_layout", None, "kv_layout = None: must be one of "),
        ("window", (1,), "window = "),
    ],
)
def test_options_that_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Options()._replace(**{option: value}).of_descriptor()
    assert str(caught.value).startswith(message)
