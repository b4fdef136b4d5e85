"""docs/integrations.md: every test and every function that it names is there, and every function of
``kernelseam.interop`` is on it."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
TESTS = sorted(set(re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", PAGE)))
FUNCTIONS = sorted(set(re.findall(r"`(kernelseam(?:\.\w+)+)`", PAGE)))
INTEROP = ("diffusers", "jax", "torch", "transformers", "vllm")


@cache
def functions_of(place: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / place).read_text(encoding="utf-8"))
    return {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}


@pytest.mark.parametrize(("place", "name"), TESTS, ids=lambda x: x.removesuffix(".py"))
def test_a_test_is_there(place: str, name: str) -> None:
    assert name in functions_of(place)


def test_all_tests_are_named_in_one_form() -> None:
    assert len(TESTS) > 50
    assert PAGE.count("::") == len(re.findall(r"`\w+/test_\w+\.py::\w+`", PAGE))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_there(name: str) -> None:
    try:
        found: Any = pkgutil.resolve_name(name)
    except ModuleNotFoundError as e:
        if str(e.name).startswith("kernelseam"):
            raise
        pytest.skip(f"{e.name} is not installed")
    assert callable(found) or found.__name__ == name


@pytest.mark.parametrize("interop", INTEROP)
def test_every_function_is_on_the_page(interop: str) -> None:
    names = importlib.import_module(f"kernelseam.interop.{interop}").__all__
    calls = {n for n in names if n.islower()}
    assert calls
    assert calls <= {
        n.rpartition(".")[2] for n in FUNCTIONS if n.startswith(f"kernelseam.interop.{interop}.")
    }


def test_every_module_is_known() -> None:
    folder = ROOT / "core" / "kernelseam" / "interop"
    modules = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert {n for n in modules if "_" not in n} == set(INTEROP)


def test_versions_are_those_that_the_modules_name() -> None:
    from kernelseam.interop import diffusers, transformers, vllm

    for module in (diffusers, transformers, vllm):
        versions = re.findall(r"\d+(?:\.\d+)+", module.TESTED)
        assert versions and all(v in PAGE for v in versions)


def test_it_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert ": integrations.md\n" in navigation
