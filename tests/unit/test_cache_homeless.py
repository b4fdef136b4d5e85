"""The cache of a user who has no home, or who names none: a private folder for temporary files, and
a warning."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs
import pytest
from fakecc import Toolchain, again
from kernelseam import compilation
from kernelseam.compilation import CacheWarning

if sys.platform == "win32":
    pytest.skip("homes and owners are POSIX's", allow_module_level=True)
import pwd

SET = r"Set KERNELSEAM_CACHE_DIR to a folder of yours$"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the cache falls back to, not made yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path / f"kernelseam-{os.geteuid()}"


@pytest.fixture
def homeless(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a container whose user the system does not know."""

    def nobody(key: object) -> None:
        raise KeyError(f"not found: {key}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("KERNELSEAM_CACHE_DIR", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    return temporary


def kept(folder: Path, toolchain: Toolchain, reason: str) -> None:
    """Binaries are kept in the folder, which is private, and the reason is said."""
    with pytest.warns(CacheWarning, match=rf"{reason}: binaries are kept in {folder}\. {SET}"):
        first = again(toolchain)
    assert first.path == folder / "binaries" / f"{first.key}.bin" and first.path.is_file()
    assert {stat.S_IMODE(f.stat().st_mode) for f in (folder, folder / "binaries")} == {0o700}
    with pytest.warns(CacheWarning):
        assert again(toolchain).data == first.data and [e.path for e in compilation.entries()] == [
            first.path
        ]
    assert toolchain.runs == 1


def test_no_home_and_no_entry_in_passwd(
    homeless: Path, toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept(homeless, toolchain, r"^this user has no home folder(?: \(.+\))?")
    assert not (tmp_path / "~").exists()


def test_a_platformdirs_that_leaves_the_tilde(
    temporary: Path, toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its first versions do."""
    monkeypatch.delenv("KERNELSEAM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # as no test had it before
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *a, **k: "~/.cache/kernelseam")
    monkeypatch.chdir(tmp_path)
    kept(temporary, toolchain, "^this user has no home folder")
    assert not (tmp_path / "~").exists()


def test_the_home_of_an_unknown_user(
    temporary: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", "~nosuchuser/x")
    kept(temporary, toolchain, r"^KERNELSEAM_CACHE_DIR = ~nosuchuser/x means no folder \(.+\)")


def test_ones_own_home_where_there_is_none(
    homeless: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", "~/x")
    kept(homeless, toolchain, r"^KERNELSEAM_CACHE_DIR = ~/x means no folder \(.+\)")


def test_a_relative_folder_in_a_removed_one(temporary: Path) -> None:
    script = (
        "import os, shutil, warnings; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "from kernelseam import compilation\n"
        "with warnings.catch_warnings(record=True) as said: print(compilation.cache_folder())\n"
        "assert 'KERNELSEAM_CACHE_DIR = x means no folder' in str(said[0].message), said"
    )
    folder = temporary.parent
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {
        **os.environ,
        "KERNELSEAM_CACHE_DIR": "x",
        "TMPDIR": str(folder),
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.returncode) == (f"{temporary}\n", 0), done.stderr


def test_a_fallback_that_others_can_write_to(homeless: Path, toolchain: Toolchain) -> None:
    homeless.mkdir()
    homeless.chmod(0o777)
    with pytest.warns(CacheWarning) as output:
        assert again(toolchain).path is None
    refusal = [
        str(w.message) for w in output if "compiling without the binary cache" in str(w.message)
    ]
    assert (
        len(refusal) == 1
        and f"cache folder = {homeless}: can be written by others (mode 0777)" in refusal[0]
    )
    assert list(homeless.iterdir()) == []


def test_no_folder_can_be_written(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.warns(CacheWarning, match="this user has no home folder"):
        # to be told when it is wanted
        assert compilation.cache_folder() == Path("/tmp") / homeless.name


def test_the_warning_is_shown_once(homeless: Path) -> None:
    import warnings

    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("default")
        for _ in range(3):
            compilation.cache_folder()
            compilation.entries()
    assert len(output) == 1
