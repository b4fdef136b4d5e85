"""What a call refuses, torch.compile of the call refuses too: every function and option."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import kernelseam
import pytest
from kernelseam import epilogues
from kernelseam.errors import InvalidValue, KernelSeamError
from kernelseam.interop import torch as ks

torch = pytest.importorskip("torch", reason="torch is not installed")

from public_calls import Arguments  # noqa: E402
from torch_calls import CALLS, INTEROP, OPERANDS, OPTIONS, arguments_of  # noqa: E402
from torch_operators import cells, in_mode, on_fakes, qkv  # noqa: E402

SDPA = {"query": "q", "key": "k", "value": "v"}


FUNCTIONS: dict[str, list[str]] = {}
"""Those in which a parameter can be wrong."""
for _name in CALLS:
    for _parameter, _right in arguments_of(_name).items():
        if isinstance(_right, torch.Tensor) or _parameter in OPTIONS:
            FUNCTIONS.setdefault(_parameter, []).append(_name)


def cases(name: str, number: int | None) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """For each parameter the wrong value of that number of three, made from the right one. Without
    a number, for those that every run asks of this function: each of one function, with one."""
    given = arguments_of(name)
    for at, (parameter, known) in enumerate(FUNCTIONS.items()):
        if name not in known or (number is None and known[at % len(known)] != name):
            continue
        which = at % 3 if number is None else number
        if isinstance(given[parameter], torch.Tensor):
            yield parameter, OPERANDS[which]
        else:
            value = OPTIONS[parameter][which]
            if parameter == "scale_block" and name.partition(".")[2] != "attention_paged":
                value = ((1, 2), "x", (0, 1, 1))[which] if "bmm" in name else value
            yield parameter, lambda right, value=value: value


def run_compiled(call: Callable[..., Any], given: Arguments) -> Any:
    """The call compiled whole, operands as its inputs and the rest as constants."""
    torch._dynamo.reset()
    operands = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    rest = {n: x for n, x in given.items() if n not in operands}

    def run(**operands: Any) -> Any:
        return call(**operands, **rest)

    return torch.compile(run, fullgraph=True, backend="eager")(**operands)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, None) for name in CALLS if any(cases(name, None))),
        *(
            pytest.param(name, i, marks=pytest.mark.slow("each parameter of each function"))
            for name in CALLS
            for i in range(3)
        ),
    ],
)
def test_compiled_refuses_what_eager_refuses(name: str, number: int | None) -> None:
    """Options by the same words; an operand by the name that the refusal begins with."""
    for parameter, spoil in cases(name, number):
        given = arguments_of(name)
        given[parameter] = spoil(given[parameter])
        try:
            CALLS[name].call(**given)
        except KernelSeamError as e:
            refusal = e
        else:
            assert parameter not in OPTIONS, f"{parameter} is taken"
            continue
        given = arguments_of(name)
        given[parameter] = spoil(given[parameter])
        try:
            run_compiled(CALLS[name].call, given)
        except Exception as e:  # torch wraps it in errors of its own
            caught = str(e)
        else:
            pytest.fail(f"compiled takes {parameter}: {refusal}")
        words = str(refusal)
        if parameter not in OPTIONS:
            field = refusal.field if isinstance(refusal, InvalidValue) else parameter
            words = re.split(r"[.\[ ]", field)[0]
            if words not in caught:  # of SDPA's operands, by the operator
                words = f"{SDPA[words]} = "
        assert words in caught, f"{parameter}: {refusal}"


def test_products_that_would_lose_what_they_are_given() -> None:
    """beta without an array to add to; results of another shape, which a copy would repeat into."""
    a, b = cells(2, 5, 7, grad=False), cells(2, 7, 4, grad=False)
    given = {"a": a, "b": b}
    for more, words in (
        ({"beta": 2}, "out = None: is read, because beta = 2"),
        ({"out": torch.zeros(3, 2, 5, 4)}, "out = an array of shape [3, 2, 5, 4]: must have shape"),
        ({"out": torch.zeros(2, 5, 4), "out_dtype": "float64"}, "out_dtype = float64: out is an"),
        ({"out": torch.zeros(2, 5, 1).expand(2, 5, 4)}, "must have memory of its own for every"),
    ):
        with pytest.raises(Exception, match=re.escape(words)):
            run_compiled(kernelseam.bmm, given | more)
    into, want = torch.ones(2, 5, 4), 2 * (a @ b) - 1
    made = run_compiled(kernelseam.bmm, given | {"alpha": 2, "beta": -1, "out": into})
    torch.testing.assert_close(into, want)
    torch.testing.assert_close(made, want)


def test_operands_on_several_devices() -> None:
    q, k, v = (x.detach() for x in qkv())
    given = {"q": q, "k": k.to("meta"), "v": v}
    with pytest.raises(Exception, match="k = a tensor on meta: must be on cpu, as the others are"):
        run_compiled(kernelseam.attention, given)
    with pytest.raises(
        InvalidValue, match=r"^k = torch\.Tensor on meta: must be an array of a lib"
    ):
        kernelseam.attention(**given)
    with pytest.raises(
        InvalidValue, match=r"^q = torch\.Tensor on meta: must be an array of a lib"
    ):
        kernelseam.attention(q.to("meta"), k.numpy(), v.numpy())


# torch then compiles what is called, and warns of what it does not follow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_refusals_without_fullgraph_are_the_functions_own() -> None:
    q = cells(2, 4, 6, 8, grad=False)
    torch._dynamo.reset()
    run = torch.compile(lambda x: kernelseam.attention(x, x, x, causal=1), backend="eager")
    with pytest.raises(InvalidValue, match="^causal = 1: must be True or False. Pass a bool.$"):
        run(q)

    def instead(x: Any) -> Any:
        try:
            return ks.attention(x, x, x, window=3)  # type: ignore[arg-type]
        except InvalidValue:
            return x + 1

    torch.testing.assert_close(torch.compile(instead, fullgraph=True, backend="eager")(q), q + 1)


def test_keys_that_are_values_are_read_once_where_they_are_compiled() -> None:
    q, k = cells(2, 4, 6, 8, grad=False), cells(2, 1, 9, 8, grad=False)

    def call(q: Any, k: Any, first: Any) -> Any:
        return kernelseam.attention(q, k, k[..., :6] if first is None else first, latent=True)

    def packed(q: Any, k: Any, first: Any) -> Any:
        q, k = q[0].transpose(0, 1).contiguous(), k[0].transpose(0, 1).contiguous()
        ends = [torch.tensor([0, 2, n], dtype=torch.int32) for n in (6, 9)]
        v = k[..., :6] if first is None else first[0].transpose(0, 1)
        return kernelseam.attention_varlen(q, k, v, *ends, 6, 9, latent=True)

    for function in (call, packed):
        torch._dynamo.reset()
        run = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(q, k, None), function(q, k, None))
        with pytest.raises(InvalidValue, match="must be the address of k, of which it is a view"):
            run(q, k, k.clone())


@pytest.mark.parametrize("name", [n for n in INTEROP if "attention_paged" not in n])
def test_an_empty_name_of_a_dtype_is_a_name(name: str) -> None:
    given = arguments_of(name)
    if "out_dtype" in given:
        with pytest.raises(InvalidValue, match="^out_dtype = '': must be one of float16, "):
            CALLS[name].call(**{**given, "out_dtype": ""})


FOLLOWED: dict[str, Callable[..., Any]] = {
    "in a mode": in_mode,
    "mapped": lambda function, *given: torch.func.vmap(function)(*(x[None] for x in given)),
    "traced": lambda function, *given: torch.jit.trace(function, given),
    "of meta": lambda function, *given: function(*(x.to("meta") for x in given)),
    "of fakes": on_fakes,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("how", FOLLOWED)
@pytest.mark.parametrize("home", [kernelseam, ks])
@pytest.mark.parametrize("name", ["bmm", "matmul2d"])
def test_sums_and_maxima_are_refused_where_torch_follows(name: str, home: Any, how: str) -> None:
    made, lead = torch.zeros(5), (2,) if name == "bmm" else ()

    def multiply(a: Any, b: Any) -> Any:
        sums = epilogues.row_sums(made.to(a.device))
        return getattr(home, name)(a, b, epilogue=["relu", sums])

    with pytest.raises(InvalidValue, match="^epilogue = row_sums, column_sums or amax: is of"):
        FOLLOWED[how](multiply, cells(*lead, 5, 7, grad=False), cells(*lead, 7, 4, grad=False))
    assert not made.any()


def test_operators_have_no_sums_and_maxima() -> None:
    given = [cells(5, 7, grad=False), cells(7, 4, grad=False)]
    text = (
        '0 coordinate FLOAT "acc"; epilogue 0; reduced_0 0; rest_0 0; '
        'reductions [["sum", 1, 0, true]]'
    )
    for a, b in (given, [x.to("meta") for x in given]):
        with pytest.raises(InvalidValue, match="^epilogue = row_sums, column_sums or amax: is of"):
            torch.ops.kernelseam.matmul2d_epilogue(a, b, expression=text, captured_numbers=[])


def listed(a: Any, *out: Any) -> Any:
    return kernelseam.grouped_mm_list([a, a], [a, a], out=out)


def with_sums(a: Any, out: Any, sums: Any) -> Any:
    return kernelseam.matmul2d(a, a, out=out, epilogue="relu", preactivation=sums)


def split(a: Any, *out: Any) -> Any:
    weight = torch.ones(18, 6, device=a.device)
    of_q = torch.zeros(1, 6, 6, device=a.device)
    return kernelseam.fused_qkv_projection(a, weight, None, 1, 1, 6, out=(of_q, *out))


def gathered(a: Any, *out: Any) -> Any:
    pages, slots = a.view(3, 2, 1, 6), torch.arange(6, dtype=torch.int32, device=a.device)
    return kernelseam.gather_paged(pages, pages, slot_mapping=slots, out=out)


DOUBLES: dict[Callable[..., Any], tuple[tuple[int, ...], tuple[int, ...]]] = {
    listed: ((6, 6), (6, 6)),
    with_sums: ((6, 6), (6, 6)),
    split: ((6, 6), (1, 6, 6)),
    gathered: ((6, 6), (6, 1, 6)),
}


@pytest.mark.parametrize("call", DOUBLES)
def test_one_array_for_two_results_is_refused(call: Callable[..., Any]) -> None:
    """Uncompiled by its memory."""
    of_a, of_out = DOUBLES[call]
    a, one, other = cells(*of_a, grad=False), torch.zeros(of_out), torch.zeros(of_out)
    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True, backend="eager")
    followed = functools.partial(in_mode, call), functools.partial(on_fakes, call)
    run(a, one, other)
    want = one.clone(), other.clone()
    for function in followed:
        function(a, one.zero_(), other.zero_())
    in_mode(call, a, one, other)
    torch.testing.assert_close((one, other), want, rtol=0, atol=0)
    message = r"(out(\[\d\])?|v|k) = .*(overlaps|equals) (preactivation|out\[|k|v)"
    for function in (call, *followed, run):
        with pytest.raises(Exception, match=message):
            function(a, one, one)
    for function in (call, followed[0]):
        with pytest.raises(InvalidValue, match=message):
            function(a, one, one.view(of_out))
    meta = torch.zeros(of_out, device="meta")
    with pytest.raises(InvalidValue, match=message):
        call(a.to("meta"), meta, meta.view(of_out))


@pytest.mark.slow("inductor compiles C++ for each function")
@pytest.mark.parametrize("call", DOUBLES)
def test_zeros_that_inductor_merges_are_two_results(call: Callable[..., Any]) -> None:
    of_a, of_out = DOUBLES[call]
    a, one, other = cells(*of_a, grad=False), torch.zeros(of_out), torch.zeros(of_out)
    torch._dynamo.reset()

    def made(a: Any) -> Any:
        own = torch.zeros(of_out), torch.zeros(of_out)
        call(a, *own)
        return own

    call(a, one, other)
    found = torch.compile(made, fullgraph=True, backend="inductor")(a)
    torch.testing.assert_close(found, (one, other))
