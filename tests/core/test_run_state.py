"""A run on disk: whole or not there, and read again only where it fits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load, save_file

from lanes.training import a_config, random_adapter
from mens_core.adapters.file import read_tensors, safetensors_bytes
from mens_core.run_state import ADAPTER, OPTIMIZER, STATE, read_run, read_state, save_run
from mens_core.trainer import TrainerState
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import canonical_json

MODEL = "ab" * 32
SHAPES = {
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (4, 40),
    "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": (56, 4),
}
CONFIG = a_config(("up_proj",), dropout=0.1, seed=2**63 + 1, max_gradient_norm=0.3)


def a_state(step: int = 3) -> TrainerState:
    parts = [random_adapter(SHAPES, seed) for seed in (1, 2, 3)]
    return TrainerState(step=step, parameters=parts[0], first_moments=parts[1], second_moments=parts[2])


def save(folder: Path, state: TrainerState | None = None) -> dict[str, str]:
    return save_run(folder, CONFIG, state or a_state(), model_digest=MODEL, adapter_digest="cd" * 32)


def resume(folder: Path, model_digest: str = MODEL) -> TrainerState:
    saved = read_state(folder, model_digest=model_digest)
    for part in ("adapter", "optimizer", "schedule"):
        assert canonical_json(getattr(saved.config, part)) == canonical_json(getattr(CONFIG, part))
    assert saved.config.seed == CONFIG.seed
    return read_run(folder, saved, SHAPES)


def same(one: TrainerState, other: TrainerState) -> bool:
    return one.step == other.step and all(
        getattr(one, part)[key].tobytes() == getattr(other, part)[key].tobytes()
        for part in ("parameters", "first_moments", "second_moments")
        for key in SHAPES
    )


def test_what_was_saved_is_what_is_read(tmp_path):
    digests = save(tmp_path / "run")
    assert sorted(digests) == sorted(p.name for p in (tmp_path / "run").iterdir())
    assert same(resume(tmp_path / "run"), a_state())
    assert save(tmp_path / "again") == digests, "equal runs are equal files"


def test_an_outside_reader_finds_the_adapter_under_peft_s_names(tmp_path):
    save(tmp_path / "run")
    found = load((tmp_path / "run" / ADAPTER).read_bytes())
    assert {key: values.shape for key, values in found.items()} == SHAPES
    for key, values in a_state().parameters.items():
        assert found[key].tobytes() == values.tobytes()


def test_a_save_and_a_resume_hold_no_second_copy(tmp_path):
    shapes = {f"layers.{i}.weight": (64, 512) for i in range(16)}
    parts = [random_adapter(shapes, seed) for seed in (1, 2, 3)]
    state = TrainerState(step=1, parameters=parts[0], first_moments=parts[1], second_moments=parts[2])
    tensor = 4 * 64 * 512
    tracemalloc.start()
    save(tmp_path / "run", state)
    _, most = tracemalloc.get_traced_memory()
    assert most < 2 * tensor + (512 << 10), "one tensor on its way, of 48"
    saved = read_state(tmp_path / "run", model_digest=MODEL)
    tracemalloc.reset_peak()
    read_run(tmp_path / "run", saved, shapes)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50 * tensor + (512 << 10), "the 48 tensors that were read, and no more"


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import mens_core.run_state as run_state
    from core.test_run_state import a_state, save

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    when = {when!r}
    if when == "rename":
        Path.rename = die
    elif when == "sync":
        run_state._sync_folder = die
    else:
        opened, count = Path.open, int(when)
        def open_some(path, mode="r", *rest):
            global count
            if "x" in mode:
                if count == 0:
                    die()
                count -= 1
            return opened(path, mode, *rest)
        Path.open = open_some
    save(Path({folder!r}), a_state(4))
"""


