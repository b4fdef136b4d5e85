"""What a GEMM's kernels are told of its epilogue (epilogue.h)."""

from __future__ import annotations

from kernelseam.descriptors.common.captured import captured
from kernelseam.descriptors.gemm.grouped_problem import GroupedGemmProblem
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.expressions.epilogues import HALVES, INTERLEAVED
from kernelseam.kernels.config import Constants
from kernelseam.kernels.expression import captured_structure, captured_values
from kernelseam.kernels.signature import Structure

_PAIRS = {"": 0, HALVES: 1, INTERLEAVED: 2}
_AXES = ("batch", "head", "row")
_COUNTS = ("first_row", "by_batch", "by_head")
_RESULTS = Structure(
    (
        ("preactivation", "pointer"),
        *((f"preactivation_{axis}", "i64") for axis in _AXES[:2]),
        *((n, "i32") for n in ("preactivation_row", *_COUNTS)),
    ),
    ("preactivation", *_AXES, *_COUNTS),
)


def refuse_epilogue(spec: GemmSpec) -> str | None:
    """Why an epilogue is not computed."""
    if spec.epilogue is not None and spec.dtype_acc is DType.float64:
        return "it computes epilogues in float32, not in float64"
    return None


def epilogue_constants(spec: GemmSpec) -> Constants:
    expression = spec.epilogue_structure
    captures = expression is not None and bool(expression.numbers or expression.arrays)
    return {
        "EPILOGUE": expression is not None,
        "PAIRS": _PAIRS[spec.pairs],
        "CAPTURES": captures,
        "PREACTIVATION": spec.preactivation,
        "REDUCTIONS": len(spec.reductions),
        "VECTOR_P": spec.vector_p,
    }


def epilogue_structure(spec: GemmSpec) -> Structure:
    expression = spec.epilogue_structure
    assert expression is not None
    own = captured_structure(expression.numbers, expression.arrays)
    members = (("results", _RESULTS),)
    return Structure((("epilogue", own), *members) if own else members)


def epilogue_values(given: GemmProblem, walked: GemmProblem) -> dict[str, int | float]:
    """What is captured, where the second result lies, and how results and rows are counted where
    the problem is ``walked`` in bands, as heads."""
    heads, strides = walked.num_heads // walked.c_head_group, walked.preactivation_strides
    in_bands = walked.M < given.M
    return {
        **captured_values(given),
        **{f"preactivation_{axis}": s for axis, s in zip(_AXES, strides, strict=True)},
        "first_row": walked.M if in_bands else 0,
        "by_batch": 1 if in_bands else heads,
        "by_head": 0 if in_bands else 1,
    }


def grouped_epilogue_values(p: GroupedGemmProblem) -> dict[str, int | float]:
    """The same of a grouped product, whose results are counted by groups."""
    strides = dict(zip(_AXES, (0, 0, p.preactivation_strides[1]), strict=True))
    return {
        **captured_values(p),
        **{f"preactivation_{axis}": s for axis, s in strides.items()},
        **dict(zip(_COUNTS, (0, 1, 0), strict=True)),
    }


def epilogue_pointers(spec: GemmSpec, suffix: str = "") -> dict[str, str]:
    """Pointer parameters, and their operands."""
    expression = spec.epilogue_structure
    if expression is None:
        return {}
    arrays = {captured(i): captured(i) for i in range(len(expression.arrays))}
    return {"preactivation": f"preactivation{suffix}" if spec.preactivation else "", **arrays}
