"""Files that are no attention: a message and status 2, whatever is wrong with them."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Command
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernelseam.cli.attention_files import read_inputs
from kernelseam.errors import InvalidValue

SHAPE = (1, 2, 3, 4)


def npy(x: Any) -> bytes:
    """An array as a file."""
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def headed(header: str) -> bytes:
    """An array's file with a header of one's own."""
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def zipped(method: int = zipfile.ZIP_STORED, **members: Any) -> bytearray:
    """A zip of files by name; arrays as .npy. Those of q, k, v that are not named are sound; None
    is left out."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as z:
        for name, x in {
            "q": np.ones(SHAPE),
            "k": np.ones(SHAPE),
            "v": np.ones(SHAPE),
            **members,
        }.items():
            if x is not None:
                z.writestr(f"{name}.npy", x if isinstance(x, bytes) else npy(x))
    return bytearray(file.getvalue())


def damaged(content: bytearray, at: int, *values: int) -> bytearray:
    """The content with other bytes from a place on."""
    content[at : at + len(values)] = bytes(values)
    return content


def deflated() -> bytearray:
    """With a block of a type that there is none of, where the compressed data of q begin."""
    content = zipped(zipfile.ZIP_DEFLATED)
    return damaged(content, content.index(b"q.npy") + len("q.npy"), 0x07)


def central(content: bytearray, offset: int, *values: int) -> bytearray:
    """Other bytes in the first entry of the zip's directory."""
    return damaged(content, content.index(b"PK\x01\x02") + offset, *values)


FILES: dict[str, tuple[bytes | bytearray, str]] = {
    "empty": (b"", "cannot be read: No data left in file"),
    "text": (b"q,k,v\n1,2,3\n", "is neither an .npz nor an .npy. Save arrays of numbers."),
    "pickled": (pickle.dumps({"q": 1}), "is neither an .npz nor an .npy. Save arrays of numbers."),
    "an array": (npy(np.ones(SHAPE)), "must be an .npz"),
    "cut short": (zipped()[:200], "cannot be read: "),
    "objects": (
        zipped(q=np.array([None, {}], object)),
        "holds Python objects, and reading such (pickle) runs what the file says. Save",
    ),
    "tokenize.TokenError": (
        zipped(q=headed("{'descr': '<f8', ")),
        "cannot be read: ('EOF in multi-line statement', ",
    ),
    "nested": (zipped(q=headed("(" * 5000)), "cannot be read: "),
    "a header of its own": (
        zipped(q=headed("{'descr': '<f8', 'shape': (1,)}")),
        "cannot be read: Header does not",
    ),
    "too large": (
        zipped(q=headed(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**50}, 8)}}")),
        "cannot be read: ",
    ),
    "fewer elements": (
        zipped(q=headed("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2, 3, 4)}")),
        "cannot be read: ",
    ),
    "zlib.error": (
        deflated(),
        "cannot be read: Error -3 while decompressing data: invalid block type",
    ),
    "a wrong sum": (damaged(zipped(), 150, 1, 2, 3, 4, 5, 6, 7, 8), "cannot be read: Bad CRC-32"),
    "another method": (
        central(zipped(), 10, 99, 0),
        "cannot be read: That compression method is not supported",
    ),
    "a later version": (central(zipped(), 6, 109, 0), "cannot be read: zip file version 10.9"),
    "encrypted": (
        central(zipped(), 8, 1, 0),
        "cannot be read: File 'q.npy' is encrypted, password required",
    ),
    "no array": (
        zipped(q=b"rubbish"),
        "q = no array: must be an array of real numbers. Save one in ",
    ),
    "words": (zipped(k=np.full(SHAPE, "one")), "k = <U3: must be an array of real numbers"),
    "complex": (
        zipped(v=np.ones(SHAPE, complex)),
        "v = complex128: must be an array of real numbers",
    ),
    "times": (
        zipped(v=np.ones(SHAPE, "M8[s]")),
        "v = datetime64[s]: must be an array of real numbers",
    ),
    "records": (
        zipped(q=np.ones(SHAPE, [("a", "f4")])),
        "q = [('a', '<f4')]: must be an array of real numbers",
    ),
    "a result of words": (
        zipped(out=np.full(SHAPE, "one")),
        "out = <U3: must be an array of real numbers",
    ),
    "integers": (zipped(q=np.ones(SHAPE, np.int32)), "q = int32: must be one of float16"),
    "no axes": (
        zipped(v=np.float32(1), out=np.ones(SHAPE)),
        "axes of q, k, v = (4, 4, 0): must be 4, bhsd",
    ),
    "no elements": (
        zipped(
            q=np.ones((2**10, 1, 1, 1)),
            k=np.ones((2**10, 1, 0, 1)),
            v=np.ones((2**10, 1, 0, 2**45)),
        ),
        "shape of the result = (1024, 1, 1, 35184372088832): does not fit into memory",
    ),
    "other shapes": (zipped(out=np.ones((1, 2, 3, 5))), "out = (1, 2, 3, 5): must be (1, 2, 3, 4)"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [(), ("--verify", "--json")], ids=["plain", "json"])
