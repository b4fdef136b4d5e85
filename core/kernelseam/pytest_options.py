"""``pytest -p kernelseam.pytest_options --pyargs kernelseam.parity --backend NAME``: the option.

pytest reads options before it looks into the packages that ``--pyargs`` names, so that a
conftest.py there comes too late. Without it the variable KERNELSEAM_BACKEND names the backend.
"""

from __future__ import annotations

import pytest

from kernelseam.dispatch import find_device, preferred_backend
from kernelseam.errors import KernelSeamError, UnknownName
from kernelseam.parity.running.run import targets


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernelseam")
    group.addoption(
        "--backend",
        dest="kernelseam_backend",
        metavar="NAME",
        help="run the parity matrix on this backend alone, such as numpy or that of a plugin",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a backend that is not there, before anything is collected."""
    wanted = preferred_backend(config.getoption("kernelseam_backend"))
    if wanted is None:
        return
    try:
        find_device(backend=wanted)
        if not targets(backend=wanted):
            raise UnknownName(
                "backend", wanted, "must have an implementation", "See `kernelseam doctor`"
            )
    except KernelSeamError as e:
        raise pytest.UsageError(str(e)) from None
