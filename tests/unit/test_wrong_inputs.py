"""Whatever stands in the place of an argument, each public function and descriptor takes it or
refuses it with an error of its own that names what the caller named."""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernelseam.errors import InvalidValue, KernelSeamError
from public_calls import CALLS as OF_ARRAYS
from public_calls import Arguments, PublicCall
from wrong_values import NEVER, wrong

if find_spec("torch") is None:
    CALLS = OF_ARRAYS
else:
    from torch_calls import INTEROP

    CALLS = {**OF_ARRAYS, **INTEROP}

LONGEST = 500
"""Characters of a refusal."""


def is_address(value: Any) -> bool:
    """Whether a value is taken for an address, or for a list with some: behind those is whatever
    their owner says, and nothing may be launched on them."""
    if isinstance(value, list | tuple):
        return any(is_address(x) for x in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu" and value.ndim == 1 and value.dtype.itemsize == 8
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def tried(public: PublicCall, arguments: Arguments, spoiled: set[str]) -> InvalidValue | None:
    """The refusal, held to what every refusal must be; None where the arguments are taken or no
    implementation takes them."""
    operands = {n for n in spoiled if is_address(arguments[n])}
    if operands and public.binds:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            created = public.call(**arguments)
            if not operands:
                public.run(created)
    except InvalidValue as e:
        root = e.field.partition("[")[0].partition(".")[0]
        assert set(re.findall(r"[^\W\d]\w*", root)) <= {*arguments, *public.names}, (
            f"names {e.field}: {e}"
        )
        assert e.rule and e.remedy and len(str(e)) < LONGEST and "\n" not in str(e)
        return e
    except KernelSeamError as e:
        assert len(str(e)) < LONGEST
    return None


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_accepted(name: str) -> None:
    public = CALLS[name]
    public.run(public.call(**public.arguments()))


PARTS = 8


@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(i, marks=pytest.mark.slow("the other values")) for i in range(1, PARTS))],
)
@pytest.mark.parametrize("name", CALLS)
def test_one_wrong_argument(name: str, part: int) -> None:
    """A value that nothing takes is refused by the name of the parameter that it was given for.
    Every run tries one of PARTS of the values for each parameter, another for the next."""
    public = CALLS[name]
    for i, (parameter, right) in enumerate(public.arguments().items()):
        for kind, make in list(wrong(right).items())[(part + i) % PARTS :: PARTS]:
            arguments = public.arguments()
            arguments[parameter] = make()
            try:
                refusal = tried(public, arguments, {parameter})
                assert kind not in NEVER or (refusal is not None and parameter in str(refusal)), (
                    refusal or "taken"
                )
            except BaseException as e:
                e.add_note(f"{name}({parameter}={kind})")
                raise


names = st.sampled_from(list(CALLS))


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(names, st.data())
def test_several_wrong_arguments(name: str, data: st.DataObject) -> None:
    public = CALLS[name]
    arguments = public.arguments()
    spoiled = data.draw(st.sets(st.sampled_from(sorted(arguments)), min_size=1, max_size=4))
    for parameter in sorted(spoiled):
        makers = wrong(arguments[parameter])
        arguments[parameter] = makers[data.draw(st.sampled_from(sorted(makers)), label=parameter)]()
    tried(public, arguments, spoiled)


numbers = st.one_of(
    st.integers(), st.integers(-2, 9), st.floats(), st.booleans(), st.text(max_size=5)
)
extents = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8]), max_size=5)
arrays = st.builds(
    np.zeros, extents, st.sampled_from(["f2", "f4", "f8", "i4", "i8", "?", "c8", "O", "U1"])
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(names, st.data())
def test_random_numbers_and_arrays(name: str, data: st.DataObject) -> None:
    """Numbers and strings of any size, and arrays of any small shape and any dtype."""
    public = CALLS[name]
    arguments = public.arguments()
    spoiled = data.draw(st.sets(st.sampled_from(sorted(arguments)), min_size=1, max_size=3))
    for parameter in sorted(spoiled):
        right = arguments[parameter]
        arguments[parameter] = data.draw(
            arrays if isinstance(right, np.ndarray) else numbers | arrays, parameter
        )
    tried(public, arguments, spoiled)
