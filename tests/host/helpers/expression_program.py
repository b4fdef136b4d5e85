"""An expression's generated struct, compiled by the host's C++ compiler and run over whole
grids."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from kernelseam import kernels
from kernelseam.expressions.derivatives import array_gradients
from kernelseam.expressions.lowering import device_struct
from kernelseam.expressions.scores import ScoreExpression
from kernelseam_hostcpp import archs, compiler
from kernelseam_hostcpp.sources import sources

_UNIT = """#define KS_THROUGH_REGISTERS 0
#define KS_E4M3 1
#include "platform_host.h"
#include "tile/element.h"
{text}
struct Raw {{ void* base; i64 stride[5]; int extent[5]; }};
static Expression filled(const double* numbers, const Raw* arrays) {{
  Expression e{{}};
  {setup}
  return e;
}}
extern "C" __attribute__((visibility("default")))
void elements(const double* numbers, const Raw* arrays, const int* n, const float* scores,
              float* out, i64 total) {{
  const Expression e = filled(numbers, arrays);
  i64 at = 0;
  for (int b = 0; b < n[0]; b++)
    for (int h = 0; h < n[1]; h++) {{
      const auto tile = e.tile(b, h, n[2], n[3]);
      for (int q = 0; q < n[2]; q++)
        for (int k = 0; k < n[3]; k++, at++) {{
          const auto row = e.row(tile, q);
          const auto column = e.column(tile, k);
          {calls}
        }}
    }}
}}
extern "C" __attribute__((visibility("default")))
void blocks(const double* numbers, const Raw* arrays, const int* n, int size, float* out,
            i64 total) {{
  const Expression e = filled(numbers, arrays);
  i64 at = 0;
  for (int b = 0; b < n[0]; b++)
    for (int h = 0; h < n[1]; h++) {{
      const auto tile = e.tile(b, h, n[2], n[3]);
      for (int q = 0; q < n[2]; q += size)
        for (int k = 0; k < n[3]; k += size, at++) {{
          const auto rows = e.rows(tile, q, min_of(q + size, n[2]) - 1);
          const auto columns = e.columns(tile, k, min_of(k + size, n[3]) - 1);
          out[at] = e.any(tile, rows, columns), out[total + at] = e.every(tile, rows, columns);
        }}
    }}
}}
"""


class _Raw(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("stride", ctypes.c_longlong * 5),
        ("extent", ctypes.c_int * 5),
    ]


class ExpressionProgram:
    """``elements`` and ``blocks`` of one expression."""

    def __init__(
        self, e: ScoreExpression, arrays: list[Any], planted: tuple[str, str] | None = None
    ) -> None:
        """``planted``: words of the struct's text, there once, and what stands there instead."""
        self.numbers = (ctypes.c_double * max(len(e.numbers), 1))(*e.numbers)
        self.arrays = [np.ascontiguousarray(a) for a in arrays]
        self.raw = (_Raw * max(len(arrays), 1))()
        for raw, x in zip(self.raw, self.arrays, strict=False):
            raw.base = x.ctypes.data
            raw.stride[: x.ndim] = [s // x.itemsize for s in x.strides]
            raw.extent[: x.ndim] = x.shape
        factors = len(array_gradients(e.structure.score))
        self.functions = ["score", "visible", "slope", *(f"factor{i}" for i in range(factors))]
        self.functions += ["score by distance", "visible by distance"]
        text = device_struct(e.structure)
        if planted is not None:
            assert text.count(planted[0]) == 1, text
            text = text.replace(*planted)
        self.library = _compiled(e, text, self.functions)

    def elements(self, scores: Any) -> dict[str, Any]:
        """Every function's values over [B, H, S_q, S_k]."""
        out = np.zeros((len(self.functions), *scores.shape), np.float32)
        x = np.ascontiguousarray(scores, np.float32)
        self._run(self.library.elements, scores.shape, x.ctypes.data_as(ctypes.c_void_p), out)
        return dict(zip(self.functions, out, strict=True))

    def blocks(self, shape: tuple[int, ...], size: int) -> Any:
        """(any, every) over [B, H, query blocks, key blocks]."""
        grid = (*shape[:2], -(-shape[2] // size), -(-shape[3] // size))
        out = np.zeros((2, *grid), np.float32)
        self._run(self.library.blocks, shape, ctypes.c_int(size), out)
        return out.astype(bool)

    def _run(self, function: Any, shape: Any, argument: Any, out: Any) -> None:
        extents = (ctypes.c_int * 4)(*shape)
        total = ctypes.c_longlong(out[0].size)
        to = out.ctypes.data_as(ctypes.c_void_p)
        function(self.numbers, self.raw, extents, argument, to, total)


def _compiled(e: ScoreExpression, struct: str, functions: list[str]) -> ctypes.CDLL:
    setup = [f"e.number{i} = numbers[{i}];" for i in range(len(e.numbers))]
    for i, x in enumerate(e.arrays):
        setup.append(f"e.array{i}.base = (decltype(e.array{i}.base))arrays[{i}].base;")
        for field in ("stride", "extent"):
            axes = range(len(x.shape))
            setup += [f"e.array{i}.{field}_{n} = arrays[{i}].{field}[{n}];" for n in axes]
    calls = []
    for i, function in enumerate(functions):
        name, *by = function.split(maxsplit=1)
        inputs = "tile, row, column" if name == "visible" else "scores[at], tile, row, column"
        inputs += ", e.diagonal(tile, q - k)" if by else ""
        calls.append(f"out[{i} * total + at] = e.{name}({inputs});")
    text = _UNIT.format(text=struct, setup="\n  ".join(setup), calls="\n          ".join(calls))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "host").mkdir()
        for include, source in sources().items():
            (folder / include).write_text(source)
        (folder / "unit.cpp").write_text(text)
        shared = Path(kernels.__file__).parent
        line = [*compiler.command(), *archs.OPTIONS, "-O1", "-fPIC", "-shared", "-I."]
        line += [f"-I{shared}", "unit.cpp", "-o", "made.so", "-lm"]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(folder / "made.so"))
