"""Imports form no cycle, in the core, the plugins and the benchmarks; the core's go down: what a
module may import is below its package in the order that docs/architecture.md writes down.

Every import counts: at the top of a module, within a function, under TYPE_CHECKING. ``from package
import name`` is an import of the submodule of that name where there is one, else of the package's
``__init__``. Python runs the packages that a module is in before it; the order covers them, being
in one top-level package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import kernelseam
import pytest

ROOT = "kernelseam"
CORE = Path(kernelseam.__file__).parent
REPOSITORY = Path(__file__).parents[2]
ARCHITECTURE = REPOSITORY / "docs/architecture.md"

PLUGINS = (
    "plugins/cuda/kernelseam_cuda",
    "plugins/rocm/kernelseam_rocm",
    "plugins/rocm_emulator/kernelseam_rocm_emulator",
)

BY_NAME = {
    "plugins": "entry points, and the core's own plugin among them: kernelseam.builtin",
    "cli.commands": "the subcommands of the command line, when they are used",
    "interop.diffusers": "what imports torch and diffusers, by register()",
    "interop.optional_libraries": "diffusers, Transformers and vLLM, by register()",
    "interop.torch_library.namespace": "modules of operators, which import it, too",
    "interop.transformers": "what imports torch and Transformers, by register()",
    "lazy": "names of packages, at their first use; TYPE_CHECKING imports the same",
    "interop.vllm": "vLLM and its registry, by register()",
    "samples.operations.table": "the operations, which import what it imports, too",
}
"""Modules that import others by a name that is a string, which no walk over imports sees."""

Graph = dict[str, set[str]]


def sources(folder: Path) -> dict[str, Path]:
    """Module → file, a package's being its ``__init__``."""
    result = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return result


def imported(text: str, known: Iterable[str]) -> Iterator[str]:
    """Modules among the known ones that a source imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            for a in node.names:
                whole = f"{node.module}.{a.name}"
                if whole in known:
                    yield whole
                elif node.module in known:
                    yield str(node.module)


def at_import(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            for field in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(node, field, ()))
            for handler in getattr(node, "handlers", ()):
                yield from at_import(handler.body)


def waited_for(text: str, known: Iterable[str]) -> Iterator[str]:
    """Modules whose import a module's own waits for, if another thread has begun it: the one that
    is named; of ``from package import submodule`` the package, too; not the packages above it,
    but of ``import a.b as b``."""
    for node in at_import(ast.parse(text).body):
        names = [a.name for a in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{n}" for n in names)]
        else:
            names = [n[:i] for n in names for i, c in enumerate(n + ".") if c == "."]
        yield from (n for n in names if n in known)


def graph_of(modules: Mapping[str, str]) -> Graph:
    """Module → what it imports, by the modules' texts."""
    return {name: {*imported(text, modules)} - {name} for name, text in modules.items()}


def cycles(graph: Graph) -> list[list[str]]:
    """Sets of several modules each of which imports, by others, all of the set."""
    reached = {}
    for start in graph:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph[ahead.pop()] - seen
            seen |= new
            ahead += new
        reached[start] = seen
    result = {
        frozenset(m for m in graph if m in reached[name] and name in reached[m])
        for name in graph
        if name in reached[name]
    }
    return sorted(sorted(f) for f in result)


def top_level(module: str) -> str:
    """The top-level module or package of the core that a module is in; kernelseam itself is one."""
    return (module.split(".") + [""])[1] or ROOT


def order(text: str) -> dict[str, int]:
    """Top-level package → its line in the order that the page writes down, from the lowest up."""
    block = re.search(r"^```layers\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    result: dict[str, int] = {}
    for line, names in enumerate(block[1].splitlines()):
        for name in re.findall(r"\w+", names):
            assert name not in result, f"{name} stands twice in the order"
            result[name] = line
    return result


def up(graph: Graph, levels: Mapping[str, int]) -> list[tuple[str, str]]:
    """Imports of another top-level package that is not below the module's own."""
    return sorted(
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if top_level(module) != top_level(target)
        and levels[top_level(target)] >= levels[top_level(module)]
    )


@pytest.fixture(scope="module")
def graph() -> Graph:
    modules = {m: p.read_text(encoding="utf-8") for m, p in sources(CORE).items()}
    assert len(modules) > 150
    return graph_of(modules)


@pytest.fixture(scope="module")
def levels() -> dict[str, int]:
    return order(ARCHITECTURE.read_text(encoding="utf-8"))


def test_every_package_is_in_the_order(graph: Graph, levels: dict[str, int]) -> None:
    assert sorted(levels) == sorted({top_level(m) for m in graph})


def test_no_cycle(graph: Graph) -> None:
    assert cycles(graph) == []


@pytest.mark.parametrize("folder", (*PLUGINS, "benchmarks"))
def test_no_cycle_beside_the_core(folder: str) -> None:
    modules = {m: p.read_text(encoding="utf-8") for m, p in sources(REPOSITORY / folder).items()}
    assert len(modules) > 15
    assert cycles(graph_of(modules)) == []


@pytest.mark.parametrize("folder", ("core/kernelseam", *PLUGINS))
def test_threads_that_import_do_not_wait_for_each_other(folder: str) -> None:
    """Two threads that wait for each other's modules: Python gives one of them a module that is
    not whole. So a package that imports its modules is not what these import from."""
    modules = {m: p.read_text(encoding="utf-8") for m, p in sources(REPOSITORY / folder).items()}
    waits = {name: {*waited_for(text, modules)} - {name} for name, text in modules.items()}
    assert cycles(waits) == []


def test_no_import_goes_up(graph: Graph, levels: dict[str, int]) -> None:
    assert up(graph, levels) == []


def test_imports_by_name_are_known(graph: Graph) -> None:
    calls = re.compile(r"\b(import_module|__import__|EntryPoint)\(")
    actual = {
        str(p.relative_to(CORE).with_suffix("")).replace("/", ".")
        for p in sources(CORE).values()
        if calls.search(p.read_text(encoding="utf-8"))
    }
    assert sorted(actual) == sorted(BY_NAME)


def test_the_walk_sees_every_import() -> None:
    modules = {
        "k": "",
        "k.a": "def f():\n    from k.b import x\n",
        "k.b": "if TYPE_CHECKING:\n    from k import c\nimport os",
        "k.c": "import k.a\nfrom k import nothing",
        "k.d": "from k.c import a",
    }
    graph = graph_of(modules)
    assert graph == {
        "k": set(),
        "k.a": {"k.b"},
        "k.b": {"k.c"},
        "k.c": {"k.a", "k"},
        "k.d": {"k.c"},
    }
    assert cycles(graph) == [["k.a", "k.b", "k.c"]]
    waits = {name: {*waited_for(text, modules)} for name, text in modules.items()}
    assert waits == {"k": set(), "k.a": set(), "k.b": set(), "k.c": {"k", "k.a"}, "k.d": {"k.c"}}
    assert {*waited_for("try:\n    from k import a\nexcept E:\n    import k.b as b", modules)} == {
        "k",
        "k.a",
        "k.b",
    }
    levels = order("```layers\na\nb d\nc\nkernelseam\n```\n")
    assert up(graph, levels) == [("k.a", "k.b"), ("k.b", "k.c"), ("k.c", "k"), ("k.d", "k.c")]
    assert up({"k.b": {"k.d"}}, levels) == [("k.b", "k.d")]
