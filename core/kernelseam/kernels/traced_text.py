"""Functions whose text is a trace's: what a call and a plan of known problems are compiled from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

from kernelseam.contract import Device
from kernelseam.dispatch import select
from kernelseam.errors import KernelSeamError
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.kernels.tracing import Encoded, TracedStep
from kernelseam.symbolic import Symbol, Trace
from kernelseam.tuned.classes import represents_itself

Selection = tuple[KernelImplementation, Any]
"""An implementation and a tile."""


def selection_of(problem: Any, device: Device, implementation: str | None) -> Selection | None:
    """What computes problems of a class, given its representative; None where that is no kernel of
    the core's making."""
    represents_itself(problem)
    try:
        choice = select(problem, device, implementation)
    except KernelSeamError:
        return None
    chosen = choice.implementation
    if not isinstance(chosen, KernelImplementation):
        return None
    return chosen, chosen.tile(problem, device, choice.variant)


class Text:
    """A trace's numbers as text, and functions of such text."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.number = trace.text
        """A number's."""

    @property
    def namespace(self) -> dict[str, object]:
        """What the text names."""
        return self._trace.namespace

    def of(self, values: Sequence[Any]) -> str:
        """A tuple's."""
        return listed(map(self.number, values))

    def problems(self, over_symbols: Sequence[Any]) -> tuple[list[Symbol], Callable[..., Any]]:
        """The symbols of problems, in order, and what makes such problems of their values."""
        symbols, names = list[Symbol](), self.namespace

        def text(x: Any) -> str:
            if type(x) is Symbol:
                symbols.append(x)
                return f"v{len(symbols) - 1}"
            if isinstance(x, tuple):
                return listed(map(text, x))
            names[name := f"c{len(names)}"] = x
            if is_dataclass(x):
                before = len(symbols)
                parts = [f"{f.name}={text(getattr(x, f.name))}" for f in fields(x)]
                if len(symbols) > before:  # a spec has none, and stays itself
                    names[name] = type(x)
                    return f"{name}({', '.join(parts)})"
            return name

        lines = [f"return {listed(map(text, over_symbols))}"]
        inputs = ", ".join(f"v{i}" for i in range(len(symbols)))
        return symbols, self.compiled("problems", inputs, lines)

    def argument(self, name: str, x: Any) -> str:
        """A number's, or an encoded tensor map's, whose encoder gets the name."""
        if not isinstance(x, Encoded):
            return self.number(x)
        self.namespace[name] = x.encode
        return f"{name}({self.of(x.extents)}, {self.of(x.strides)}, {self.number(x.address)})"

    def packed(self, place: int, step: TracedStep) -> str:
        """A call of the ``place``-th packer."""
        texts = [self.argument(f"e{place}_{i}", x) for i, x in enumerate(step.arguments)]
        return f"k{place}({', '.join(texts)})"

    def compiled(self, name: str, parameters: str, body: Sequence[str]) -> Callable[..., Any]:
        """The function of these lines."""
        return self.compiles(name, parameters, body)()

    def compiles(
        self, name: str, parameters: str, body: Sequence[str]
    ) -> Callable[[], Callable[..., Any]]:
        """What compiles it, later."""
        text = "\n    ".join([f"def {name}({parameters}):", *body])
        namespace = dict(self.namespace)

        def compiled() -> Callable[..., Any]:
            exec(compile(text, f"<a traced call: {name}>", "exec"), namespace)
            return cast(Callable[..., Any], namespace[name])

        return compiled


def listed(texts: Iterable[str]) -> str:
    """A tuple's text."""
    return "(" + "".join(f"{x}, " for x in texts) + ")"


def numbers_of(step: TracedStep) -> Sequence[Any]:
    """All that its arguments are computed from."""
    return [
        x
        for a in step.arguments
        for x in ((*a.extents, *a.strides, a.address) if isinstance(a, Encoded) else (a,))
    ]
