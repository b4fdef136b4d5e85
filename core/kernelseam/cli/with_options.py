"""Options that several commands share, written once: as the parameters of what makes an object of
them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_options(
    make: Callable[..., Any],
    hints: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> Callable[[Command], Command]:
    """A decorator of a command: its first parameter, what ``make`` returns, is replaced by an
    option for each of ``make``'s parameters, but for those ``without``.

    Their annotations, or ``hints`` instead, are typer's. The command's other options follow.
    """
    hints = hints or get_type_hints(make, include_extras=True)
    shared = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, p in inspect.signature(make).parameters.items()
        if name not in without
    ]

    def decorate(command: Command) -> Command:
        def run(**options: Any) -> None:
            command(make(**{p.name: options.pop(p.name) for p in shared}), **options)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [*shared, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__ = command.__doc__
        return run

    return decorate
