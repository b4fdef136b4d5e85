"""An extension of Griffe, named in mkdocs.yml: where a function takes ``**options``, the site shows
the options that ``inspect.signature`` names in their place, and ``kernelseam.frozen.dataclass`` is
the standard library's."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from griffe import (
    Class,
    ExprCall,
    ExprName,
    Extension,
    Function,
    Parameter,
    ParameterKind,
    Parameters,
)

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: ParameterKind.var_keyword,
}


class Signatures(Extension):
    def on_class_instance(self, *, cls: Class, **_: Any) -> None:
        for made in (d.value for d in cls.decorators):
            if isinstance(made, ExprCall) and made.canonical_path == "kernelseam.frozen.dataclass":
                made.function = ExprName("dataclasses.dataclass")
                cls.labels.add("dataclass")

    def on_function(self, *, func: Function, **_: Any) -> None:
        if "options" not in func.parameters or func.name.startswith("_"):
            return
        try:
            function = getattr(importlib.import_module(func.module.path), func.name)
        except (ImportError, AttributeError):  # a library that is not installed; a method
            return
        written = {p.name: p for p in func.parameters}
        func.parameters = Parameters(
            *[
                written.get(n)
                or Parameter(n, annotation=_text(p), kind=_KINDS[p.kind], default=repr(p.default))
                for n, p in inspect.signature(function).parameters.items()
            ]
        )


def _text(parameter: inspect.Parameter) -> str:
    return inspect.formatannotation(parameter.annotation, "kernelseam.dtypes")
