"""The counter of AMD's kernels, on small texts of disassembly and on waves of this process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
from kernelseam.errors import UnknownName  # noqa: E402
from kernelseam_rocm_emulator.counting import banks, iteration, model  # noqa: E402
from kernelseam_rocm_emulator.counting.instructions import (  # noqa: E402
    Access,
    Class,
    Instruction,
    access,
    accesses,
    classify,
    shape,
)
from kernelseam_rocm_emulator.counting.listing import Listing, listing  # noqa: E402
from kernelseam_rocm_emulator.counting.loops import flow, loops  # noqa: E402
from kernelseam_rocm_emulator.counting.model import Cycles, unit  # noqa: E402
from kernelseam_rocm_emulator.counting.recorder import Recorder  # noqa: E402
from kernelseam_rocm_emulator.counting.segments import segments  # noqa: E402
from kernelseam_rocm_emulator.counting.trips import trips  # noqa: E402
from kernelseam_rocm_emulator.wave import EXEC, Wave  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "tools"))


EVERY = np.ones(64, bool)
MFMA = "v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], v[0:15]"


def lines(text: str) -> Listing:
    """Instructions of 4 bytes, one a line. A branch names the line that it leads to: @3."""
    rows = [row.strip() for row in text.strip().splitlines()]
    for i, row in enumerate(rows):
        name, at, target = row.partition("@")
        rows[i] = f"{name}{int(target) - i - 1 & 0xFFFF}" if at else row
    return listing(tuple((4 * i, row) for i, row in enumerate(rows)))


# ---------------------------------------------------------------- instructions


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v_mfma_f32_32x32x16_bf16", Class.MATRIX),
        ("v_smfmac_f32_16x16x32_f16", Class.MATRIX),
        ("v_wmma_f32_16x16x16_f16", Class.MATRIX),
        ("v_swmmac_f32_16x16x32_f16", Class.MATRIX),
        ("v_exp_f32", Class.TRANSCENDENTAL),
        ("v_s_rcp_f32", Class.TRANSCENDENTAL),
        ("v_accvgpr_read_b32", Class.MOVE),
        ("v_accvgpr_mov_b32", Class.MOVE),
        ("v_pk_mul_f32", Class.VECTOR),
        ("v_fmac_f32", Class.VECTOR),
        ("ds_bpermute_b32", Class.LDS_LANES),
        ("ds_read2st64_b64", Class.LDS_READ),
        ("ds_load_b128", Class.LDS_READ),
        ("ds_write_b64", Class.LDS_WRITE),
        ("ds_add_rtn_u32", Class.LDS_WRITE),
        ("global_load_lds_dwordx4", Class.LOAD),
        ("buffer_store_short", Class.STORE),
        ("global_atomic_add_f32", Class.ATOMIC),
        ("buffer_inv", Class.CACHE),
        ("global_wb", Class.CACHE),
        ("scratch_load_dword", Class.SCRATCH),
        ("s_load_dwordx4", Class.SCALAR_LOAD),
        ("s_waitcnt", Class.WAIT),
        ("s_wait_dscnt", Class.WAIT),
        ("s_barrier_signal", Class.BARRIER),
        ("s_delay_alu", Class.HINT),
        ("s_cbranch_scc1", Class.SCALAR),
    ],
)
def test_classes(name: str, expected: Class) -> None:
    assert classify(name) is expected


def test_an_unknown_mnemonic_is_not_counted_as_something_else() -> None:
    with pytest.raises(ValueError, match="t_bone_b32 is of no class"):
        classify("t_bone_b32")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ds_read_b128 v[0:3], v4 offset:16", Access(Class.LDS_READ, 16, 4, offsets=(16,))),
        ("ds_load_u16_d16_hi v0, v7", Access(Class.LDS_READ, 2, 7)),
        (
            "ds_read2_b64 v[0:3], v9 offset0:2 offset1:0x3",
            Access(Class.LDS_READ, 8, 9, offsets=(16, 24)),
        ),
        (
            "ds_write2st64_b32 v1, v2, v3 offset1:1",
            Access(Class.LDS_WRITE, 4, 1, offsets=(0, 256)),
        ),
        (
            "ds_store_2addr_stride64_b64 v1, v[2:3], v[4:5] offset0:1 offset1:2",
            Access(Class.LDS_WRITE, 8, 1, offsets=(512, 1024)),
        ),
        ("ds_add_rtn_u32 v0, v5, v6", Access(Class.LDS_WRITE, 4, 5)),
        (
            "global_load_dwordx4 v[0:3], v8, s[4:5] offset:-64",
            Access(Class.LOAD, 16, 8, 4, (-64,)),
        ),
        ("global_load_dwordx2 v[0:1], v[8:9], off", Access(Class.LOAD, 8, 8)),
        ("global_store_b64 v[2:3], v[0:1], off offset:8", Access(Class.STORE, 8, 2, offsets=(8,))),
        ("global_store_short_d16_hi v5, v6, s[2:3]", Access(Class.STORE, 2, 5, 2)),
        ("global_load_lds_dwordx4 v3, s[0:1]", Access(Class.LOAD, 16, 3, 0, to_lds=True)),
        ("global_load_dword v1, v2, vcc", Access(Class.LOAD, 4, 2, 106)),
        ("global_load_d16_b16 v1, v2, s[6:7]", Access(Class.LOAD, 2, 2, 6)),
        (
            "buffer_load_dwordx4 v[0:3], v4, s[8:11], 0 offen offset:32",
            Access(Class.LOAD, 16, 4, 8, (32,)),
        ),
        ("buffer_load_ushort v0, off, s[8:11], 0", Access(Class.LOAD, 2, -1, 8)),
        (
            "buffer_load_dword v4, s[8:11], 0 offen lds",
            Access(Class.LOAD, 4, 4, 8, to_lds=True),
        ),
        ("global_atomic_add_f32 v1, v2, s[0:1]", Access(Class.ATOMIC, 4, 1, 0)),
        ("global_atomic_add_f32 v9, v1, v2, s[0:1] sc0", Access(Class.ATOMIC, 4, 1, 0)),
    ],
)
def test_accesses(text: str, expected: Access) -> None:
    assert access(Instruction(0, text)) == expected


def test_what_accesses_no_memory() -> None:
    actual = lines(f"{MFMA}\nds_bpermute_b32 v0, v1, v2\ns_load_dword s0, s[2:3], 0x0")
    assert accesses(actual) == {}


def test_branches_lead_where_simm16_says() -> None:
    assert Instruction(0x100, "s_cbranch_scc0 65535").target == 0x100
    assert Instruction(0x100, "s_branch 2").target == 0x10C
    assert Instruction(0x100, "v_nop").target is None
    assert not Instruction(0, "s_endpgm").falls_through


def test_shapes() -> None:
    assert shape("v_mfma_f32_32x32x16_bf16") == "32x32x16_bf16"
    assert unit("gfx950").matrix_cycles("16x16x32_f16") == 16
    assert unit("gfx942").matrix_cycles("32x32x8_bf16") == 32
    assert unit("gfx90a").matrix_cycles("32x32x8_bf16_1k") == 64
    with pytest.raises(UnknownName, match="must be of a shape in the model: 16x16x16, 32x32x8"):
        unit("gfx942").matrix_cycles("4x4x4_f16")


# ---------------------------------------------------------------- loops

NEST = lines(
    f"""s_mov_b32 s0, 0
    s_mov_b32 s1, 0
    global_load_dwordx4 v[0:3], v[4:5], off
    ds_write_b128 v6, v[0:3]
    s_mov_b32 s2, 0
    {MFMA}
    s_add_i32 s2, s2, 8
    s_cmp_lt_u32 s2, 32
    s_cbranch_scc1 @5
    s_cbranch_execz @11
    v_exp_f32_e32 v9, v9
    s_add_i32 s0, s0, 1
    s_cmp_lg_u32 s0, s9
    s_cbranch_scc1 @2
    s_endpgm"""
)


def test_a_nest_of_loops() -> None:
    (outer,) = loops(flow(NEST))
    (inner,) = outer.inner
    assert (outer.header, inner.header, inner.inner) == (8, 20, ())
    assert outer.blocks == {8, 20, 36, 40, 44} and inner.blocks == {20}


def test_a_loop_of_its_own_block_and_straight_code() -> None:
    graph = flow(lines("v_nop\ns_cbranch_vccnz @0\ns_branch @3\ns_endpgm"))
    assert [(x.header, x.blocks) for x in loops(graph)] == [(0, frozenset({0}))]
    assert graph.follows == {0: (0, 8), 8: (12,), 12: ()}


def test_the_hot_loop_holds_its_loops_over_fragments() -> None:
    """Four trips of the inner loop; what may be branched around is left out."""
    actual = iteration.compiled(NEST, "gfx942")
    assert actual is not None and actual.header == 8
    assert actual.classes[Class.MATRIX] == 4 and Class.TRANSCENDENTAL not in actual.classes
    assert actual.names == {
        "global_load_dwordx4": 1,
        "ds_write_b128": 1,
        "s_mov_b32": 1,
        "32x32x8_f16": 4,
        "s_add_i32": 5,
        "s_cmp_lt_u32": 4,
        "s_cbranch_scc1": 5,
        "s_cbranch_execz": 1,
        "s_cmp_lg_u32": 1,
    }
    assert actual.cycles == Cycles(matrix=128, vector=0, other=4 * 19, lds=8)


def test_a_kernel_without_matrix_instructions_has_no_hot_loop() -> None:
    assert iteration.compiled(lines("v_nop\ns_cbranch_vccnz @0\ns_endpgm"), "gfx942") is None


def test_of_two_loops_the_one_with_fewer_cycles() -> None:
    actual = iteration.compiled(
        lines(
            f"""{MFMA}
            v_accvgpr_read_b32 v1, a1
            ds_write_b32 v0, v1
            s_cbranch_scc1 @0
            {MFMA}
            ds_write_b32 v0, v1
            s_cbranch_scc1 @4
            s_endpgm"""
        ),
        "gfx942",
    )
    assert actual is not None and (actual.header, actual.count([Class.MOVE])) == (16, 0)


def test_narrow_loads_next_to_wide_ones_are_the_ragged_ends() -> None:
    actual = iteration.compiled(
        lines(
            f"""s_cbranch_execz @2
            global_load_dwordx4 v[0:3], v[4:5], off
            s_cbranch_execz @5
            global_load_ushort v0, v[4:5], off
            global_load_ushort v1, v[4:5], off
            ds_write_b128 v6, v[0:3]
            {MFMA}
            s_cbranch_scc1 @0
            s_endpgm"""
        ),
        "gfx950",
    )
    assert actual is not None
    assert (actual.names["global_load_dwordx4"], actual.count([Class.LOAD])) == (1, 1)


@pytest.mark.parametrize(
    ("start", "step", "compare", "branch", "expected"),
    [
        ("s_mov_b32 s1, -16", "s_add_i32 s1, s1, 64", "s_cmpk_gt_u32 s1, 0x6f", "scc0", 2),
        ("s_mov_b32 s1, 0", "s_add_i32 s1, s1, 1", "s_cmp_lg_u32 s1, 4", "scc1", 4),
        ("s_movk_i32 s1, 0x20", "s_sub_i32 s1, s1, 8", "s_cmp_gt_i32 s1, 0", "scc1", 4),
        ("s_mov_b32 s1, -3", "s_addk_i32 s1, 0x1", "s_cmp_eq_u32 s1, 0", "scc0", 3),
        ("s_movk_i32 s1, 0xff80", "s_addk_i32 s1, 0x40", "s_cmpk_lt_i32 s1, 0xffc1", "scc1", 2),
        ("s_mov_b64 s[0:1], 0", "s_add_i32 s1, s1, 1", "s_cmp_lg_u32 s1, 4", "scc1", None),
        ("s_mov_b32 s1, s5", "s_add_i32 s1, s1, 1", "s_cmp_lg_u32 s1, 4", "scc1", None),
        ("s_mov_b32 s1, 0", "s_add_i32 s1, s1, s2", "s_cmp_lg_u32 s1, 4", "scc1", None),
        ("s_mov_b32 s1, 0", "s_add_i32 s1, s1, 1", "s_cmp_lg_u32 s1, s6", "scc1", None),
        ("s_mov_b32 s1, 1", "s_add_i32 s1, s1, 2", "s_cmp_lg_u32 s1, 0", "scc1", None),
        # a sum with the counter, of before its step and of after it
        (
            "s_mov_b32 s1, 0",
            "s_add_i32 s2, s1, 48\ns_add_i32 s1, s1, 64",
            "s_cmp_gt_u32 s2, 0x6f",
            "scc0",
            2,
        ),
        (
            "s_mov_b32 s1, 0",
            "s_add_i32 s1, s1, 64\ns_add_i32 s2, s1, 48",
            "s_cmp_gt_u32 s2, 0x6f",
            "scc0",
            1,
        ),
        (
            "s_mov_b32 s1, 0",
            "s_add_i32 s2, s3, 48\ns_add_i32 s1, s1, 64",
            "s_cmp_gt_u32 s2, 0x6f",
            "scc0",
            None,
        ),
    ],
)
def test_trips(start: str, step: str, compare: str, branch: str, expected: int | None) -> None:
    graph = flow(
        lines(f"{start}\nv_nop\ns_nop 0\n{step}\n{compare}\ns_cbranch_{branch} @2\ns_endpgm")
    )
    (loop,) = loops(graph)
    assert trips(graph, loop) == expected


# ---------------------------------------------------------------- LDS and segments


@pytest.mark.parametrize(("arch", "lanes"), [("gfx942", 64), ("gfx950", 64), ("gfx1201", 32)])
@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_a_stride_is_a_conflict_of_as_many_ways(
    arch: str, lanes: int, ways: int, width: int
) -> None:
    addresses = np.arange(lanes, dtype=np.int64) * width * ways
    for reads in (True, False):
        served = unit(arch).banks(reads, width)
        taken, fewest = banks.clocks(served, width, addresses, EVERY[:lanes])
        assert (taken, fewest) == (ways * len(served.phases), len(served.phases))
        assert fewest == -(-lanes * width // (4 * served.count))


def test_lanes_that_read_one_word_share_it_and_idle_phases_take_no_clock() -> None:
    words, quads = (unit("gfx942").banks(True, width) for width in (4, 16))
    one = np.zeros(64, np.int64)
    assert banks.clocks(words, 4, one, EVERY) == (2, 2)
    assert banks.clocks(words, 4, one, np.arange(64) < 32) == (1, 1)
    assert banks.clocks(words, 4, one, ~EVERY) == (0, 0)
    # Lanes 0 and 20 are of one phase, 0 and 8 are not.
    for other, clocks in ((20, (2, 1)), (8, (2, 2))):
        chosen = np.isin(np.arange(64), (0, other))
        assert banks.clocks(quads, 16, np.arange(64) * 128, chosen) == clocks


def test_every_lane_is_served_once() -> None:
    for actual in model.UNITS.values():
        for widths in (actual.reads, actual.writes):
            for size, served in widths.items():
                lanes = [lane for phase in served.value.phases for lane in phase]
                assert sorted(lanes) == list(range(actual.lanes))
                assert all(len(p) * size <= 4 * served.value.count for p in served.value.phases)


def test_segments_of_strided_loads() -> None:
    at = np.arange(64, dtype=np.int64)
    assert segments(4, at * 4).touched == (4, 2) == segments(4, at * 4).fewest
    half = segments(4, at * 8)
    assert (half.bytes, half.touched, half.fewest) == (256, (8, 4), (4, 2))
    assert segments(16, at * 256).touched == (64, 64)
    assert segments(16, np.array([56])).touched == (2, 1)  # across an edge
    same = segments(8, np.zeros(64, np.int64))
    assert (same.bytes, same.touched, same.fewest) == (512, (1, 1), (1, 1))


class Lanes(Wave):
    """A wave in memory of this process, every lane active."""

    def __init__(self, lanes: int) -> None:
        self.keep = [np.zeros(n, np.uint32) for n in (260, 256 * lanes, 256 * lanes, 64)]
        scalars, vectors, accumulators, shared = (x.ctypes.data for x in self.keep)
        super().__init__(lanes, scalars, vectors, accumulators, shared, 0)
        self.scalars[EXEC : EXEC + 2] = 0xFFFFFFFF


def test_the_recorder_reads_addresses_from_registers() -> None:
    actual = lines(
        """global_load_dwordx2 v[0:1], v[2:3], off offset:128
        global_load_dword v0, v2, s[4:5]
        buffer_load_dword v0, v2, s[4:7], 0 offen
        ds_read2_b32 v[0:1], v6 offset0:1 offset1:33
        v_nop"""
    )
    wave = Lanes(64)
    wave.vectors[2] = np.arange(64) * 8
    wave.vectors[3] = 7  # of 64 bits: all in one place, high up
    wave.vectors[6] = np.arange(64) * 8
    wave.set_pair(4, 1 << 40 | 64 | 0x12340000 << 32 & 0xFFFF << 48)
    record = Recorder("gfx942", accesses(actual))
    for x in (*actual, *actual[:2]):
        record(x.address, wave)
    first, second, third, shared, other = (record.tallies[x.address] for x in actual)
    assert (first.count, first.bytes, first.touched, first.fewest) == (2, 1024, [16, 8], [16, 8])
    assert (second.count, second.touched, second.fewest) == (2, [16, 10], [8, 4])
    assert (third.count, third.touched, third.fewest) == (1, [8, 5], [4, 2])
    assert (shared.lds_clocks, shared.lds_fewest, shared.bytes) == (8, 4, 512)
    assert (other.count, other.bytes, other.lds_clocks) == (1, 0, 0)
    wave.scalars[EXEC : EXEC + 2] = 0
    record(0, wave)
    assert (first.count, first.bytes) == (3, 1024)


def test_loads_straight_to_lds_take_its_clocks() -> None:
    actual = lines(f"{MFMA}\nglobal_load_lds_dwordx4 v2, s[4:5]\ns_cbranch_scc1 @0\ns_endpgm")
    record = Recorder("gfx950", accesses(actual))
    record(4, Lanes(64))
    assert (record.tallies[4].lds_clocks, record.tallies[4].bytes) == (8, 1024)
    hot = iteration.compiled(actual, "gfx950")
    assert hot is not None and hot.cycles.lds == 8 and hot.conflicts(Class.LDS_WRITE) is None


def test_an_iteration_of_what_ran() -> None:
    """The loop is the one that did more; counts are means over its iterations."""
    wave, record = Lanes(64), Recorder("gfx942", accesses(NEST))
    wave.vectors[6] = np.arange(64) * 16
    for _ in range(3):
        for x in NEST[2:5]:
            record(x.address, wave)
        for _ in range(4):
            record(NEST[5].address, wave)
    record(NEST[10].address, wave)
    actual = iteration.executed(NEST, "gfx942", record.tallies)
    assert actual is not None and (actual.header, actual.times) == (8, 3)
    assert actual.classes[Class.MATRIX] == 4
    assert actual.classes[Class.TRANSCENDENTAL] == pytest.approx(1 / 3)
    assert actual.cycles.matrix == pytest.approx(128) and actual.cycles.lds == pytest.approx(8)
    assert actual.conflicts(Class.LDS_WRITE) == 1 and actual.conflicts(Class.LDS_READ) is None
