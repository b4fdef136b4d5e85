"""What the functions that torch differentiates refuse, by the name that the caller knows it by, at
the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam
import pytest
from kernelseam.errors import InvalidValue, UnknownName
from kernelseam.interop import torch as ks
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")
Call = Callable[..., Any]


def cells(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def offsets() -> Any:
    return torch.tensor([0, 3], dtype=torch.int32)


def projected(rotary0: Any = None, rotary1: Any = None, **operands_of: Any) -> Any:
    return ks.fused_qkv_projection(
        num_heads=2, num_kv_heads=1, rotary=(rotary0, rotary1), **operands_of
    )


FUNCTIONS: dict[str, tuple[Call, dict[str, Any], tuple[str, ...]]] = {
    "attention": (
        ks.attention,
        {
            **{n: cells(1, 2, 3, 4) for n in "qkv"},
            "bias": cells(1, 2, 3, 3),
            "mask": torch.ones(3, 3) > 0,
            "alibi_slopes": cells(2),
            "sinks": cells(2),
            "prefix_lengths": torch.ones(1, dtype=torch.int32),
            "kv_lengths": torch.ones(1, dtype=torch.int32),
        },
        ("q", "k", "v"),
    ),
    "attention_varlen": (
        lambda **x: ks.attention_varlen(**x, max_seqlen_q=3, max_seqlen_k=3),
        {
            **{n: cells(3, 2, 4) for n in "qkv"},
            "cu_seqlens_q": offsets(),
            "cu_seqlens_k": offsets(),
            "bias": cells(1, 2, 3, 3),
        },
        ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    ),
    "bmm": (
        ks.bmm,
        {"a": cells(2, 3, 4), "b": cells(2, 4, 5), "bias": cells(5), "residual": cells(2, 3, 5)},
        ("a", "b"),
    ),
    "matmul2d": (
        ks.matmul2d,
        {"a": cells(3, 4), "b": cells(4, 5), "bias": cells(5), "residual": cells(3, 5)},
        ("a", "b"),
    ),
    "fused_qkv_projection": (
        projected,
        {
            "input": cells(1, 3, 5),
            "weight": cells(16, 5),
            "bias": cells(16),
            "rotary0": cells(3, 2),
            "rotary1": cells(3, 2),
            "positions": torch.zeros(1, 3, dtype=torch.int32),
        },
        ("input", "weight", "rotary0", "rotary1"),
    ),
    "fused_output_projection_residual": (
        ks.fused_output_projection_residual,
        {
            "attn_out": cells(1, 2, 3, 4),
            "weight": cells(5, 8),
            "bias": cells(5),
            "residual": cells(1, 3, 5),
        },
        ("attn_out", "weight"),
    ),
}
OPERANDS = [(f, n) for f, (_, operands_of, _) in FUNCTIONS.items() for n in operands_of]
NEEDED = [(f, n) for f, (_, _, needed) in FUNCTIONS.items() for n in needed]


def shown(name: str) -> str:
    """An operand as the caller knows it."""
    return {"rotary0": "rotary[0]", "rotary1": "rotary[1]"}.get(name, name)


def called(function: str, name: str, value: Any, gradients: bool = True) -> Any:
    """The function with one of its operands replaced; the others that can have gradients want
    them."""
    call, operands_of, needed = FUNCTIONS[function]
    operands = {n: x.clone() for n, x in operands_of.items()}
    if gradients:
        for n in needed:
            if n != name and not n.startswith(("cu_", "rotary")):
                operands[n].requires_grad_()
    return call(**{**operands, name: value})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_calls_are_right_as_they_are(function: str) -> None:
    _, operands_of, needed = FUNCTIONS[function]
    called(function, needed[0], operands_of[needed[0]])


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(("function", "name"), NEEDED)
def test_none_for_what_is_needed(
    function: str, name: str, gradients: bool, refused: Refused
) -> None:
    refused(
        f"{shown(name)} = None: must be a torch tensor. Give it.",
        lambda: called(function, name, None, gradients),
    )


def strange(kind: str, like: Any) -> Any:
    """A tensor of the shape that is wanted, of a kind that has no place here."""
    dense = like.float()
    if kind == "nested":
        return torch.nested.nested_tensor([dense, dense])
    if kind == "jagged":
        rows = dense.reshape(-1, 1)
        return torch.nested.nested_tensor([rows, rows[:1]], layout=torch.jagged)
    if kind == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode().from_tensor(dense)
    return {
        "sparse": lambda: dense.to_sparse(),
        "mkldnn": lambda: dense.to_mkldnn(),
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        "complex": lambda: dense.to(torch.complex64),
        "conjugate": lambda: dense.to(torch.complex64).conj(),
        "negated": lambda: torch.complex(dense, dense).conj().imag,
        "meta": lambda: dense.to("meta"),
        "int64": lambda: like.long(),
    }[kind]()


DTYPES = "must be one of float16, bfloat16, float32, float64"
TAKEN = dict.fromkeys(
    ("prefix_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "positions"), "must be int32"
) | {"mask": "must be bool"}
"""Operands of which but one dtype is taken."""
KINDS = {
    "sparse": ".layout = torch.sparse_coo: must be torch.strided. Pass tensor.to_dense().",
    "mkldnn": ".layout = torch._mkldnn: must be torch.strided. Pass tensor.to_dense().",
    "nested": ".is_nested = True: must be one dense tensor. Pack its rows",
    "jagged": ".is_nested = True: must be one dense tensor. Pack its rows",
    "quantized": f".dtype = qint8: {DTYPES}",
    "complex": f".dtype = complex64: {DTYPES}",
    "conjugate": f".dtype = complex64: {DTYPES}",
    "int64": f".dtype = int64: {DTYPES}",
    "negated": ".is_neg = True: its memory holds the negated values (a lazy negation). Pass "
    "tensor.resolve_neg().",
    "fake": ".data_ptr = None: has no memory (a fake tensor, or one of torch.func)",
    "meta": " = torch.Tensor on meta: must be an array of a library and on a device known to ",
}


@pytest.mark.filterwarnings(
    "ignore:.*(sparse|nested|uantize|data pointer|Accessing the data|torch.jit).*"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradients", [True, False])
def test_tensors_that_have_no_place_here(gradients: bool, kind: str) -> None:
    for function, name in OPERANDS:
        with pytest.raises(InvalidValue) as caught:
            called(function, name, strange(kind, FUNCTIONS[function][1][name]), gradients)
        assert caught.value.field.startswith(
            ("rotary", "cos", "sin") if name.startswith("rotary") else name
        )
        rule = KINDS[kind].replace(DTYPES, TAKEN.get(name, DTYPES))
        if (function, name, kind) == ("attention", "q", "jagged"):
            rule = " = a nested tensor of 3 axes: must have 4"
        assert rule in str(caught.value), f"{name} of {function}"


@pytest.mark.filterwarnings("ignore:.*nested.*")
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nested_tensor_after_plain_ones(name: str) -> None:
    """torch's guard of the plain ones would end the process at it."""
    plain = {n: cells(1, 2, 3, 4) for n in "qkv"}
    ks.attention(**plain)
    with pytest.raises(InvalidValue, match=rf"^{name}\.is_nested = True: must be one dense tensor"):
        ks.attention(**{**plain, name: strange("nested", plain[name][0])})


