"""Options that several commands share, written once: as the parameters of what makes an object of
them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

Command = Callable[..., None]


class WithOptions:
    """A decorator of a command: its first parameter, what ``makes`` return, ``joined`` where there
    are several, is replaced by an option for each of their parameters, but for those ``without``.

    Their annotations, or ``hints`` instead, are typer's. The command's other options follow.
    """

    def __init__(
        self,
        *makes: Callable[..., Any],
        joined: Callable[..., Any] = lambda made: made,
        hints: Mapping[str, Any] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._joined = joined
        self._makes = {
            make: [
                p.replace(
                    kind=inspect.Parameter.KEYWORD_ONLY,
                    annotation=(hints or get_type_hints(make, include_extras=True))[name],
                )
                for name, p in inspect.signature(make).parameters.items()
                if name not in without
            ]
            for make in makes
        }

    def made(self, options: dict[str, Any]) -> Any:
        """What they make of a command line's options, which the others stay in."""
        return self._joined(
            *[make(**{p.name: options.pop(p.name) for p in of}) for make, of in self._makes.items()]
        )

    def __call__(self, command: Command) -> Command:
        def run(**options: Any) -> None:
            command(self.made(options), **options)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for of in self._makes.values() for p in of]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__ = command.__doc__
        return run
