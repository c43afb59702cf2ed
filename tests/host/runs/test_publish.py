"""A run has one whole adapter at every moment, whatever ends a publish."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.runs import a_checkpoint, a_run, adapter_bytes, some_facts
from vox_host.errors import IntegrityError, UsageError, VoxError
from vox_host.runs import open as opening
from vox_host.runs.layout import ADAPTER_MANIFEST, PUBLISHED, RunDirectory
from vox_host.runs.open import open_adapter, read_verified
from vox_host.runs.publish import publish_adapter, settle

pytestmark = pytest.mark.usefixtures("fast_disk")
OLD, NEW = adapter_bytes(1.0), adapter_bytes(2.0)
WRITES = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir"}


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No flush waits for the disk here; that each file is flushed has a test of its own."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    return flushed


def published(tmp_path: Path) -> tuple[RunDirectory, Path]:
    """A run with an old adapter, and a checkpoint with the next one."""
    run = a_run(tmp_path / "run")
    old, _ = a_checkpoint(run.checkpoint(1), OLD)
    publish_adapter(run, old, some_facts(step=1))
    new, _ = a_checkpoint(run.checkpoint(2), NEW)
    return run, new


def in_a_child(work: Callable[[], None], nth: int, act: Callable[[], None]) -> int:
    """Do `work` in a fork of this process, and `act` before its nth touch of the disk; its status."""
    pid = os.fork()
    if pid == 0:
        left = nth

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in WRITES and not (event == "open" and str(arguments[1]).startswith("r")):
                left -= 1
                if left == 0:
                    act()

        sys.addaudithook(hook)
        try:
            work()
        except UsageError:
            os._exit(3)
        else:
            os._exit(0)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def which(run: RunDirectory) -> int:
    """The step whose whole adapter the run has: file, configuration and manifest belong together."""
    folder, manifest = read_verified(run.path)
    source = open_adapter(run.path)
    content = source.file.read_bytes()
    assert content == {1: OLD, 2: NEW}[manifest.step]
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    return manifest.step


def at_every_moment(tmp_path: Path, act: Callable[[], None]) -> tuple[list[int], list[int]]:
    """Interrupt a publish before each of its touches; the statuses and what each run has then."""
    statuses, steps = [], []
    for nth in range(1, 200):
        run, new = published(tmp_path / str(nth))
        status = in_a_child(lambda: publish_adapter(run, new, some_facts(step=2)) and None, nth, act)  # noqa: B023
        statuses.append(status)
        steps.append(which(run))
        if status == 0:
            # Whatever was left, the next publish is none the worse.
            return statuses, steps
        publish_adapter(run, new, some_facts(step=2))
        assert which(run) == 2
        assert run.adapter_model.read_bytes() == NEW
        assert not (run.path / PUBLISHED).exists()
    raise AssertionError("a publish has fewer steps")


def test_a_publish_killed_at_any_moment_leaves_a_whole_adapter(tmp_path: Path) -> None:
    statuses, steps = at_every_moment(tmp_path, lambda: os._exit(9))
    assert len(statuses) > 15
    assert set(statuses[:-1]) == {9}
    assert steps == sorted(steps)
    assert steps[0] == 1
    assert steps[-1] == 2


def test_a_full_disk_leaves_a_whole_adapter_and_says_so(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    statuses, steps = at_every_moment(tmp_path, full)
    # What only tidies up may fail: the publish itself is done then.
    assert set(statuses) <= {0, 3}
    assert statuses.count(3) > 8
    assert steps == sorted(steps)


def test_what_a_publish_writes(tmp_path: Path) -> None:
    run, new = published(tmp_path)
    manifest = publish_adapter(run, new, some_facts(step=2))
    assert run.adapter_model.read_bytes() == NEW
    assert manifest.step == 2
    assert set(manifest.files) == {
        "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "config.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert sorted(p.name for p in run.path.iterdir()) == [
        "adapter_config.json", "adapter_manifest.json", "adapter_model.safetensors", "chat_template.jinja",
        "checkpoints", "config.json", "run.json", "tokenizer.json",
    ]  # fmt: skip


def test_every_file_and_both_folders_are_flushed(tmp_path: Path, fast_disk: list[int]) -> None:
    run, _ = published(tmp_path)
    names = ("adapter_model.safetensors", "adapter_config.json", "adapter_manifest.json", ".")
    assert {(run.path / name).stat().st_ino for name in names} <= set(fast_disk)
    # Two folders: the one aside is gone by now.
    assert len(set(fast_disk)) == len(names) + 1


def test_a_checkpoint_that_was_changed_is_not_published(tmp_path: Path) -> None:
    run, new = published(tmp_path)
    with pytest.raises(IntegrityError) as caught:
        publish_adapter(run, new, some_facts(step=2), sha256="0" * 64)
    assert caught.value.exit_code == 4
    assert dict(caught.value.facts)["expected"] == "sha256:" + "0" * 64
    assert f"`rm -r {new}`, then `vox-host train --resume {run.path}` goes on" in caught.value.remedy
    assert which(run) == 1


def test_a_run_that_cannot_be_written_keeps_its_adapter(tmp_path: Path) -> None:
    run, new = published(tmp_path)
    with pytest.raises(VoxError) as caught:
        publish_adapter(run, new.with_name("gone"), some_facts(step=2))
    assert caught.value.code == "publish-failed"
    remedy = f"Bring back what is missing, then `vox-host train --resume {run.path}` goes on."
    assert caught.value.remedy == remedy
    assert which(run) == 1


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, new = published(tmp_path)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    publish_adapter(run, new, some_facts(step=2))
    assert which(run) == 2
    assert run.adapter_model.read_bytes() == NEW


def test_settling_where_nothing_was_cut_short_touches_nothing(tmp_path: Path) -> None:
    run, _ = published(tmp_path)
    before = run.adapter_model.stat()
    settle(run)
    assert run.adapter_model.stat() == before


def test_a_reader_beside_a_publisher_sees_whole_adapters_only(tmp_path: Path) -> None:
    run, new = published(tmp_path)
    old = run.checkpoint(1)
    pid = os.fork()
    if pid == 0:
        for _ in range(40):
            publish_adapter(run, new, some_facts(step=2))
            publish_adapter(run, old, some_facts(step=1))
        os._exit(0)
    seen = set()
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        folder, manifest = read_verified(run.path)
        seen.add((manifest.step, folder.name))
    assert {step for step, _ in seen} == {1, 2}


def test_the_same_adapter_published_again_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that meets two publishes of equal manifests half-way tries again; one that rests is damage."""
    run, _ = published(tmp_path)
    manifest = run.path / ADAPTER_MANIFEST
    checked = opening._verify
    left = 3

    def half_way(*arguments: object) -> None:
        nonlocal left
        if left:
            left -= 1
            data = manifest.read_bytes()
            manifest.with_name("next").write_bytes(data)
            manifest.with_name("next").replace(manifest)
            raise IntegrityError("half-way", "between two publishes", remedy="Try again.")
        checked(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(opening, "_verify", half_way)
    assert read_verified(run.path)[1].step == 1 and left == 0
    run.adapter_model.write_bytes(NEW)
    with pytest.raises(IntegrityError):
        read_verified(run.path)


def test_a_publish_that_ends_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = published(tmp_path)
    # `.published` is seen and then gone, twice; then nobody publishes.
    seen = iter([True, False, True, False])
    is_dir = Path.is_dir
    monkeypatch.setattr(
        Path, "is_dir", lambda path: next(seen, False) if path.name == PUBLISHED else is_dir(path)
    )
    folder, manifest = read_verified(run.path)
    assert (folder, manifest.step, next(seen, "all")) == (run.path, 1, "all")
