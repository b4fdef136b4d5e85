"""Options that several commands share, written once: as the parameters of what makes an object of
them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_options(
    *makes: Callable[..., Any],
    hints: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> Callable[[Command], Command]:
    """A decorator of a command: its first parameters, what ``makes`` return, are replaced by an
    option for each of their parameters, but for those ``without``.

    Their annotations, or ``hints`` instead, are typer's. The command's other options follow.
    """

    def options_of(make: Callable[..., Any]) -> list[inspect.Parameter]:
        annotations = hints or get_type_hints(make, include_extras=True)
        return [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotations[name])
            for name, p in inspect.signature(make).parameters.items()
            if name not in without
        ]

    of_each = [options_of(make) for make in makes]
    shared = [p for of in of_each for p in of]

    def decorate(command: Command) -> Command:
        def run(**options: Any) -> None:
            made = [
                make(**{p.name: options.pop(p.name) for p in of})
                for make, of in zip(makes, of_each, strict=True)
            ]
            command(*made, **options)

        own = [*inspect.signature(command, eval_str=True).parameters.values()][len(makes) :]
        parameters = [*shared, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__ = command.__doc__
        return run

    return decorate