@pytest.mark.parametrize("rotary", [cells(3, 2), (cells(3, 2),), "halves", 3])
def test_a_rotary_that_is_no_pair(rotary: Any, refused: Refused) -> None:
    refused(
        f"rotary = {type(rotary).__name__}: must be (cosines, sines). Pass two tensors.",
        lambda: ks.fused_qkv_projection(cells(1, 3, 5), cells(16, 5), None, 2, 1, rotary=rotary),
    )


OPERATIONS = {
    "attention": "attention_bwd",
    "attention_varlen": "attention_bwd",
    "bmm": "gemm",
    "matmul2d": "gemm",
    "fused_qkv_projection": "qkv_projection_bwd",
    "fused_output_projection_residual": "output_projection_bwd",
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_meant_for_the_backward_is_refused_at_the_forward(
    function: str, gradients: bool, refused: Refused
) -> None:
    refused(
        f"bwd_implementation = nothing: must be one of numpy for {OPERATIONS[function]} on numpy. "
        "Name one of these, or leave it out.",
        lambda: called(function, "bwd_implementation", "nothing", gradients),
    )
    for value in (3, ["numpy"], torch.ones(1)):
        refused(
            f"bwd_implementation = {type(value).__name__}: must be a name. Leave it out for the "
            "cheapest.",
            lambda value=value: called(function, "bwd_implementation", value, gradients),
        )
    with pytest.raises(UnknownName):
        called(function, "bwd_implementation", "")
    if function.startswith("attention"):
        for bad, seen in (("yes", "yes"), (1, "1"), (None, "None"), (torch.ones(1), "Tensor")):
            refused(
                f"deterministic = {seen}: must be True or False. Pass a bool.",
                lambda bad=bad: called(function, "deterministic", bad, gradients),
            )


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_tangents_are_refused() -> None:
    """Derivatives of forward mode would be lost."""
    x = cells(3, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3, 3))
        for call in (kernelseam.matmul2d, ks.matmul2d):
            with pytest.raises(
                InvalidValue, match=r"^b\.tangent = given: forward-mode derivatives do not flow"
            ):
                call(x, dual)
        kernelseam.matmul2d(x, x)


