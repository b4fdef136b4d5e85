"""``kernelseam.frozen.dataclass`` beside the standard library's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, FrozenInstanceError, field
from typing import Any, ClassVar

import pytest
from kernelseam import frozen
from kernelseam.forking import cached_property

MAKERS: dict[str, Callable[..., Any]] = {"ours": frozen.dataclass, "std": dataclasses.dataclass}


def _classes(make: Callable[..., Any], extend: Callable[..., Any]) -> tuple[Any, Any, Any]:
    @make(frozen=True)
    class Base:
        a: int
        b: list[int] = field(default_factory=list, hash=False)
        c: float = field(default=0.5, compare=False, repr=False)
        known: ClassVar[int] = 3

        def __post_init__(self) -> None:
            object.__setattr__(self, "seen", self.a + 1)

    @extend(frozen=True)
    class Extended(Base):
        a: int = 7
        _: KW_ONLY
        d: str = "x"
        e: int = field(default=4, init=False)
        f: dict[str, int] = field(default_factory=dict, init=False, hash=False)

    @extend(frozen=True, eq=False, kw_only=True)
    class Named(Extended):
        g: int

    return Base, Extended, Named


@pytest.fixture(params=[("ours", "ours"), ("std", "ours"), ("ours", "std")], ids="-".join)
def both(request: pytest.FixtureRequest) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Such classes, of which one at least is made by ours, and the standard library's."""
    std = MAKERS["std"]
    return _classes(*[MAKERS[n] for n in request.param]), _classes(std, std)


def _facts(kind: Any, *given: Any, **named: Any) -> list[Any]:
    x, y = kind(*given, **named), kind(*given, **named)
    fields = [
        (f.name, f.type, f.default, f.init, f.repr, f.hash, f.compare, f.kw_only)
        for f in dataclasses.fields(kind)
    ]
    signature = [(p.name, p.kind) for p in inspect.signature(kind).parameters.values()]
    hashed = hash(x) == hash(y)
    return [
        *(repr(x), dataclasses.asdict(x), x == y, x == 1, hashed, x.seen, kind.__match_args__),
        *(fields, signature, kind.__init__.__annotations__, kind.known, vars(kind).get("c")),
        *(
            repr(dataclasses.replace(x, a=9)),
            repr(copy.deepcopy(x)),
            dataclasses.is_dataclass(kind),
        ),
        x == dataclasses.replace(x, c=1.0),
    ]


def test_classes_are_as_the_standard_librarys(both: Any) -> None:
    for ours, std in zip(*both, strict=True):
        named = {"g": 1} if ours.__name__ == "Named" else {}
        assert _facts(ours, 1, **named) == _facts(std, 1, **named)
    (base, extended, _), _ = both
    assert base(1) != extended(1) and base(1, [2]) != base(1)
    assert hash(base(1, [2])) == hash(base(1))
    assert extended(1).b is not extended(1).b


def test_what_is_refused_is(both: Any) -> None:
    (base, extended, named), _ = both
    x = extended(1)
    for name in ("a", "e", "unknown"):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(x, name, 2)
        with pytest.raises(FrozenInstanceError, match=f"cannot delete field '{name}'"):
            delattr(x, name)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        base()
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'g'"):
        named(1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'e'"):
        extended(1, e=5)
    with pytest.raises(TypeError, match="is for frozen|kernelseam.frozen makes frozen ones"):
        frozen.dataclass(frozen=False)
    with pytest.raises(ValueError, match="mutable default <class 'list'> for field a"):

        @frozen.dataclass(frozen=True)
        class _Shared:
            a: list[int] = []  # noqa: RUF012


def test_a_class_keeps_methods_of_its_own() -> None:
    @frozen.dataclass(frozen=True)
    class Own:
        a: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    @frozen.dataclass(frozen=True)
    class Empty:
        pass

    assert Own(1) == Own(2) and hash(Own(1)) != hash(Own(2)) and repr(Own(1)) == "own"
    assert Empty() == Empty() and hash(Empty()) == hash(()) and repr(Empty()).endswith("Empty()")


def test_problems_can_be_pickled_and_plain_subclasses_have_attributes() -> None:
    from kernelseam.contract import OperandRule
    from kernelseam.dtypes import DType

    rule = OperandRule("a", DType.float16, (2, 3), (3, 1), 16)
    assert hash(rule) == hash(copy.copy(rule))
    again = pickle.loads(pickle.dumps(rule))  # perhaps in another process, where hashes are others
    names = {f.name for f in dataclasses.fields(rule)}
    assert again == rule and vars(again).keys() == vars(copy.copy(rule)).keys() == names
    assert hash(again) == hash(rule) == hash(rule)

    class Plain(OperandRule):
        pass

    x: Any = Plain("a", DType.float16, (2, 3), (3, 1), 16)
    x.more = 1
    assert x.more == 1 and x != rule
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'name'"):
        x.name = "b"


def test_a_changed_one_has_other_fields_and_nothing_that_was_computed() -> None:
    @frozen.dataclass(frozen=True)
    class Pair:
        a: int
        b: tuple[int, ...] = ()

        @cached_property
        def twice(self) -> int:
            return 2 * self.a

    x = Pair(3, (4,))
    assert x.twice == 6 and hash(x) == hash(Pair(3, (4,)))
    y = frozen.changed(x, a=5)
    assert y == Pair(5, (4,)) and vars(y) == {"a": 5, "b": (4,)}
    assert (y.twice, hash(y)) == (10, hash(Pair(5, (4,)))) and x == Pair(3, (4,))
    assert list(vars(frozen.changed(y, b=()))) == ["a", "b"]
    with pytest.raises(TypeError, match=r"Pair has no fields \['c'\]"):
        frozen.changed(x, c=1)


def test_a_first_call_compiles_half_the_methods_of_dataclasses() -> None:
    """Each takes Python a tenth of a millisecond: of 150 classes three, where six are usual."""
    script = (
        "import dataclasses, gc, kernelseam.ops.attention, kernelseam_cuda.plugin\n"
        "for kind in filter(lambda x: isinstance(x, type), gc.get_objects()):\n"
        "    if kind.__module__.startswith('kernelseam') and dataclasses.is_dataclass(kind):\n"
        "        for name, x in vars(kind).items():\n"
        "            code = getattr(x, '__code__', None)\n"
        "            if code is not None and code.co_filename == '<string>':\n"
        "                print(name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    names = done.stdout.split()
    classes = names.count("__init__")
    assert classes > 100 and len(names) <= 3 * classes + 40