def test_a_malformed_file_ends_with_2_and_a_message(
    command: Command, tmp_path: Path, name: str, more: tuple[str, ...]
) -> None:
    content, message = FILES[name]
    (tmp_path / "in.npz").write_bytes(content)
    status, out, err = command("attention", "--input", tmp_path / "in.npz", *more)
    assert status == 2 and (json.loads(out)["status"] == 2 if more else out == ""), err
    assert message in err and err.count("\n") == 1 and err.startswith("error: ")


def test_no_file_at_all(command: Command, tmp_path: Path) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "a\0b.npz", "embedded null byte")):
        status, out, err = command("attention", "--input", path)
        assert (status, out) == (2, "") and why in err
    with pytest.raises(InvalidValue, match="embedded null byte"):
        read_inputs(tmp_path / "a\0b.npz", None, ())


def test_what_no_attention_is_made_of_is_not_read(command: Command, tmp_path: Path) -> None:
    """A file of a training run has other things, too."""
    (tmp_path / "in.npz").write_bytes(zipped(names=np.array([None, {}], object), step=b"rubbish"))
    status, out, err = command("attention", "--input", tmp_path / "in.npz", "--verify")
    assert (status, err) == (0, "") and "passed" in out
    (tmp_path / "in.npz").write_bytes(
        zipped(q=None, k=None, v=None, names=np.array([None], object))
    )
    status, _, err = command("attention", "--input", tmp_path / "in.npz")
    assert status == 2 and "has no q, k, v or NAME_q, NAME_k, NAME_v among names." in err


@pytest.mark.parametrize("name", ["file", "allow_pickle", "a/b", "é"])
def test_a_name_of_any_kind_is_kept(command: Command, tmp_path: Path, name: str) -> None:
    arrays = {f"{name}_{x}": np.ones(SHAPE) for x in "qkv"}
    (tmp_path / "in.npz").write_bytes(zipped(q=None, k=None, v=None, **arrays))
    status, _, err = command(
        "attention", "--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz"
    )
    assert (status, err) == (0, "")
    with np.load(tmp_path / "out.npz") as saved:
        assert saved.files == [name] and np.array_equal(saved[name], np.ones(SHAPE))


WHOLE = bytes(zipped()), bytes(zipped(zipfile.ZIP_DEFLATED, out=np.ones(SHAPE)))


@settings(max_examples=300)
@given(
    content=st.sampled_from(WHOLE),
    flips=st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 7)), max_size=8),
    cut=st.one_of(st.none(), st.integers(0, 10**4)),
)
@example(content=WHOLE[0], flips=[], cut=0)
def test_flipped_bits_and_lost_ends(
    content: bytes, flips: list[tuple[int, int]], cut: int | None
) -> None:
    """Either it is read or it is refused."""
    changed = bytearray(content)
    for at, bit in flips:
        changed[at % len(content)] ^= 1 << bit
    read(changed[: None if cut is None else cut % len(content)])


@settings(max_examples=300)
@given(
    header=st.text("{}()[],:'\" \n0123456789-<>|=fiucbOUSVMm8LdescrfortanhpTFlu_#\\", max_size=60),
    keep=st.integers(0, 60),
)
def test_headers_of_any_kind(header: str, keep: int) -> None:
    """In sound zips, where no sum tells of the damage."""
    sound = "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2, 3, 4)}"
    read(zipped(q=headed(sound[:keep] + header)))


def read(content: bytes | bytearray) -> None:
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        file.write(content)
        file.flush()
        try:
            (found,) = read_inputs(Path(file.name), None, ())
        except InvalidValue as e:
            assert e.field == "--input" or e.rule.startswith(("must be", "lacks", "has no"))
        else:
            assert all(isinstance(x, np.ndarray) for x in (found.q, found.k, found.v))
