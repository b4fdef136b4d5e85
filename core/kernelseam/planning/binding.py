"""Launches bound to memory: a plugin's steps, and several as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kernelseam.containment import error_text
from kernelseam.contract import Step
from kernelseam.contract_values import validated_launch
from kernelseam.errors import KernelSeamError, PluginError


def in_order(launches: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
    """One function that launches all of them. Of one it is that one: a loop around it takes a tenth
    of a launch's time."""
    if len(launches) == 1:
        return launches[0]

    def run(handle: int) -> None:
        for launch in launches:
            launch(handle)

    return run


def bound_step(
    implementation: str, step: Step, pointers: Mapping[str, int], workspace: int
) -> Callable[[int], None]:
    """A plugin's step bound to memory. Its own faults become a PluginError that names it."""
    try:
        launch = step.bind(pointers, workspace)
    except (KernelSeamError, MemoryError):
        raise
    except Exception as e:
        raise PluginError(
            f"bind() of {implementation!r}, step {step.record.kernel!r}, raised "
            f"{error_text(e)}. Name another implementation, or leave that plugin out"
        ) from e
    return launch if callable(launch) else validated_launch(implementation, step, launch)
