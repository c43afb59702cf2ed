"""vox-host model: what a user sees, and the exit status."""

import json

import pytest

from vox_host.cli import run


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VOX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def call(home, capsys):
    """Return a function that runs a command and returns (status, stdout, stderr)."""

    def call(*arguments):
        status = run(["model", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def folder(hugging_face_folder):
    return hugging_face_folder


def test_importing_shows_the_licence_progress_and_where_the_model_is(call, folder, home):
    status, out, err = call("import", folder, "--name", "tiny", "--accept-license")
    assert status == 0
    assert out.startswith("tiny is imported")
    assert str(home / "models" / "tiny") in out
    assert "Licence: mit" in err
    assert "--accept-license" in err
    assert "copying" in err


def test_without_the_flag_the_licence_is_shown_and_nothing_is_written(call, folder, home):
    status, out, err = call("import", folder)
    assert status == 2
    assert out == ""
    assert "Licence: mit" in err
    assert "error[license-not-accepted]" in err
    assert not home.exists()


def test_json_is_one_document_and_says_whether_the_model_was_there(call, folder):
    for was_there in (False, True):
        status, out, _ = call("import", folder, "--accept-license", "--json")
        facts = json.loads(out)
        assert status == 0
        assert facts["was_there"] is was_there
        assert facts["name"] == "tiny-qwen3"
        assert len(facts["digest"]) == 64


def test_the_list_shows_whole_and_broken_models(call, folder, home):
    call("import", folder, "--name", "tiny", "--accept-license")
    (home / "models" / "half").mkdir()
    status, out, _ = call("list")
    assert status == 0
    lines = out.splitlines()
    assert lines[1].startswith("half") and "model-manifest.json is missing" in lines[1]
    assert lines[2].startswith("tiny") and lines[2].endswith("ok")
    models = json.loads(call("list", "--json")[1])["models"]
    assert [(m["name"], m["state"]) for m in models] == [("half", "broken"), ("tiny", "ok")]


def test_an_empty_store_says_how_to_fill_it(call):
    status, out, _ = call("list")
    assert status == 0
    assert "vox-host model import" in out


def test_show_can_verify_every_byte(call, folder, home):
    call("import", folder, "--name", "tiny", "--accept-license")
    assert json.loads(call("show", "tiny", "--verify", "--json")[1])["verified"] is True
    path = home / "models" / "tiny" / "config.json"
    path.write_bytes(path.read_bytes().replace(b"512", b"513"))
    status, out, err = call("show", "tiny", "--verify")
    assert status == 4
    assert out == ""
    assert "error[model-digest]" in err
    assert "config.json" in err
    assert call("show", "tiny")[0] == 0


def test_remove_says_what_was_removed(call, folder, home):
    call("import", folder, "--name", "tiny", "--accept-license")
    assert json.loads(call("remove", "tiny", "--json")[1])["removed"] == "tiny"
    status, _, err = call("remove", "tiny")
    assert status == 2
    assert "error[model-not-found]" in err


@pytest.mark.parametrize("command", [("show", "no-such"), ("import", "no-such", "--accept-license")])
def test_a_users_mistake_is_an_error_without_a_traceback(call, command):
    status, out, err = call(*command)
    assert status == 2
    assert out == ""
    assert err.startswith("error[")
    assert "Traceback" not in err
