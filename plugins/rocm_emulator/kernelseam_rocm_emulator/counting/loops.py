"""A kernel's control-flow graph and its nested natural loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kernelseam_rocm_emulator.counting.instructions import Instruction
from kernelseam_rocm_emulator.counting.listing import Listing

Graph = Mapping[int, tuple[int, ...]]
"""Address of a basic block → addresses of its successors."""


@dataclass(frozen=True)
class Flow:
    """A kernel's basic blocks, by the address of their first instruction."""

    blocks: Mapping[int, Listing]
    follows: Graph

    def instructions(self, blocks: frozenset[int]) -> Iterator[Instruction]:
        """The instructions of some blocks, in the order of their addresses."""
        for block in sorted(blocks):
            yield from self.blocks[block]


@dataclass(frozen=True)
class Loop:
    """A natural loop: strongly connected blocks, entered at the header."""

    header: int
    blocks: frozenset[int]
    inner: tuple[Loop, ...] = ()

    def nest(self) -> Iterator[Loop]:
        """The loop and all nested loops."""
        yield self
        for loop in self.inner:
            yield from loop.nest()


def flow(listing: Listing) -> Flow:
    """Basic blocks and their edges. Indirect jumps have none: the compiler makes them for calls
    alone, and these kernels call nothing."""
    known = {x.address for x in listing}
    starts = {listing[0].address} if listing else set()
    for instruction, behind in zip(listing, listing[1:], strict=False):
        if instruction.target in known:
            starts.add(instruction.target)
        if instruction.target is not None or not instruction.falls_through:
            starts.add(behind.address)
    blocks: dict[int, list[Instruction]] = {}
    for instruction in listing:
        if instruction.address in starts:
            blocks[instruction.address] = current = []
        current.append(instruction)
    order = list(blocks)
    follows: dict[int, tuple[int, ...]] = {}
    for i, start in enumerate(order):
        last = blocks[start][-1]
        targets = [last.target] if last.target in known else []
        behind_it = order[i + 1 : i + 2] if last.falls_through else []
        follows[start] = tuple(dict.fromkeys(t for t in (*targets, *behind_it) if t is not None))
    return Flow({start: tuple(instructions_) for start, instructions_ in blocks.items()}, follows)


def loops(control_flow: Flow) -> tuple[Loop, ...]:
    """The outermost loops, each with its nested loops."""
    return _loops(control_flow.follows, frozenset(control_flow.blocks))


def _loops(graph: Graph, among: frozenset[int]) -> tuple[Loop, ...]:
    loops = []
    for component in components(graph, among):
        if len(component) == 1 and not set(graph[min(component)]) & component:
            continue
        entries = {n for b, after in graph.items() if b not in component for n in after}
        header = min(entries & component, default=min(component))
        inside = {
            b: tuple(n for n in after if n != header)
            for b, after in graph.items()
            if b in component
        }
        loops.append(Loop(header, component, _loops(inside, component)))
    return tuple(sorted(loops, key=lambda x: x.header))


def components(graph: Graph, among: frozenset[int]) -> Iterator[frozenset[int]]:
    """Strongly connected components (Tarjan), without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in sorted(among):
        if root in index:
            continue
        work = [(root, iter(graph.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            block, after = work[-1]
            for following in after:
                if following not in among:
                    continue
                if following not in index:
                    index[following] = low[following] = len(index)
                    stack.append(following)
                    on_stack.add(following)
                    work.append((following, iter(graph.get(following, ()))))
                    break
                if following in on_stack:
                    low[block] = min(low[block], index[following])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[block])
                if low[block] == index[block]:
                    component = set()
                    while block not in component:
                        on_stack.discard(top := stack.pop())
                        component.add(top)
                    yield frozenset(component)
