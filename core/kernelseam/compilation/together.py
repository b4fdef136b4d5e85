"""Several bundles at once: those that neither this process nor the cache has are compiled beside
each other."""

from __future__ import annotations

import contextvars
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kernelseam.compilation import build
from kernelseam.compilation.build import Binary, compiled
from kernelseam.compilation.folder import CacheWarning
from kernelseam.contract import SourceBundle, Toolchain


@dataclass
class _Outcome:
    """What became of a bundle in its thread: told where it was asked for."""

    error: BaseException | None = None
    said: list[str] = field(default_factory=list)


def compiled_together(
    toolchain: Toolchain, bundles: Sequence[SourceBundle], arch: str
) -> list[Binary]:
    """Each bundle's binary for the arch, as ``compiled`` gives it one by one: the first error in
    the bundles' order is raised, warnings are given in that order, by the thread that asks.

    Threads compile where the toolchain's ``compiles_beside`` is true: its ``compile`` then lets go
    of the interpreter, and its compiler holds no lock for long. Where whoever waits is interrupted,
    what has begun is finished in its thread, for the cache, and nothing else is begun.
    """
    missing = []
    if len(bundles) > 1 and getattr(toolchain, "compiles_beside", False):
        missing = [b for b in dict.fromkeys(bundles) if not build.is_cached(toolchain, b, arch)]
    outcomes = _compile(toolchain, missing, arch) if len(missing) > 1 else {}
    binaries = []
    for bundle in bundles:
        outcome = outcomes.pop(bundle, None) or _Outcome()
        for message in outcome.said:
            warnings.warn(message, CacheWarning, stacklevel=3)
        if outcome.error is not None:
            raise outcome.error
        binaries.append(compiled(toolchain, bundle, arch))
    return binaries


def _compile(
    toolchain: Toolchain, bundles: Sequence[SourceBundle], arch: str
) -> dict[SourceBundle, _Outcome]:
    outcomes = {b: _Outcome() for b in bundles}
    waiting: Iterator[SourceBundle] | None = iter(bundles)

    def work() -> None:
        while waiting is not None and (bundle := next(waiting, None)) is not None:
            outcome = outcomes[bundle]
            try:
                with build.collect_warnings(outcome.said):
                    compiled(toolchain, bundle, arch)
            except BaseException as e:
                outcome.error = e

    # Each in the context of whoever asks: a plugin may look at what is set there.
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name=f"kernelseam: compiling {i}"
        )
        for i in range(min(len(bundles), os.cpu_count() or 1))
    ]
    begun: list[threading.Thread] = []
    try:
        for thread in threads:
            try:
                thread.start()
            # there is room for no more: those that there are do it, or whoever asks
            except RuntimeError:
                break
            begun.append(thread)
        for thread in begun:
            thread.join()
    finally:
        waiting = None
    return outcomes
