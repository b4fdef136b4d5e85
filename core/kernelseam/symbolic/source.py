"""A trace's steps and conditions as lines of a function."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kernelseam.symbolic.polynomials import Terms

Range = tuple[float, float]
"""The least and the largest value of an integer that are known."""
ANY: Range = (-math.inf, math.inf)
_TOTAL = ("+", "-", "*", "&", "|", "^", "negative", "abs", "bits", "float", "min", "max")
"""Steps that no numbers refuse."""


@dataclass
class Node:
    """A step of a trace, or one of its inputs (no form)."""

    place: int
    """Among all."""
    name: str
    """The operator's or the function's."""
    form: str
    operands: tuple[str, ...]
    terms: Terms
    """An integer as a polynomial."""
    known: Range
    """By its operands."""
    range: Range
    """With conditions on it."""
    wanted: Range = ANY
    """By these alone."""
    unlike: frozenset[int] = frozenset()
    """Values that it must not have."""
    bound: bool = False
    """Whether it has such conditions."""

    def want(self, low: float, high: float) -> None:
        self.wanted = max(self.wanted[0], low), min(self.wanted[1], high)
        self.range = max(self.range[0], low), min(self.range[1], high)

    def know(self, known: Range) -> None:
        self.known = self.range = known
        self.want(*self.wanted)

    @property
    def by(self) -> int:
        """The number that it is divided by; 0 where that may be any."""
        last = self.operands[-1] if self.name in ("//", "%") else ""
        return int(last) if last.isdigit() else 0

    def bounds(self) -> list[tuple[str, int]]:
        """What it must be beside what is known."""
        (low, high), (least, most) = self.wanted, self.known
        if low == high:
            return [("==", int(low))]
        result = [(">=", int(low))] if low > least else []
        result += [("<=", int(high))] if high < most else []
        return result + [("!=", n) for n in sorted(self.unlike) if low <= n <= high]


@dataclass(frozen=True)
class Condition:
    """``text`` of nodes must be true, or, where it is empty, the one node be as it is wanted.
    ``after``: how many nodes there were. ``equal``: it says that two integers are."""

    text: str
    nodes: tuple[str, ...]
    after: int
    equal: bool = False


@dataclass
class _Tests:
    """Conditions that wait for their line, in which one comparison stands for many."""

    equal: list[tuple[str, str]] = field(default_factory=list)
    multiples: dict[int, list[str]] = field(default_factory=dict)
    """By powers of two, numbers that must be multiples of them."""
    others: list[str] = field(default_factory=list)

    def line(self) -> list[str]:
        texts = list[str]()
        if self.equal:
            texts.append(" == ".join(map(_tuple, zip(*self.equal, strict=True))))
        texts += [f"{_bits(names)} % {unit} == 0" for unit, names in self.multiples.items()]
        texts += self.others
        self.__init__()  # type: ignore[misc]
        return [f"if not ({' and '.join(texts)}): return None"] if texts else []


def _tuple(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _bits(names: Sequence[str]) -> str:
    """Those that one of the numbers has."""
    return names[0] if len(names) == 1 else f"({' | '.join(names)})"


class Source:
    """Lines that compute outputs, and return None where a condition does not hold: those of nodes
    that ``depend`` on late inputs, and those of others. A step that one line needs is part of
    it."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        conditions: Sequence[Condition],
        outputs: Iterable[str],
        depends: Mapping[str, bool],
    ) -> None:
        self._nodes, self._depends = nodes, depends
        self._uses = Counter[tuple[str, bool]]()
        self._within = dict[str, str]()
        """Steps that are parts of lines."""
        self._partial = set[str]()
        """Those that some numbers refuse."""
        self._tests = _Tests(), _Tests()
        self.lines: tuple[list[str], list[str]] = ([], [])
        self._count(conditions, outputs)
        waiting = list(reversed(conditions))
        for i, (name, node) in enumerate(nodes.items()):
            while waiting and waiting[-1].after <= i:
                self._test(waiting.pop())
            if node.form and (self._uses[name, False] or self._uses[name, True]):
                self._step(name, node)
        for condition in reversed(waiting):
            self._test(condition)
        for lines, tests in zip(self.lines, self._tests, strict=True):
            lines += tests.line()

    def _count(self, conditions: Sequence[Condition], outputs: Iterable[str]) -> None:
        """Uses of each node, by lines that come early and late."""
        ahead = [(x, when) for x in outputs for when in (False, True, False, True)]
        for c in conditions:
            times = 1 if c.text else len(self._nodes[c.nodes[0]].bounds())
            ahead += [(x, self._is_late(c)) for x in c.nodes for _ in range(times)]
        while ahead:
            name, when = ahead.pop()
            if (node := self._nodes.get(name)) is None:
                continue
            if not (self._uses[name, False] or self._uses[name, True]):
                for i, x in enumerate(node.operands):
                    ahead += [(x, self._depends[name])] * max(node.form.count(f"{{{i}}}"), 1)
            self._uses[name, when] += 1

    def _is_late(self, condition: Condition) -> bool:
        return any(self._depends[x] for x in condition.nodes)

    def _text(self, name: str) -> str:
        return self._within.get(name, name)

    def _step(self, name: str, node: Node) -> None:
        when = self._depends[name]
        text = node.form.format(*map(self._text, node.operands))
        refuses = not (node.name in _TOTAL or node.by) or any(
            x in self._partial and x in self._within for x in node.operands
        )
        if refuses:
            self._partial.add(name)
        if self._uses[name, when] == 1 and not self._uses[name, not when]:
            self._within[name] = f"({text})"
            return
        if refuses:
            self.lines[when].extend(self._tests[when].line())
        self.lines[when].append(f"{name} = {text}")

    def _test(self, condition: Condition) -> None:
        tests = self._tests[self._is_late(condition)]
        texts = list(map(self._text, condition.nodes))
        total = not any(x in self._partial and x in self._within for x in condition.nodes)
        if condition.text:
            if condition.equal and total:
                tests.equal.append((texts[0], texts[1]))
            else:
                tests.others.append(condition.text.format(*texts))
            return
        ((name,), (text,)) = condition.nodes, texts
        node = self._nodes[name]
        for sign, n in node.bounds():
            if not total:
                tests.others.append(f"{text} {sign} {n}")
            elif sign == "==" and n == 0 and node.by & (node.by - 1) == 0 < node.by:
                operand = self._text(node.operands[0])
                tests.multiples.setdefault(node.by, []).append(operand)
            elif sign == "==":
                tests.equal.append((text, str(n)))
            elif sign == ">=" and n == 1 and node.known[0] >= 0:
                tests.others.append(text)
            else:
                tests.others.append(f"{text} {sign} {n}")
