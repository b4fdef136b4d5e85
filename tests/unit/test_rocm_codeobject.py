"""Reading a code object: a small one made here, byte by byte, and what is none."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from kernelseam.errors import InvalidValue

pytest.importorskip("kernelseam_rocm", reason="kernelseam-rocm is not installed")
import msgpack  # noqa: E402
from kernelseam_rocm import codeobject, disassembly  # noqa: E402

CODE = bytes(range(40))
KERNEL = {
    ".name": "k",
    ".vgpr_count": 96,
    ".agpr_count": 32,
    ".sgpr_count": 40,
    ".vgpr_spill_count": 3,
    ".sgpr_spill_count": 4,
    ".private_segment_fixed_size": 16,
    ".group_segment_fixed_size": 512,
    ".wavefront_size": 64,
    ".max_flat_workgroup_size": 256,
    ".args": [
        {".offset": 0, ".size": 8, ".value_kind": "global_buffer"},
        {".offset": 8, ".size": 24, ".value_kind": "by_value"},
        {".offset": 32, ".size": 4, ".value_kind": "hidden_block_count_x"},
    ],
}


def elf(kernel: dict[str, Any] = KERNEL, machine: int = 224, note: bytes = b"AMDGPU\0") -> bytes:
    """An ELF with a metadata note, one loaded segment and a symbol for the kernel in it."""
    metadata = msgpack.packb(
        {"amdhsa.target": "amdgcn-amd-amdhsa--gfx942", "amdhsa.kernels": [kernel]}
    )
    name = note + bytes(-len(note) % 4)
    # a note of somebody else's comes first
    other = struct.pack("<III", 4, 4, 1) + b"GNU\0" + b"\1\2\3\4"
    notes = (
        other
        + struct.pack("<III", len(note), len(metadata), 32)
        + name
        + metadata
        + bytes(-len(metadata) % 4)
    )
    names = b"\0k\0"
    at_notes = 64 + 2 * 56
    at_code = at_notes + len(notes)
    at_symbols = at_code + len(CODE)
    at_names = at_symbols + 2 * 24
    at_sections = at_names + len(names)
    address = 0x1000 + 8  # the kernel begins 8 bytes into its segment
    head = (
        b"\x7fELF\x02\x01\x01\x40"
        + bytes(8)
        + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, at_sections, 0, 64, 56, 2, 64, 3, 0)
    )
    segments = struct.pack("<IIQQQQQQ", 4, 4, at_notes, 0, 0, len(notes), len(notes), 4)
    segments += struct.pack("<IIQQQQQQ", 1, 5, at_code, 0x1000, 0x1000, len(CODE), len(CODE), 4096)
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 1, address, 24)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 11, 0, 0, at_symbols, len(symbols), 2, 1, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, at_names, len(names), 0, 0, 1, 0)
    return head + segments + notes + CODE + symbols + names + sections


def test_metadata_and_machine_code_are_found() -> None:
    code = codeobject.parse(elf())
    assert code.target == "amdgcn-amd-amdhsa--gfx942"
    assert code.code == {"k": (0x1008, CODE[8:32])}


def test_facts_hold_explicit_arguments_and_every_spill() -> None:
    facts = codeobject.facts(
        codeobject.parse(elf()), "k", {"matrix_instructions": 5, "scratch_instructions": 2}
    )
    assert (facts.name, facts.registers, facts.spills) == ("k", 96, 7)
    assert (facts.scratch_bytes, facts.shared_bytes, facts.matrix_instructions) == (16, 512, 5)
    assert facts.parameters == ((0, 8), (8, 24))
    assert facts.extra == {
        "sgprs": 40,
        "agprs": 32,
        "sgpr_spills": 4,
        "vgpr_spills": 3,
        "wavefront": 64,
        "max_threads": 256,
        "code_bytes": 24,
        "scratch_instructions": 2,
    }


def test_without_a_disassembler_matrix_instructions_are_unknown() -> None:
    facts = codeobject.facts(codeobject.parse(elf()), "k", {})
    assert facts.matrix_instructions == -1
    assert "scratch_instructions" not in facts.extra


@pytest.mark.parametrize(
    "data",
    [b"", b"\x7fELF", elf(machine=62), elf(note=b"OTHER\0\0\0"), elf()[:200], b"x" * 4096],
    ids=["empty", "short", "of another machine", "without metadata", "cut off", "no ELF"],
)
def test_what_is_no_code_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidValue) as caught:
        codeobject.parse(data)
    assert str(caught.value) == (
        f"binary = {len(data)} bytes: must be an AMDGPU code object in ELF form. Compile it again."
    )


HUGE = struct.pack("<Q", 2**62)
SECTIONS = len(elf()) - 3 * 64


@pytest.mark.parametrize(
    ("data", "at"),
    [
        (b"\0\0", 54),
        (b"\0\0", 58),
        (HUGE, 40),
        (HUGE, SECTIONS + 64 + 24),
        (b"\1", SECTIONS + 64 + 56),
        (HUGE, 64 + 8),
        (HUGE, 64 + 56 + 8),
        (HUGE, 64 + 56 + 32),
    ],
    ids=[
        "size of program headers",
        "size of section headers",
        "section headers",
        "symbols",
        "size of a symbol",
        "notes",
        "code's place",
        "code's size",
    ],
)
def test_headers_that_claim_too_much(data: bytes, at: int) -> None:
    bad = bytearray(elf())
    bad[at : at + len(data)] = data
    with pytest.raises(InvalidValue, match="must be an AMDGPU code object in ELF form"):
        codeobject.parse(bytes(bad))


def test_damage_is_refused_by_name_or_does_not_matter() -> None:
    rng, whole, refused = random.Random(3), elf(), 0
    for _ in range(500):
        bad = bytearray(whole)
        for _ in range(3):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        try:
            codeobject.parse(bytes(bad))
        except InvalidValue:
            refused += 1
    assert 100 < refused < 500


def test_without_the_library_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "library", lambda: None)
    assert disassembly.count(codeobject.parse(elf())) == {"k": {}}


@pytest.mark.parametrize(
    ("instruction", "kinds"),
    [
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], 0", {"matrix_instructions"}),
        ("v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]", {"matrix_instructions"}),
        ("scratch_store_b32 off, v1, off", {"scratch_instructions"}),
        (
            "buffer_store_dword v1, off, s[0:3], s32",
            {"scratch_instructions", "global_instructions"},
        ),
        ("ds_read_b128 v[0:3], v4", {"shared_instructions", "wide_shared_instructions"}),
        ("ds_load_u16 v0, v4", {"shared_instructions"}),
        (
            "global_load_dwordx4 v[0:3], v[4:5], off",
            {"global_instructions", "wide_global_instructions"},
        ),
        (
            "global_store_b128 v[4:5], v[0:3], off",
            {"global_instructions", "wide_global_instructions"},
        ),
        ("flat_store_dword v[2:3], v20", {"global_instructions", "flat_instructions"}),
        ("v_fma_f32 v0, v1, v2, v3", set()),
        ("s_waitcnt lgkmcnt(0)", set()),
    ],
)
def test_instructions_are_distinguished(
    instruction: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(code: object, kernel: str, handle: Any) -> bool:
        handle(0, instruction)
        return True

    monkeypatch.setattr(disassembly, "instructions", one)
    counted = disassembly.count(codeobject.parse(elf()))["k"]
    assert {kind for kind, n in counted.items() if n} == kinds
