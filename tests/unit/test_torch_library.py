"""The operators in torch.ops.kernelseam: what torch asks of one (opcheck), fake and meta tensors,
and the transforms of torch.func."""

from __future__ import annotations

import inspect
from typing import Any

import kernelseam
import pytest
from kernelseam.errors import InvalidValue
from kernelseam.interop import torch as ks
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch_operators import cells, functions, packed, pages, qkv, samples, several  # noqa: E402

SAMPLES = tuple(samples())
FUNCTIONS = tuple(n for n in SAMPLES if "-" not in n and not n.endswith(("_bwd", "_paged")))
_DIFFERENTIATES_AGAIN = "grouped_mm", "grouped_mm_list", "merge_states"


def operator(name: str) -> Any:
    return getattr(torch.ops.kernelseam, name).default


def test_every_operator_has_a_sample() -> None:
    defined = {
        n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if "kernelseam::" in n
    }
    assert defined == {name for name, _, _ in samples().values()}


# torch 2.14's own check reads it of the results
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    called, operands, options = samples()[name]
    tensors = [x for x in torch.utils._pytree.tree_leaves(operands) if torch.is_tensor(x)]
    assert tensors and all(x.is_leaf for x in tensors)
    found = torch.library.opcheck(operator(called), operands, options)
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4, found


@pytest.mark.parametrize(
    "name",
    [n for n in SAMPLES if "-" not in n and not n.endswith(("_bwd", "qkv_projection_paged"))],
)
def test_defaults_are_those_of_the_function_that_computes(name: str) -> None:
    """Torch leaves out what a call gives as the schema's default."""
    own = inspect.signature(getattr(kernelseam, name)).parameters
    for argument in operator(name)._schema.arguments:
        # what returns all results computes them all
        if argument.has_default_value() and argument.name in own and argument.name != "return_lse":
            assert argument.default_value == own[argument.name].default, argument.name


def shapes(made: Any) -> list[Any]:
    return [
        (tuple(x.shape), x.stride(), x.dtype)
        for x in (made if isinstance(made, tuple) else (made,))
    ]


@pytest.mark.parametrize("name", [*FUNCTIONS, "attention_paged"])
def test_plain_functions_on_fake_and_meta_tensors(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    function = functions()[name]
    operands = [x.detach() for x in function.operands]
    want = shapes(function.plain(*operands))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in operands]
        assert shapes(function.plain(*fakes)) == want
        if function.differentiable is not None:
            assert shapes(function.differentiable(*fakes)) == want
    if name != "fused_qkv_projection":  # whose tables are made inside
        assert shapes(function.plain(*fakes)) == want  # outside of the mode as well
        made = function.plain(*[x.to("meta") for x in operands])
        assert shapes(made) == want
        assert (made[0] if isinstance(made, tuple) else made).device.type == "meta"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_torch_func_are_those_of_autograd(name: str) -> None:
    """Of torch.func.grad through the operator, of backward through the autograd function."""
    function = functions()[name]
    call: Any = function.differentiable
    places = tuple(i for i, x in enumerate(function.operands) if x.is_floating_point())

    def loss(*operands: Any) -> Any:
        made = call(*operands)
        made = made if isinstance(made, tuple) else (made,)
        return sum((x * x.detach().cos()).nan_to_num(neginf=0).sum() for x in made)

    operands = [x.detach().clone() for x in function.operands]
    got = torch.func.grad(loss, argnums=places)(*operands)
    for i in places:
        operands[i].requires_grad_()
    want = torch.autograd.grad(loss(*operands), [operands[i] for i in places])
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b)


def loop(call: Any, in_dims: Any, operands: Any) -> Any:
    n = next(x.shape[d] for x, d in zip(operands, in_dims, strict=True) if d is not None)
    rows = [
        call(*(x if d is None else x.select(d, i) for x, d in zip(operands, in_dims, strict=True)))
        for i in range(n)
    ]
    if isinstance(rows[0], tuple):
        return tuple(torch.stack(x) for x in zip(*rows, strict=True))
    return (torch.stack(rows),)


