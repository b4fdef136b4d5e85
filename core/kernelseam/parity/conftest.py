"""For ``pytest --pyargs kernelseam.parity``; nothing else imports this."""

from kernelseam.parity.pytest_plugin import *  # noqa: F403
