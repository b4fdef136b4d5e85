"""Attentions in files: q, k and v of an .npz, and results saved."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

Array = npt.NDArray[Any]
_NAMES = re.compile(r"(?:(.*)_)?(q|k|v|out)", re.DOTALL)
"""Array names of an attention: an optional name, then the operand."""


@dataclass(frozen=True)
class Inputs:
    """q, k and v of one attention in the file's layout, and a stored result to compare with."""

    name: str
    q: Array
    k: Array
    v: Array
    stored: Array | None = None
    note: str = ""

    def empty_out(self, layout: str) -> Array:
        """An array of the result's shape and dtype that takes no memory until it is written."""
        if self.q.ndim != 4 or self.v.ndim != 4:
            raise InvalidValue(
                f"{self.name or 'file'}: axes of q, k, v",
                (self.q.ndim, self.k.ndim, self.v.ndim),
                f"must be 4, {layout}",
                "Give arrays of four axes",
            )
        if not self.q.shape[3]:
            raise InvalidValue(
                f"{self.name or 'file'}: columns of q", 0, "must be 1 at least", "Give such a q"
            )
        shape = (*self.q.shape[:3], self.v.shape[3])
        try:
            return np.empty(shape, self.q.dtype)
        # an array without elements may have extents whose product overflows
        except (ValueError, MemoryError):
            raise InvalidValue(
                f"{self.name or 'file'}: shape of the result",
                shape,
                "does not fit into memory",
                "Give smaller arrays",
            ) from None


def read_inputs(path: Path, dtype: DType | None, changes: tuple[str, ...]) -> list[Inputs]:
    """Every q, k, v in an .npz, in the order of their names, converted to ``dtype`` if one is
    given.

    ``changes``: given options that stored results were computed without.

    Raises InvalidValue for any other file.
    """
    arrays, others = _load(path)
    names = {m[1] or "" for key in arrays if (m := re.fullmatch(_NAMES, key)) and m[2] != "out"}
    if not names:
        raise InvalidValue(
            "--input",
            path,
            "has no q, k, v or NAME_q, NAME_k, NAME_v among "
            f"{', '.join([*arrays, *others]) or 'nothing'}",
            "Name the arrays so",
        )
    return [_read_one(path, name, arrays, dtype, changes) for name in sorted(names)]


def _load(path: Path) -> tuple[dict[str, Array], list[str]]:
    """The attentions' arrays of an .npz, by name; and the names of all others, unread."""
    try:
        with path.open("rb") as file:
            array = np.load(file, allow_pickle=False)
            names = [] if isinstance(array, np.ndarray) else array.files
            arrays = {name: array[name] for name in names if re.fullmatch(_NAMES, name)}
    # the file is untrusted: zipfile, zlib, lzma, tokenize and NumPy each raise their own errors
    except Exception as e:
        if "pickle" in str(e):  # NumPy takes every file without a magic number for a pickle
            rule = "is neither an .npz nor an .npy"
            if str(e).startswith("Object arrays"):
                rule = "holds Python objects, and reading such (pickle) runs what the file says"
            raise InvalidValue("--input", path, rule, "Save arrays of numbers") from e
        why = " ".join(str(e).split()) or type(e).__name__
        raise InvalidValue(
            "--input", path, f"cannot be read: {why}", "Give an .npz with q, k and v"
        ) from e
    if isinstance(array, np.ndarray):
        raise InvalidValue("--input", path, "must be an .npz", "Save it with numpy.savez")
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray) or x.dtype.kind not in "biuf":
            what = str(x.dtype) if isinstance(x, np.ndarray) else "no array"
            raise InvalidValue(
                name, what, "must be an array of real numbers", f"Save one in {path}"
            )
    return arrays, [name for name in names if name not in arrays]


def _read_one(
    path: Path, name: str, arrays: dict[str, Array], dtype: DType | None, changes: tuple[str, ...]
) -> Inputs:
    prefix = f"{name}_" if name else ""
    if missing := [prefix + x for x in "qkv" if prefix + x not in arrays]:
        raise InvalidValue(
            "--input", path, f"lacks {', '.join(missing)}", "Give q, k and v together"
        )
    q, k, v = (arrays[prefix + x] for x in "qkv")
    stored, note = arrays.get(f"{prefix}out"), ""
    target = DType.of(q.dtype, f"{prefix}q") if dtype is None else dtype
    exact = all(np.can_cast(x.dtype, target.numpy, "safe") for x in (q, k, v))
    q, k, v = (x.astype(target.numpy, copy=False) for x in (q, k, v))
    if stored is not None:
        if changes or not exact:
            why = f"the inputs were rounded to {target}"
            if changes:
                why = (
                    "it is of every key"
                    if "causal" in changes
                    else f"it was made without {', '.join(changes)}"
                )
            stored, note = None, f"{prefix}out is not compared: {why}"
        elif q.ndim == v.ndim == 4 and stored.shape != (shape := (*q.shape[:3], v.shape[-1])):
            raise InvalidValue(
                f"{prefix}out", stored.shape, f"must be {shape}", "Store the result of this q, k, v"
            )
    return Inputs(name, q, k, v, stored, note)


def check_output(path: Path) -> None:
    if path.suffix not in (".npy", ".npz"):
        raise InvalidValue("--output", path, "must end in .npy or .npz", "Name it so")
    if not path.parent.is_dir():
        raise InvalidValue("--output", path, f"there is no folder {path.parent}", "Make it first")


def save(path: Path, results: dict[str, Array]) -> None:
    """Save results: into an .npz by name; into an .npy the only one, or several of one shape,
    stacked.

    bfloat16, which the format lacks, is saved as float32, exactly.
    """
    arrays = {n: x.astype(np.float32) if x.dtype.kind == "V" else x for n, x in results.items()}
    try:
        if path.suffix == ".npz":
            # not numpy.savez, whose parameter names could be results' names
            with zipfile.ZipFile(path, "w") as file:
                for name, x in arrays.items():
                    with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, x, allow_pickle=False)
        elif len(arrays) == 1:
            np.save(path, next(iter(arrays.values())))
        elif len({x.shape for x in arrays.values()}) == 1:
            np.save(path, np.stack(list(arrays.values())))
        else:
            raise InvalidValue(
                "--output", path, "results of several shapes do not fit one array", "Name an .npz"
            )
    except OSError as e:
        raise InvalidValue("--output", path, f"cannot be written: {e}", "Name another place") from e