def mapped() -> dict[str, tuple[Any, Any, Any]]:
    """A call, where its operands are mapped, and the operands."""
    q, k, v = (x.detach() for x in qkv())
    many = torch.stack([q, 2 * q, -q], 2)
    biases = cells(3, 4, 6, 9, grad=False)
    a, b = cells(3, 2, 5, 7, grad=False), cells(2, 7, 3, 4, grad=False)
    x, w = cells(2, 6, 3, 12, grad=False), cells(64, 12, grad=False)
    heads, hidden = cells(2, 3, 4, 6, 8, grad=False), cells(12, 32, grad=False)
    outs, lses = cells(2, 3, 2, 4, 6, 8, grad=False), cells(3, 2, 4, 6, grad=False)
    return {
        "attention": (
            lambda q, k, v: ks.attention(q, k, v, causal=True, return_lse=True),
            (2, None, None),
            (many, k, v),
        ),
        "attention-bias": (
            lambda q, k, v, bias: ks.attention(q, k, v, bias=bias),
            (None, None, None, 0),
            (q, k, v, biases),
        ),
        "attention-shared-bias": (
            lambda q, k, v, bias: ks.attention(q, k, v, bias=bias),
            (2, None, None, None),
            (many, k, v, biases[0]),
        ),
        "attention_varlen": (
            lambda q, k, v, at, of: ks.attention_varlen(q, k, v, at, of, 4, 5),
            (0, None, None, None, None),
            (torch.stack([packed(False)[0], 2 * packed(False)[0]]), *packed(False)[1:]),
        ),
        "attention_paged": (
            ks.attention_paged,
            (0, None, None, None, None),
            (torch.stack([pages()[0], 2 * pages()[0]]), *pages()[1:]),
        ),
        "bmm": (ks.bmm, (0, 2), (a, b)),
        "bmm-bias": (
            lambda a, b, c: ks.bmm(a, b, bias=c),
            (0, 2, 0),
            (a, b, cells(3, 2, 4, grad=False)),
        ),
        "matmul2d": (
            lambda a, b, c: ks.matmul2d(a, b, bias=c),
            (0, None, 0),
            (a[:, 0], b[0, :, 0], cells(3, 4, grad=False)),
        ),
        "grouped_mm_list": (
            lambda a, b, c: tuple(ks.grouped_mm_list([a, b], [b, c])),
            (0, 1, None),
            (a[:, 0], b[0], cells(4, 8, grad=False)),
        ),
        "fused_qkv_projection": (
            lambda x, w: ks.fused_qkv_projection(x, w, None, 4, 2),
            (2, None),
            (x, w),
        ),
        "fused_qkv_projection-weights": (
            lambda x, w: ks.fused_qkv_projection(x, w, None, 4, 2),
            (2, 0),
            (x, torch.stack([w, -w, 2 * w])),
        ),
        "fused_output_projection_residual": (
            ks.fused_output_projection_residual,
            (1, None),
            (heads, hidden),
        ),
        "merge_states": (ks.merge_states, (1, None), (outs.transpose(0, 1)[:3].contiguous(), lses)),
    }


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", mapped())
def test_vmap(name: str) -> None:
    call, in_dims, operands = mapped()[name]
    got = torch.vmap(call, in_dims=in_dims)(*operands)
    want = loop(call, in_dims, operands)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", mapped())
def test_vmap_over_an_axis_without_elements(name: str) -> None:
    """Shapes and dtypes are those of more elements, and there is a graph."""
    call, in_dims, operands = mapped()[name]
    differentiable = name != "attention_paged"
    none = [
        x
        if d is None
        else x.narrow(d, 0, 0).detach().requires_grad_(differentiable and x.is_floating_point())
        for x, d in zip(operands, in_dims, strict=True)
    ]
    got = several(torch.vmap(call, in_dims=in_dims)(*none))
    for a, b in zip(got, loop(call, in_dims, operands), strict=True):
        assert a.shape == (0, *b.shape[1:]) and a.dtype == b.dtype
    if differentiable:
        sum(x.sum() for x in got).backward()
        assert all(x.grad.shape == x.shape for x in none if x.requires_grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [n for n in mapped() if n != "attention_paged"])
def test_gradients_through_vmap(name: str) -> None:
    """Of results without their LSE, too, which gradients start from."""
    call, in_dims, operands = mapped()[name]
    wanted = [x.detach().clone().requires_grad_() for x in operands if x.is_floating_point()]
    rest = [x for x in operands if not x.is_floating_point()]

    def loss(made: Any) -> Any:
        return sum(x.square().sum() for x in several(made))

    mapped_call = torch.vmap(call, in_dims=in_dims)
    got = torch.autograd.grad(loss(mapped_call(*wanted, *rest)), wanted)
    want = torch.autograd.grad(loss(loop(call, in_dims, (*wanted, *rest))), wanted)
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["attention", "attention-shared-bias", "bmm", "matmul2d"])
def test_gradients_of_each_element(name: str) -> None:
    """torch.vmap of torch.func.grad."""
    call, in_dims, operands = mapped()[name]

    def loss(*operands: Any) -> Any:
        made = call(*operands)
        return sum(x.square().sum() for x in (made if isinstance(made, tuple) else (made,)))

    places = tuple(range(len(operands)))
    gradients = torch.func.grad(loss, argnums=places)
    got = torch.vmap(gradients, in_dims=in_dims)(*operands)
    for a, b in zip(got, loop(gradients, in_dims, operands), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [*FUNCTIONS, "attention of one entry"])
