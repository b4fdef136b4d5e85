"""What a call refuses, torch.compile of the call refuses too: every function and option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kernelseam.errors import InvalidValue, KernelSeamError

torch = pytest.importorskip("torch", reason="torch is not installed")

from public_calls import Arguments  # noqa: E402
from torch_calls import DOORS, OPERANDS, OPTIONS, PLAIN, tensor  # noqa: E402

CALLS = {**PLAIN, **DOORS}
PARTS = 3


def arguments_of(name: str) -> Arguments:
    given = {n: tensor(x) for n, x in CALLS[name].arguments().items()}
    # traced calls make new gradients
    return {**given, "da": None, "db": None, "beta": 0.0} if "da" in given else given


def cases(name: str, part: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """For each parameter one of PARTS wrong values, made from the right one."""
    for i, (parameter, right) in enumerate(arguments_of(name).items()):
        which = (part + i) % PARTS
        if isinstance(right, torch.Tensor):
            yield parameter, OPERANDS[which]
        elif parameter in OPTIONS:
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


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_compiled(name: str) -> None:
    want, got = (run(name) for run in (eager, compiled))
    for a, b in zip(tensors_of(want), tensors_of(got), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def eager(name: str) -> Any:
    return CALLS[name].call(**arguments_of(name))


def compiled(name: str) -> Any:
    return run_compiled(CALLS[name].call, arguments_of(name))


def tensors_of(made: Any) -> list[Any]:
    return [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.slow("the other values")) for i in (1, 2))]
)
@pytest.mark.parametrize("name", CALLS)
def test_compiled_refuses_what_eager_refuses(name: str, part: int) -> None:
    """Options by the same words; an operand by the name that the refusal begins with."""
    for parameter, spoil in cases(name, part):
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
        assert words in caught, f"{parameter}: {refusal}"
