"""The parity matrix's fixture and summary."""

from kernelseam.parity.pytest_plugin import *  # noqa: F403
