"""Attention's options, which are defined once and named by several public functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any, get_type_hints

import kernelseam
import numpy as np
import pytest
from kernelseam.descriptors import Attention, AttentionPointers
from kernelseam.descriptors.attention.options import (
    PAGED,
    AttentionOptions,
    GradientOptions,
    ScoreOperands,
    ScoreScalars,
)
from kernelseam.descriptors.common.options import (
    as_values,
    of_values,
    options_of,
    scalars_of,
    values_of,
)
from kernelseam.descriptors.gemm.options import (
    GroupedOptions,
    ProductGradientOptions,
    ProductOptions,
)
from kernelseam.descriptors.projection.options import OutputOptions, QkvOptions
from kernelseam.ops import attention as ops
from kernelseam.ops import signatures


def functions() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Functions, and the options with the defaults that they have."""
    found: dict[str, tuple[Callable[..., Any], Any]] = {
        "attention": (kernelseam.attention, AttentionOptions()),
        "attention_varlen": (kernelseam.attention_varlen, AttentionOptions()),
        "attention_paged": (kernelseam.attention_paged, PAGED),
        "attention_bwd": (kernelseam.attention_bwd, GradientOptions()),
        "bmm": (kernelseam.bmm, ProductOptions()),
        "matmul2d": (kernelseam.matmul2d, ProductOptions()),
        "grouped_mm": (kernelseam.grouped_mm, GroupedOptions()),
        "bmm_bwd": (kernelseam.bmm_bwd, ProductGradientOptions()),
        "matmul2d_bwd": (kernelseam.matmul2d_bwd, ProductGradientOptions()),
        "fused_qkv_projection": (kernelseam.fused_qkv_projection, QkvOptions()),
        "fused_output_projection_residual": (
            kernelseam.fused_output_projection_residual,
            OutputOptions(),
        ),
    }
    if find_spec("torch") is not None:
        from kernelseam.interop import torch as ks

        found["torch.attention"] = ks.attention, AttentionOptions()
        from kernelseam import distributed
        from kernelseam.distributed.options import DistributedOptions

        found["distributed.attention"] = distributed.attention, DistributedOptions()
        found["distributed.attention_varlen"] = distributed.attention_varlen, DistributedOptions()
        found["distributed.attention_paged"] = distributed.attention_paged, PAGED
        found["torch.attention_varlen"] = ks.attention_varlen, AttentionOptions()
    if find_spec("jax") is not None:
        from kernelseam.interop import jax as ks_jax

        found["jax.attention"] = ks_jax.attention, AttentionOptions()
    return found


EXECUTION = {"backend", "implementation", "bwd_implementation", "stream", "deterministic", "out"}
SHARDED = {"group", "method", "order", "check"}
OF_PRODUCTS = {
    *("bias", "residual", "a_scales", "b_scales", "da", "db"),
    *("rotary", "positions", "k_pages", "v_pages", "block_table"),
    *("slot_mapping", "kv_lengths", "cu_seqlens_q", "k_scales", "v_scales"),
    *("a_indices", "out_indices", "out_factors", "preactivation"),
}
"""Operands of products and projections that are given by name."""
FUNCTIONS = {"score_mod", "mask_mod", "block_mask", "score_gradient", "epilogue"}
"""Beside the record: an expression is made of them, and operands of what they capture."""


@pytest.mark.parametrize("name", functions())
def test_functions_name_the_options_with_their_types_and_defaults(name: str) -> None:
    function, record = functions()[name]
    known = options_of(type(record))
    annotated = get_type_hints(function)
    others = EXECUTION | FUNCTIONS | SHARDED | OF_PRODUCTS
    for n, p in inspect.signature(function).parameters.items():
        if n not in known or p.default is p.empty:
            # by position: an operand
            assert p.kind is p.POSITIONAL_OR_KEYWORD or n in others, n
            continue
        assert p.default == getattr(record, n), n
        if not known[n].is_operand and n != "out_dtype":  # other libraries have dtypes of their own
            assert annotated.get(n, p.annotation) == known[n].type, n


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_paged"])
def test_every_option_of_a_function_is_handed_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, defaults = functions()[name]
    own = inspect.signature(function).parameters
    without = EXECUTION | FUNCTIONS | {"return_lse"}
    given: dict[str, Any] = {n: f"the {n}" for n in own if n not in without}
    given["window"] = (1, 2)
    handed: list[Any] = []

    def operate(work: Any, arrays: Any, values: Any, *rest: Any) -> dict[str, Any]:
        handed.append((work, arrays, values))
        return {"out": None}

    monkeypatch.setattr(ops, "operate", operate)
    assert function(**given) is None
    ((work, arrays, values),) = handed
    assert work is ops.attention_work and type(values) is tuple
    scalars = {n: x for n, x in given.items() if n in scalars_of(AttentionOptions)}
    assert of_values(AttentionOptions, values) == replace(defaults, **scalars)
    operands = {n.removesuffix("_pages"): x for n, x in given.items() if n not in scalars}
    assert arrays == operands


