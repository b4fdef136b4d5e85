"""What the binary cache must not load, and folders that it must not use."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakecc import BUNDLE, Toolchain, again, made, quietly
from kernelseam import compilation
from kernelseam.compilation import CacheWarning, entry
from kernelseam.errors import CompileError, InvalidValue


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _cut_tail(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _replace_by_rubbish(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(1000))


def _take_another_keys_entry(path: Path) -> None:
    path.write_bytes(entry.pack({"key": "0" * 64, "name": "twice"}, b"other code"))


def _take_another_keys_binary(path: Path) -> None:
    """As one that was stored under a wrong key in the first place: whole, and named as it should
    be."""
    path.write_bytes(
        entry.pack({"key": path.stem, "name": "twice"}, made(BUNDLE, "arch1", "0" * 64))
    )


def _lose_the_header(path: Path) -> None:
    path.write_bytes(entry.pack({}, b"other code"))


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _cut_tail,
        _empty,
        _replace_by_rubbish,
        _take_another_keys_entry,
        _take_another_keys_binary,
        _lose_the_header,
    ],
)
def test_a_damaged_entry_is_compiled_again(
    cache: Path, toolchain: Toolchain, damage: Callable[[Path], None]
) -> None:
    good = again(toolchain)
    assert good.path is not None
    damage(good.path)
    with pytest.warns(CacheWarning, match=r"compiled again.*(cut short|digest|another key|header)"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2
    assert quietly(toolchain).data == good.data  # and it is whole again
    assert toolchain.runs == 2


def test_a_binary_that_was_made_from_something_else_is_not_stored(
    cache: Path, toolchain: Toolchain
) -> None:
    """What a compiler answers to another request."""
    other = replace(BUNDLE, defines=(("N", "3"),))
    stray = again(toolchain, other).data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "compile", lambda bundle, arch: stray)
        with pytest.raises(
            CompileError,
            match="(?s)twice did not compile.*does not carry its key, the text of KS_KEY",
        ):
            again(toolchain)
    assert [e.damage for e in compilation.entries()] == [""]  # the other's own
    good = quietly(toolchain)
    assert good.data == made(BUNDLE, "arch1", good.key) and good.data != stray


def test_a_swap_of_whole_entries_is_seen(cache: Path, toolchain: Toolchain) -> None:
    one, two = again(toolchain), again(toolchain, replace(BUNDLE, defines=(("N", "3"),)))
    assert one.path is not None and two.path is not None
    swapped = one.path.with_suffix(".swap")
    one.path.rename(swapped)
    two.path.rename(one.path)
    swapped.rename(two.path)
    assert {e.damage for e in compilation.entries()} == {"it belongs to another key"}
    with pytest.warns(
        CacheWarning, match=r"compiled again.* is not loaded: it belongs to another key"
    ):
        assert again(toolchain).data == one.data


def test_a_truncated_entry_of_any_length_is_refused(cache: Path, toolchain: Toolchain) -> None:
    good = again(toolchain)
    assert good.path is not None
    content = good.path.read_bytes()
    for size in range(len(content)):
        with pytest.raises(entry.Damaged):
            entry.unpack(content[:size])
    assert entry.unpack(content)[1] == good.data


def test_no_flipped_bit_goes_unseen(cache: Path, toolchain: Toolchain) -> None:
    good = again(toolchain)
    assert good.path is not None
    content = good.path.read_bytes()
    size = len(content)
    tail = 400  # header, length, digest and magic, and some of the payload
    for place in [*range(0, size - tail, 97), *range(size - tail, size)]:
        for bit in (0, 7):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            with pytest.raises(entry.Damaged):
                entry.unpack(bytes(flipped))
    good.path.write_bytes(content[:50] + bytes([content[50] ^ 4]) + content[51:])
    with pytest.warns(CacheWarning, match="digest"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2


def test_a_linked_entry_is_not_loaded(cache: Path, toolchain: Toolchain, tmp_path: Path) -> None:
    good = again(toolchain)
    assert good.path is not None
    elsewhere = tmp_path / "elsewhere.bin"
    good.path.rename(elsewhere)
    good.path.symlink_to(elsewhere)
    with pytest.warns(CacheWarning, match="is a symbolic link"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2
    assert not good.path.is_symlink() and elsewhere.exists()  # replaced by an entry of our own


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_can_write_is_not_loaded(
    cache: Path, toolchain: Toolchain, mode: int
) -> None:
    good = again(toolchain)
    assert good.path is not None
    good.path.chmod(mode)
    with pytest.warns(CacheWarning, match=f"can be written by others \\(mode {mode:04o}\\)"):
        again(toolchain)
    assert toolchain.runs == 2
    assert stat.S_IMODE(good.path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_another_user_is_not_loaded(cache: Path, toolchain: Toolchain) -> None:
    good = again(toolchain)
    assert good.path is not None
    os.chown(good.path, 65534, -1)
    assert [e.damage for e in compilation.entries()] == ["belongs to another user (uid 65534)"]
    with pytest.warns(CacheWarning, match=r"belongs to another user \(uid 65534\)"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2
    assert good.path.stat().st_uid == 0  # replaced by an entry of our own
    assert quietly(toolchain).data == good.data


def test_another_users_entry_as_the_system_shows_it(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for whoever cannot give files away: the owner is told otherwise."""
    good = again(toolchain)
    real = os.fstat

    def foreign(handle: int) -> os.stat_result:
        info = list(real(handle))
        info[stat.ST_UID] += 1
        return os.stat_result(info)

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.warns(CacheWarning, match=f"belongs to another user \\(uid {os.geteuid() + 1}\\)"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2


def test_a_pipe_in_an_entrys_place(cache: Path, toolchain: Toolchain) -> None:
    good = again(toolchain)
    assert good.path is not None
    good.path.unlink()
    os.mkfifo(good.path, 0o600)
    # and does not keep us waiting for a writer
    with pytest.warns(CacheWarning, match="is not a file"):
        assert again(toolchain).data == good.data
    assert quietly(toolchain).data == good.data


def test_a_folder_in_an_entrys_place(cache: Path, toolchain: Toolchain) -> None:
    good = again(toolchain)
    assert good.path is not None
    good.path.unlink()
    good.path.mkdir(0o700)
    with pytest.warns(CacheWarning) as warned:
        binary = again(toolchain)
    assert (binary.data, binary.path) == (good.data, None)
    assert "is not a file" in str(warned[0].message) and "is not kept" in str(warned[1].message)
    assert [p.suffix for p in good.path.parent.iterdir() if p.is_file()] == [".lock"]


def test_a_linked_lock_is_not_followed(cache: Path, toolchain: Toolchain, tmp_path: Path) -> None:
    good = again(toolchain)
    assert good.path is not None
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock = good.path.with_suffix(".lock")
    lock.unlink()
    lock.symlink_to(victim)
    good.path.unlink()
    with pytest.warns(CacheWarning, match="compiling without the binary cache"):
        assert again(toolchain).data == good.data
    assert victim.read_text() == "precious"


# ---------------------------------------------------------------- folders that must not be used


@pytest.mark.parametrize("which", ["", "binaries"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_not_used(
    cache: Path, toolchain: Toolchain, which: str, mode: int
) -> None:
    good = again(toolchain)
    (cache / which).chmod(mode)
    with pytest.warns(
        CacheWarning, match=f"can be written by others \\(mode {mode:04o}\\).*chmod 700"
    ):
        binary = again(toolchain)
    assert binary.data == good.data and binary.path is None and toolchain.runs == 2
    with pytest.raises(InvalidValue, match="can be written by others"):
        compilation.entries()
    with pytest.raises(InvalidValue, match="can be written by others"):
        compilation.clear()
    assert good.path is not None and good.path.exists()


def test_a_linked_folder_is_not_used(cache: Path, toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(CacheWarning, match="is a symbolic link"):
        assert again(toolchain).path is None
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("which", ["", "binaries"])
def test_a_folder_of_another_user_is_not_used(
    cache: Path, toolchain: Toolchain, which: str
) -> None:
    again(toolchain)
    os.chown(cache / which, 65534, -1)
    with pytest.warns(CacheWarning, match=r"belongs to another user \(uid 65534\)"):
        assert again(toolchain).path is None
    assert toolchain.runs == 2


def test_another_users_folder_as_the_system_shows_it(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(toolchain)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert again(toolchain).path is None
    assert toolchain.runs == 2


def test_a_file_in_the_folders_place(cache: Path, toolchain: Toolchain) -> None:
    cache.write_text("")
    with pytest.warns(CacheWarning, match="is not a folder"):
        assert again(toolchain).path is None
    assert toolchain.runs == 1
