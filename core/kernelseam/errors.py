"""All errors that callers can get. Bad input is refused with field, value, rule and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


class KernelSeamError(Exception):
    """Base of all errors raised on purpose by this package."""


_LONGEST = 160
"""Characters of a value in a message."""


def format_value(value: object) -> str:
    """A value as one short line of a message: arrays, and values without such a text, by the name
    of their type."""
    kind = type(value).__name__
    try:
        if isinstance(value, str):
            value = value if value.isprintable() and value else repr(value)
            return (
                value
                if len(value) <= _LONGEST
                else f"{value[:_LONGEST]}… ({len(value)} characters)"
            )
        # an array, not a NumPy scalar
        if hasattr(value, "dtype") and hasattr(value, "__setitem__"):
            return kind
        if isinstance(value, list | tuple) and (
            len(value) > _LONGEST or not all(isinstance(x, int | float | str | None) for x in value)
        ):
            return kind
        text = str(value)
    except Exception:  # its __str__ raises, or an int has too many digits
        return kind
    return kind if text.startswith("<") or "\n" in text or len(text) > _LONGEST else text


class InvalidValue(KernelSeamError, ValueError):
    """A value was refused before any launch.

    Attributes: ``field`` (its name as the caller knows it), ``value``, ``rule`` (what must hold)
    and ``remedy`` (how to fix it).
    """

    def __new__(cls, field: str, value: object, rule: str, remedy: str) -> Self:
        # Not in __init__: torch's compiler follows no call of a built-in exception's __init__, and
        # shows the arguments of __new__ where an error ends what it compiles.
        text = f"{field} = {format_value(value)}: {rule}. {remedy}."
        return KernelSeamError.__new__(cls, text)

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        self.field, self.value, self.rule, self.remedy = field, value, rule, remedy

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.field, self.value, self.rule, self.remedy)


class UnknownName(InvalidValue):
    """The name of no installed backend, device, arch, implementation or dtype."""


@dataclass(frozen=True)
class Refusal:
    """Why one implementation does not support a problem."""

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation}: {self.reason}"


class Unsupported(KernelSeamError):
    """No implementation supports the problem; ``refusals`` has the reason of each."""

    def __init__(self, problem: object, refusals: Sequence[Refusal]) -> None:
        self.problem, self.refusals = problem, tuple(refusals)
        reasons = (
            "; ".join(map(str, refusals)) or "none is registered for this operation and device"
        )
        super().__init__(f"no implementation takes {problem}. {reasons}.")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problem, self.refusals)


class CompileError(KernelSeamError, RuntimeError):
    """The compiler rejected a source. ``log`` is its output, ``source`` the path of the saved
    source."""

    def __init__(self, kernel: str, arch: str, log: str, source: str | None = None) -> None:
        self.kernel, self.arch, self.log, self.source = kernel, arch, log, source
        place = f" Source saved at {source}." if source else ""
        super().__init__(f"{kernel} did not compile for {arch}.{place}\n{log}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kernel, self.arch, self.log, self.source)


class MissingBinary(KernelSeamError, RuntimeError):
    """A kernel that no installed bundle has, where KERNELSEAM_NO_JIT forbids to compile it.

    Attributes: ``kernel``, ``arch`` and ``installed`` (the bundles that there are, as text).
    """

    def __init__(self, kernel: str, arch: str, installed: str) -> None:
        self.kernel, self.arch, self.installed = kernel, arch, installed
        super().__init__(
            f"{kernel} for {arch} is in no installed bundle with these constants, and "
            f"KERNELSEAM_NO_JIT forbids to compile it. Installed: {installed}. Trace a run that "
            f"launches it, and install the bundle of "
            f"`kernelseam compile --from TRACE --arch {arch} --bundle FILE.whl`."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kernel, self.arch, self.installed)


class DeviceError(KernelSeamError, RuntimeError):
    """A call into a device's runtime failed."""


class NoDevice(DeviceError):
    """A backend has no device (or no runtime library) here; compiling may still work."""


class OutOfDeviceMemory(DeviceError, MemoryError):
    """The device has not enough free memory."""


class CallInUse(KernelSeamError, RuntimeError):
    """A call was entered while another thread was running it; nothing was launched.

    Attributes: ``problem`` and ``device``.
    """

    def __init__(self, problem: object, device: object) -> None:
        self.problem, self.device = problem, device
        super().__init__(
            f"another thread is running this call ({problem} on {device}), whose launches share "
            "one workspace. "
            "Give each thread a call of its own: call.rebind(), with another workspace where "
            "this one was given one."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problem, self.device)


class PluginError(KernelSeamError):
    """A plugin violates the contract."""


class WrongResult(KernelSeamError):
    """A checked call (``bind(check=True)``) computed a result outside of the tolerance.

    Attributes: ``implementation``, ``device`` (its name), ``problem`` and ``finding``, which names
    the worst element.
    """

    def __init__(self, implementation: str, device: str, problem: object, finding: str) -> None:
        self.implementation, self.device, self.problem, self.finding = (
            implementation,
            device,
            problem,
            finding,
        )
        super().__init__(
            f"{implementation} on {device} computes {problem} wrongly: {finding}. "
            f"Name another implementation, and report this to the plugin's authors."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.implementation, self.device, self.problem, self.finding)


class RankLost(KernelSeamError, RuntimeError):
    """A process of the group did not send or receive within the group's timeout, or died.

    Attributes: ``step`` (what was under way) and ``reason`` (torch.distributed's words).
    """

    def __init__(self, step: str, reason: str) -> None:
        self.step, self.reason = step, reason
        super().__init__(
            f"{step}: another rank died, or did not come within the group's timeout ({reason}). "
            "End this process, and look for the first error of the others."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.step, self.reason)


def copy_error(what: str, remedy: str) -> TypeError:
    """The error for deep-copying or pickling an object that holds addresses: a copy would use the
    original's memory."""
    return TypeError(
        f"{what} is not deep-copied or pickled: it holds addresses of this process's memory. "
        f"{remedy}."
    )


class BrokenImplementation(RuntimeWarning):
    """An implementation raised an error, and another one is used instead."""


class SlowBinary(RuntimeWarning):
    """A kernel compiled correctly, but its compiler reports that it disabled an optimisation that
    the kernel's speed depends on.

    As an error (``warnings.simplefilter("error", SlowBinary)``, as the tests and
    ``tools/kernel_table.py`` have it) it ends the compilation, and nothing is kept in the cache.
    """


def not_supported(options: Iterable[str]) -> str:
    """The reason of a refusal: options that a kernel lacks."""
    names = sorted(options)
    if len(names) == 1:
        return f"{names[0]} is not supported by this kernel"
    return f"{', '.join(names)} are not supported by this kernel"