def test_every_option_is_some_functions() -> None:
    known = functions()
    named = [n for n in known if n.startswith("attention")]
    taken = set().union(*(inspect.signature(known[n][0]).parameters for n in named))
    assert taken >= {*options_of(AttentionOptions), *options_of(GradientOptions)}


def test_gradients_take_what_changes_scores() -> None:
    own = {"bias_gradient", "sink_gradient", "deterministic", "layout"}
    packed = {"max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "cu_seqlens_k"}
    scores = {*options_of(ScoreScalars), *options_of(ScoreOperands)}
    assert {*options_of(GradientOptions)} == scores | own | packed
    assert inspect.signature(kernelseam.attention_bwd).parameters.keys() >= {
        *options_of(GradientOptions)
    }


@pytest.mark.parametrize("descriptor", [Attention, AttentionPointers])
def test_descriptors_have_the_options_as_fields(descriptor: type) -> None:
    own = {f.name: f for f in fields(descriptor)}
    for record in (ScoreScalars, ScoreOperands):
        for n, option in options_of(record).items():
            assert own[n].default == option.default and own[n].kw_only
            assert own[n].repr is not option.is_operand, "an array's numbers are no one's repr"


def test_torchs_operators_take_every_option() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from kernelseam.interop.torch_library import attention

    for names, operator in (
        (attention.FORWARD_DENSE, "attention"),
        (attention.FORWARD_VARLEN, "attention_varlen"),
        (attention.PAGED, "attention_paged"),
    ):
        # a window is given by its sides; latent keys only allow what an operator does not do
        lacking = set(options_of(AttentionOptions)) - attention.TAKEN[names] - {"window", "latent"}
        own = set(inspect.signature(getattr(kernelseam, operator)).parameters)
        assert not lacking & own, operator


def test_options_are_typed_where_overloads_name_them() -> None:
    takers = (signatures.Dense, signatures.Packed, signatures.Paged, signatures.DenseJax)
    for taken in (*takers, signatures.Gradients):
        record = GradientOptions if taken is signatures.Gradients else AttentionOptions
        types, known = get_type_hints(taken), options_of(record)
        assert types.keys() >= {*options_of(ScoreScalars)}, taken
        for n, option in known.items():
            if n in types and types[n] is not Any:
                assert types[n] == option.type, (taken.__name__, n)


def test_values_are_found_again_by_name() -> None:
    values = values_of(AttentionOptions, "called")
    given = values(softcap=3.0, causal=True)
    assert of_values(AttentionOptions, given) == AttentionOptions(softcap=3.0, causal=True)
    assert as_values(AttentionOptions(softcap=3.0, causal=True)) == given
    assert values() == as_values(AttentionOptions())
    with pytest.raises(TypeError, match=r"called\(\) got an unexpected keyword argument 'cap'"):
        values(cap=1)  # type: ignore[call-arg]


def test_unknown_keywords_are_refused_as_python_does() -> None:
    x = np.zeros((1, 1, 2, 4), np.float32)
    with pytest.raises(TypeError, match=r"attention_bwd\(\) got an unexpected keyword .*'latent'"):
        kernelseam.attention_bwd(x, x, x, x, x, x[..., 0], latent=True)  # type: ignore[call-arg]
    if find_spec("jax") is None:
        return
    from kernelseam.interop import jax as ks_jax

    with pytest.raises(TypeError, match=r"attention\(\) got an unexpected keyword .*'latent'"):
        ks_jax.attention(x, x, x, latent=True)  # type: ignore[call-overload]
