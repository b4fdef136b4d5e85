"""``pytest --pyargs kernelseam.parity --backend NAME``: the option, in runs that name the matrix,
and in no others.

pytest reads options before it looks into the packages that ``--pyargs`` names, so that a
conftest.py there comes too late: this module is an entry point of pytest's. Every pytest where
kernelseam is installed loads it, hence it imports nothing and leaves ``--backend`` to the projects
that have one of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MATRIX = "kernelseam.parity"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the option where an argument is the matrix or a test in it."""
    if _named(pluginmanager.get_plugin("pytestconfig")):
        group = parser.getgroup("kernelseam")
        group.addoption(
            "--backend",
            dest="kernelseam_backend",
            metavar="NAME",
            help="run the parity matrix on this backend alone, such as numpy or that of a plugin",
        )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a backend that is not there, before anything is collected."""
    if not _named(config):
        return
    import pytest

    from kernelseam.dispatch import find_device, preferred_backend
    from kernelseam.errors import KernelSeamError, UnknownName
    from kernelseam.parity.running.run import targets

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


def _named(config: pytest.Config | None) -> bool:
    arguments = config.invocation_params.args if config is not None else ()
    return any(str(a).partition("::")[0] in (MATRIX, f"{MATRIX}.test_matrix") for a in arguments)