def test_pages_have_no_gradients_whose_implementation_could_be_named(refused: Refused) -> None:
    pages = {"k_pages": cells(2, 4, 1, 4), "v_pages": cells(2, 4, 1, 4)}
    table = torch.zeros(1, 1, dtype=torch.int32)
    refused(
        "bwd_implementation = numpy: gradients do not flow through pages. Leave it out, or leave "
        "the pages out.",
        lambda: ks.fused_qkv_projection(
            cells(1, 3, 5),
            cells(16, 5),
            None,
            2,
            1,
            **pages,
            block_table=table,
            bwd_implementation="numpy",
        ),
    )


def test_options_of_results_that_are_made_beforehand(refused: Refused) -> None:
    """By their own name, and an empty name is none that is left out."""
    rows = [cells(3, 2, 4) for _ in "qkv"]
    for dtype, rule in (
        ("", f"out_dtype = '': {DTYPES}. Convert the array or name one of these."),
        ("zeros", f"out_dtype = zeros: {DTYPES}. Convert the array or name one of these."),
        ("float64", "out_dtype = float64: must be float32. Name another, or leave it out."),
    ):
        refused(
            rule,
            lambda dtype=dtype: ks.attention_varlen(
                *rows, offsets(), offsets(), 3, 3, out_dtype=dtype
            ),
        )


def test_sdpa_names_its_own_arguments(refused: Refused) -> None:
    x = cells(1, 2, 3, 4)
    sdpa: Any = ks.scaled_dot_product_attention
    refused(
        "key = an array of float64: must be float32 as query is. Convert the array, or correct the "
        "dtype.",
        lambda: sdpa(x, x.double(), x),
    )
    refused(
        "query = str: must be a torch tensor. Pass torch.as_tensor(…).", lambda: sdpa("q", x, x)
    )
    refused(
        "is_causal = 1: must be True or False. Pass a bool.", lambda: sdpa(x, x, x, is_causal=1)
    )
    refused(
        "attn_mask = an array of shape [5, 3]: must repeat to [1, 2, 3, 3]. Check the order of the "
        "axes.",
        lambda: sdpa(x, x, x, torch.ones(5, 3)),
    )
    refused(
        "query = an array of shape [1, 2, 3, 4]: must repeat along its leading axes to those of "
        "key and value, of shapes [2, 2, 3, 4] and [3, 2, 3, 4]. Check the order of the axes.",
        lambda: sdpa(x, x.expand(2, -1, -1, -1), x.expand(3, -1, -1, -1)),
    )