def test_gradients_from_many_starts(name: str) -> None:
    """As torch.func.jacrev takes them: the starts are mapped, the operands are not."""
    function = functions()[name.partition(" ")[0]]
    operands = [x.detach().clone() for x in function.operands]
    if name.endswith("one entry"):
        operands = [x[:1].clone() for x in operands]
    wanted = [x.requires_grad_() for x in operands if x.is_floating_point()]
    assert function.differentiable is not None
    made = several(function.differentiable(*operands))
    starts = [torch.randn(3, *x.shape).to(x.dtype) for x in made]
    got = torch.autograd.grad(made, wanted, starts, is_grads_batched=True, retain_graph=True)
    rows = [
        torch.autograd.grad(made, wanted, one, retain_graph=True)
        for one in zip(*starts, strict=True)
    ]
    for a, *b in zip(got, *rows, strict=True):
        assert a.abs().max() > 1e-3
        torch.testing.assert_close(a, torch.stack(b))


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in _DIFFERENTIATES_AGAIN])
def test_double_backward_is_refused_by_name(name: str) -> None:
    called, operands, options = samples()[name]
    made = operator(called)(*operands, **options)
    loss = sum(x.square().sum() for x in (made if isinstance(made, tuple) else (made,)))
    (first,) = torch.autograd.grad(loss, operands[0], create_graph=True)
    with pytest.raises(
        InvalidValue,
        match=f"^create_graph = True: gradients of {called} cannot be differentiated. Use torch's",
    ):
        first.square().sum().backward()


def test_gradients_of_merged_states_differentiate_again() -> None:
    outs, lses = (x.detach().double().requires_grad_() for x in samples()["merge_states"][1])
    with torch.no_grad():
        lses[1, 0, 0, 0] = 0.5
    assert torch.autograd.gradgradcheck(ks.merge_states, (outs[:, :1, :1], lses[:, :1, :1]))


def test_what_operators_refuse(refused: Refused) -> None:
    q, k, v = qkv()
    refused(
        "return_lse = False: gradients start from the LSE. Pass return_lse=True.",
        lambda: torch.ops.kernelseam.attention(q, k, v, return_lse=False),
    )
    slopes = cells(4)
    refused(
        "alibi_slopes.requires_grad = True: gradients do not flow to it. Pass tensor.detach().",
        lambda: torch.ops.kernelseam.attention(q, k, v, None, None, slopes),
    )
    rows = pages()
    refused(
        "q.requires_grad = True: gradients do not flow to it. Pass tensor.detach().",
        lambda: torch.ops.kernelseam.attention_paged(rows[0].requires_grad_(), *rows[1:]),
    )
    meta = [x.detach().to("meta") for x in (q, k, v)]
    refused(
        "q = an array of shape [4, 6, 8]: must have 4 axes. Add or remove axes with reshape.",
        lambda: kernelseam.attention(meta[0][0], *meta[1:]),
    )
    refused(
        "stream = given: a traced call runs on the stream that is current when it runs. Leave it "
        "out, and make the stream torch's current one.",
        lambda: kernelseam.attention(*meta, stream=0),
    )


@pytest.mark.parametrize("name", [n for n, x in samples().items() if "expression" in x[2]])
def test_expressions_that_operators_refuse(name: str, refused: Refused) -> None:
    operator, operands, options = samples()[name]
    operands = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in operands)
    call = getattr(torch.ops.kernelseam, operator)
    refused(
        "expression = garbage: is no text of an expression. Pass what a traced call of the "
        "function gave its operator.",
        lambda: call(*operands, **{**options, "expression": "garbage"}),
    )
    with pytest.raises(InvalidValue, match="^captured_numbers = .*must be what the expression"):
        call(*operands, **{**options, "captured_numbers": [*options["captured_numbers"], 1.5]})
    schema = [a.name for a in call.default._schema.arguments if not a.kwarg_only]
    first = schema.index("captured_0")
    given = (*operands, *[None] * (len(schema) - len(operands)))
    extra = (*given[:-1], torch.ones(1))
    with pytest.raises(InvalidValue, match="^captured_7 = .*the expression captures fewer arrays"):
        call(*extra, **options)
    if given[first] is not None:
        other = (*given[:first], given[first].double(), *given[first + 1 :])
        with pytest.raises(InvalidValue, match="^captured_0 = a tensor of float64 with 1 axes: .*"):
            call(*other, **options)
        with pytest.raises(InvalidValue, match="^captured_0 = None: must be a tensor of float32"):
            call(*given[:first], **options)


def test_results_given_by_the_caller_are_written_by_transforms_too() -> None:
    """Under torch.func out is copied to; what beta adds is what it held."""
    a, b = cells(5, 7, grad=False), cells(7, 4, grad=False)
    c, residual = cells(5, 4, grad=False), cells(5, 4, seed=1, grad=False)

    def call(a: Any) -> Any:
        out = c.clone() + 0 * a[:, :4]
        kernelseam.matmul2d(a, b, out=out, beta=0.5, residual=residual)
        return out

    want = a @ b + 0.5 * c + residual
    torch.testing.assert_close(torch.func.vmap(call)(a[None])[0], want)
    torch.testing.assert_close(torch.func.functionalize(call)(a), want)


def test_lists_are_launched_outside_of_cuda_graphs() -> None:
    """Their addresses are copied to the device first; torch.compile is told by a tag."""
    unsafe = torch.Tag.cudagraph_unsafe
    assert unsafe in torch.ops.kernelseam.grouped_mm_list.default.tags
    assert unsafe not in torch.ops.kernelseam.grouped_mm.default.tags
