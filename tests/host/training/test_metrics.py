"""metrics.jsonl: cut back to what a checkpoint saw, and never anything else."""

from __future__ import annotations

import pytest

from vox_host.errors import IntegrityError
from vox_host.training.metrics import NOTHING, LineFile, read_lines


def test_a_file_that_goes_on_from_a_mark_is_the_file_that_was_never_stopped(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for path in (whole, cut):
        file = LineFile(path, keep=NOTHING)
        file.append({"step": 1, "loss": 0.1})
        mark = file.mark
        file.append({"step": 2, "loss": 1e-30})
        file.close()
    with cut.open("ab") as torn:
        torn.write(b'{"step":3,"lo')
    assert [line["step"] for line in read_lines(cut)] == [1, 2]
    again = LineFile(cut, keep=mark)
    assert again.mark == mark
    again.append({"step": 2, "loss": 1e-30})
    again.close()
    assert cut.read_bytes() == whole.read_bytes()


def test_a_run_without_checkpoint_begins_its_metrics_anew(tmp_path):
    path = tmp_path / "metrics"
    path.write_bytes(b"of a start that was killed\n")
    LineFile(path, keep=NOTHING).close()
    assert path.read_bytes() == b""
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize("damage", [b"", b'{"step":1}\n', b'{"step":9}\n{"step":2}\n'])
def test_metrics_that_are_not_what_was_written_are_refused_and_left_alone(tmp_path, damage):
    path = tmp_path / "metrics"
    file = LineFile(path, keep=NOTHING)
    file.append({"step": 1})
    file.append({"step": 2})
    file.close()
    path.write_bytes(damage)
    with pytest.raises(IntegrityError) as caught:
        LineFile(path, keep=file.mark)
    assert caught.value.code == "metrics-changed"
    assert f"{file.mark.size_bytes} bytes" in dict(caught.value.facts)["expected"]
    assert path.read_bytes() == damage


def test_a_loss_that_is_no_number_is_never_written(tmp_path):
    file = LineFile(tmp_path / "metrics", keep=NOTHING)
    with pytest.raises(ValueError, match="JSON"):
        file.append({"loss": float("nan")})
    file.close()
    assert (tmp_path / "metrics").read_bytes() == b""
