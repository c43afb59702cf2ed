"""A new folder: whole or not there, with the words of the command that makes it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from vox_host.app.training import check_out
from vox_host.errors import UsageError
from vox_host.whole_folder import Making, refuse_target, whole_folder, write_file

PARENTS = Making(
    option="--out ", failed_code="its-own", failed="as it was", if_failed="Go.", makes_parents=True
)


def fill(out: Path, making: Making | None = None) -> None:
    with whole_folder(out, making) as folder:
        (folder / "inner").mkdir()
        write_file(folder / "inner" / "file", b"content")


def refusal(call, *arguments) -> UsageError:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    return caught.value


def test_it_has_its_name_when_it_is_whole_and_nothing_else_is_left(tmp_path):
    with whole_folder(tmp_path / "out") as folder:
        assert not (tmp_path / "out").exists()
        write_file(folder / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_bytes() == b"content"


def test_folders_above_are_made_by_those_that_may(tmp_path):
    error = refusal(fill, tmp_path / "a" / "b" / "out")
    assert error.code == "out-folder" and f"{tmp_path / 'a' / 'b'} is not a folder" in error.message
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path / "a" / "b" / "out", PARENTS)
    assert (tmp_path / "a" / "b" / "out" / "inner" / "file").exists()
    error = refusal(fill, tmp_path / "a" / "b" / "out" / "inner" / "file" / "x" / "y", PARENTS)
    assert error.code == "out-folder" and "inner/file is not a folder" in error.message


@pytest.mark.parametrize("making", [None, PARENTS])
def test_what_has_come_there_meanwhile_is_left_alone(tmp_path, making):
    def write():
        with whole_folder(tmp_path / "out", making) as folder:
            write_file(folder / "file", b"content")
            # A rename takes the place of an empty folder.
            (tmp_path / "out").mkdir()

    assert refusal(write).code == "out-exists"
    assert list((tmp_path / "out").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_fails_is_told_in_the_command_s_words_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    error = refusal(fill, tmp_path / "out", PARENTS)
    assert (error.code, error.remedy) == ("its-own", "Go.")
    assert error.message == f"--out {tmp_path / 'out'} can't be written: No space left on device; as it was"
    assert refusal(fill, tmp_path / "out").code == "export-failed"
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_goes_and_what_another_process_fills_stays(tmp_path):
    (tmp_path / ".out.0123abcd.partial").mkdir()
    (tmp_path / ".outer.0123abcd.partial").mkdir()
    (tmp_path / ".out.mine.partial").mkdir()
    with whole_folder(tmp_path / "out") as one:
        write_file(one / "file", b"one")
        assert not (tmp_path / ".out.0123abcd.partial").exists()
        fill(tmp_path / "out")
        (tmp_path / "out").rename(tmp_path / "first")
    assert (tmp_path / "out" / "file").read_bytes() == b"one"
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".out.mine.partial", ".outer.0123abcd.partial", "first", "out"]


def test_a_run_says_how_a_run_that_is_there_goes_on(tmp_path):
    assert refusal(check_out, tmp_path).remedy == "Name a new folder."
    (tmp_path / "run.json").touch()
    error = refusal(check_out, tmp_path)
    assert error.message == (
        f"--out {tmp_path} exists; nothing was started, since a run never replaces anything"
    )
    assert f"`vox-host train --resume {tmp_path}`" in error.remedy
    assert "--resume" not in refusal(refuse_target, tmp_path).remedy


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EROFS, errno.EFBIG, errno.EDQUOT])
def test_room_is_asked_for_only_where_room_is_short(tmp_path, monkeypatch, code):
    def failing(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    expected = "Go." if code == errno.EDQUOT else "Name another place."
    assert refusal(fill, tmp_path / "out", PARENTS).remedy == expected


@pytest.mark.parametrize(
    ("flags", "says", "helps"),
    [
        (os.ST_RDONLY, "is on a read-only file system", "Make that file system writable"),
        (0, "is not writable", "Allow this user to write there"),
    ],
)
def test_a_folder_that_may_not_be_written_is_not_to_be_made(tmp_path, monkeypatch, flags, says, helps):
    # Whoever runs the tests may be root, who may write wherever the disk takes it.
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(UsageError) as caught:
        refuse_target(tmp_path / "new")
    assert f"{tmp_path} {says}; nothing was written" in caught.value.message
    assert caught.value.remedy == f"{helps}, or name another place."
