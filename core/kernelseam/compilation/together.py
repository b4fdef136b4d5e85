"""Compiles several bundles in parallel, unless this process or the cache has them."""

from __future__ import annotations

import contextvars
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kernelseam.compilation import ahead, build, bundled
from kernelseam.compilation.build import Binary, compiled
from kernelseam.compilation.folder import CacheWarning
from kernelseam.contract import SourceBundle, Toolchain


@dataclass
class _Outcome:
    """A bundle's result, error and warnings in its thread, passed on to the requesting thread."""

    error: BaseException | None = None
    said: list[str] = field(default_factory=list)


def compiled_together(
    toolchain: Toolchain, bundles: Sequence[SourceBundle], arch: str
) -> list[Binary]:
    """Each bundle's binary for the arch, as ``compiled`` returns it: the first error in the
    bundles' order is raised, and warnings are issued in that order, by the requesting thread.

    Threads compile in parallel if the toolchain's ``compiles_beside`` is true: its ``compile`` then
    releases the GIL, and its compiler holds no lock for long. If the waiting thread is interrupted,
    compilations that have started finish in their threads, for the cache; no others start.
    """
    missing = []
    if len(bundles) > 1 and not bundled.no_jit() and getattr(toolchain, "compiles_beside", False):
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

    ahead.begin()  # once, and here: each thread has a context of its own
    # Each in a copy of the requesting context: a plugin may read its variables.
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
            # no more threads can start: the existing ones, or the requesting thread, do the rest
            except RuntimeError:
                break
            begun.append(thread)
        for thread in begun:
            thread.join()
    finally:
        waiting = None
    return outcomes
