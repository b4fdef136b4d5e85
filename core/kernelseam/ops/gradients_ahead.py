"""An attention's gradients compiled while its forward is, for callers that differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernelseam.arrays import describe
from kernelseam.compilation import collect_warnings, compiled_together
from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.attention.options import AttentionOptions, GradientOptions
from kernelseam.descriptors.common.options import as_values, scalars_of
from kernelseam.descriptors.common.validation import packed
from kernelseam.dispatch import select
from kernelseam.dtypes import DType
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.ops.attention_bwd import gradient_work
from kernelseam.ops.attention_work import attention_work
from kernelseam.ops.operation import Operation

_ALIGNED = 256
"""An address, of which plans know the alignment alone."""


class _Outline(Operation):
    """A call whose results have no memory, and that launches nothing."""

    def new_array(
        self, name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo
    ) -> ArrayInfo:
        strides = packed(shape, [None] * len(shape))
        return ArrayInfo(_ALIGNED, tuple(shape), strides, dtype, like.device, like.kind, None)

    def launch(self, operands: Any, descriptor: Any, names: Any = None, reword: Any = None) -> None:
        pass


class _Compiled(_Outline):
    """One whose kernels are compiled."""

    def launch(self, operands: Any, descriptor: Any, names: Any = None, reword: Any = None) -> None:
        problem, device = descriptor().simplified()[0].problem(), self.infos["q"].device
        choice = select(problem, device, self.implementation)
        if isinstance(chosen := choice.implementation, KernelImplementation):
            sources = chosen.source_bundles(problem, device, choice.variant)
            with collect_warnings([]):  # the call that needs them says so
                compiled_together(chosen.toolchain, sources, device.arch)


def gradients_ahead(
    arrays: Mapping[str, object],
    options: Mapping[str, Any],
    deterministic: bool,
    implementation: str | None,
) -> Callable[[], None]:
    """What compiles the gradients of dense arrays, by the first implementation that a call would
    take, if the result's gradient is row-major as the result is. ``options``: the forward's."""
    infos = {n: _bare(describe(x, n, options.get("backend"))) for n, x in arrays.items()}
    forward = {n: x for n, x in options.items() if n in scalars_of(AttentionOptions)}
    backward = {n: x for n, x in options.items() if n in scalars_of(GradientOptions)}

    def compile_them() -> None:
        outline = _Outline(dict(infos), None)
        values = as_values(AttentionOptions(**{**forward, "return_lse": True, "out_dtype": None}))
        attention_work(outline, *values)
        operation = _Compiled({**outline.infos, "dout": outline.infos["out"]}, implementation)
        values = as_values(GradientOptions(**backward, deterministic=deterministic))
        gradient_work(operation, *values)

    return compile_them


def _bare(info: ArrayInfo) -> ArrayInfo:
    """The view without its array, whose memory it would keep."""
    return ArrayInfo(
        info.pointer, info.shape, info.strides, info.dtype, info.device, info.kind, None
    )
