"""The room that the files of a folder take, while it changes."""

import os
import shutil
from pathlib import Path

import pytest

from asyncrl.files import disk_usage


def test_the_bytes_of_all_files_are_counted(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "one").write_bytes(b"x" * 8192)
    (tmp_path / "inner" / "two").write_bytes(b"x" * 4096)
    blocks = sum((tmp_path / name).lstat().st_blocks for name in ("one", "inner/two"))
    assert disk_usage(tmp_path) == blocks * 512 > 0


def test_a_folder_and_a_file_that_are_removed_meanwhile_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "weights").write_bytes(b"x" * 4096)
    (tmp_path / "kept").write_bytes(b"x" * 4096)
    (tmp_path / "removed").write_bytes(b"x" * 4096)
    lstat = os.lstat

    def as_they_go(path: str) -> os.stat_result:
        monkeypatch.setattr(os, "lstat", lstat)
        shutil.rmtree(tmp_path / "model.partial")
        (tmp_path / "removed").unlink()
        (tmp_path / "kept").unlink()
        return lstat(path)

    monkeypatch.setattr(os, "lstat", as_they_go)
    assert disk_usage(tmp_path) == 0