@pytest.mark.parametrize("when", ["0", "1", "2", "sync", "rename"])
def test_a_save_that_is_killed_leaves_no_folder_and_the_earlier_one_whole(tmp_path, when):
    save(tmp_path / "step-3")
    before = {p.name: p.read_bytes() for p in (tmp_path / "step-3").iterdir()}
    script = KILLED.format(tests=str(Path(__file__).parents[1]), when=when, folder=str(tmp_path / "step-4"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "step-4").exists()
    assert {p.name: p.read_bytes() for p in (tmp_path / "step-3").iterdir()} == before
    save(tmp_path / "step-4", a_state(4))
    assert same(resume(tmp_path / "step-4"), a_state(4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3", "step-4"], "nothing is left beside them"


def test_every_byte_is_on_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    done: list[object] = []
    sync, rename = os.fsync, Path.rename

    def note_sync(descriptor):
        sync(descriptor)
        done.append(os.fstat(descriptor).st_ino)

    def note_rename(path, target):
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    save(tmp_path / "run")
    at = done.index("rename")
    folder = tmp_path / "run"
    assert set(done[:at]) == {path.stat().st_ino for path in (folder, *folder.iterdir())}
    assert done[at - 1] == folder.stat().st_ino
    assert done[at + 1 :] == [tmp_path.stat().st_ino]


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    save(tmp_path / "step-3")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BackendError) as caught:
        save(tmp_path / "step-4")
    monkeypatch.undo()
    assert caught.value.error.code == "save-failed"
    assert "No space left on device" in caught.value.error.message
    assert caught.value.error.remedy.startswith("Make room or name another folder")
    assert caught.value.error.facts["errno"] == "ENOSPC"
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]
    assert same(resume(tmp_path / "step-3"), a_state())


def test_a_folder_that_exists_or_has_no_parent_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(BackendError) as caught:
        save(tmp_path / "run")
    assert caught.value.error.code == "folder-exists"
    with pytest.raises(BackendError) as caught:
        save(tmp_path / "no" / "run")
    assert caught.value.error.code == "save-failed"
    assert caught.value.error.remedy.startswith("Bring back what is missing or name another folder")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def without(key: str):
    def change(folder: Path) -> None:
        state = json.loads((folder / STATE).read_text())
        del state[key]
        (folder / STATE).write_text(json.dumps(state))

    return change


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda folder: flip(folder / ADAPTER), "resume-invalid"),
        (lambda folder: flip(folder / OPTIMIZER), "resume-invalid"),
        (lambda folder: flip(folder / STATE), "resume-invalid"),
        (lambda folder: (folder / ADAPTER).unlink(), "resume-invalid"),
        (lambda folder: (folder / STATE).unlink(), "resume-invalid"),
        *((without(key), "resume-invalid") for key in ("format", "step", "seed", "adapter", "files")),
        (without("numerics_version"), "resume-mismatch"),
    ],
)
def test_damage_is_found_before_anything_is_begun(tmp_path, damage, code):
    save(tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(BackendError) as caught:
        resume(tmp_path / "run")
    assert caught.value.error.code == code
    assert "run" in caught.value.error.message


def test_a_changed_file_is_named_with_both_digests_written_alike(tmp_path):
    save(tmp_path / "run")
    flip(tmp_path / "run" / ADAPTER)
    with pytest.raises(BackendError) as caught:
        resume(tmp_path / "run")
    facts = caught.value.error.facts
    digests = [re.fullmatch(r"sha256:([0-9a-f]{64})", facts[name])[1] for name in ("expected", "found")]
    assert digests[0] != digests[1]


def test_another_base_model_is_refused_with_both_digests(tmp_path):
    save(tmp_path / "run")
    with pytest.raises(BackendError) as caught:
        resume(tmp_path / "run", "ef" * 32)
    assert caught.value.error.code == "resume-mismatch"
    assert (caught.value.error.facts["expected"], caught.value.error.facts["found"]) == ("ef" * 32, MODEL)


def test_every_tensor_has_its_place_or_is_named(tmp_path):
    key_a, key_b = SHAPES
    good = random_adapter(SHAPES)
    for change, mention in [
        ({key_a: good[key_a]}, "missing: 1 of 2 tensors"),
        ({**good, "stray.weight": good[key_a]}, "without a place in this model: 1 (stray.weight)"),
        ({**good, key_b: good[key_b].T.copy()}, "expected F32 [56, 4]"),
        ({**good, key_b: good[key_b].astype(np.float16)}, "is F16"),
        ({**good, key_b: np.full((56, 4), np.nan, np.float32)}, "infinities or NaN"),
    ]:
        save_file(change, tmp_path / "adapter.safetensors")
        with pytest.raises(BackendError) as caught:
            read_tensors(tmp_path / "adapter.safetensors", SHAPES)
        assert caught.value.error.code == "adapter-tensors"
        assert mention in caught.value.error.message


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
            lambda key: key != "__metadata__"
        ),
        arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 4))),
        min_size=1,
        max_size=4,
    )
)
def test_an_outside_reader_reads_whatever_is_written(tensors):
    found = load(safetensors_bytes(tensors))
    assert {key: values.tobytes() for key, values in found.items()} == {
        key: values.tobytes() for key, values in tensors.items()
    }
