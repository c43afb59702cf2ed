"""vox-host model: what a user sees, and the exit status."""

import json
import os
import re
import shutil

import pytest

from vox_host.cli import run
from vox_host.cli.model import _tell_in_lines


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


def test_a_bad_name_is_refused_before_the_source_is_looked_at(call):
    status, _, err = call("import", "no-such-source", "--name", "../x")
    assert status == 2
    assert "error[model-name]" in err
    assert "model-source" not in err


def test_nobody_reads_a_licence_for_what_cannot_be_imported(call, folder, home, monkeypatch):
    def refused(*arguments, code):
        status, _, err = call(*arguments)
        assert f"error[{code}]" in err
        assert "Licence" not in err
        return status

    assert refused("import", folder, "--name", "Bad", "--accept-license", code="model-name") == 2
    with monkeypatch.context() as patched:
        usage = shutil._ntuple_diskusage(10**12, 10**12, 0)
        patched.setattr(shutil, "disk_usage", lambda path: usage)
        assert refused("import", folder, "--accept-license", code="disk-full") == 2
    assert not home.exists()
    call("import", folder, "--accept-license")
    (home / "models" / "tiny-qwen3" / "tokenizer.json").unlink()
    assert refused("import", folder, "--accept-license", code="model-broken") == 4
    (folder / "config.json").write_text("{}")
    assert refused("import", folder, "--name", "other", "--accept-license", code="config-invalid") == 2


def test_a_small_import_tells_each_step_once_and_no_share_of_nothing(call, folder):
    status, out, err = call("import", folder, "--name", "tiny", "--accept-license")
    assert status == 0
    lines = [line.strip() for line in err.splitlines() if line.startswith("  ")]
    assert len(lines) == len(set(lines)) == 1
    assert re.fullmatch(r"copying \d+\.\d KiB", lines[0])
    assert re.match(r"tiny is imported: \d+\.\d KiB in ", out)
    assert "0.0 MiB" not in call("list")[1]


def test_a_long_step_tells_its_quarters(capsys):
    tell = _tell_in_lines()
    total = 240 * 2**20
    for done in range(0, total + 1, total // 12):
        tell("copying", done, total)
    tell("tokenizer", 0, 1)
    tell("tokenizer", 1, 1)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    quarters = [f"copying {share}% of 240.0 MiB" for share in (0, 25, 50, 75, 100)]
    assert lines == [*quarters, "tokenizer"]


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


def test_a_changed_model_is_listed_as_changed_and_verify_says_which_byte_for_byte(call, folder, home):
    for name in ("a", "b"):
        call("import", folder, "--name", name, "--accept-license")
    path = home / "models" / "b" / "config.json"
    path.write_bytes(path.read_bytes().replace(b"512", b"513"))
    lines = call("list")[1].splitlines()
    assert lines[1].endswith("ok")
    assert lines[2].endswith("changed since the last check: config.json; vox-host model verify b")
    assert json.loads(call("show", "b", "--json")[1])["state"] == "changed"
    status, out, err = call("verify", "b")
    assert (status, out) == (4, "")
    assert len(set(re.findall(r"sha256:[0-9a-f]{64}", err))) == 2
    status, out, err = call("verify")
    assert status == 4
    assert re.fullmatch(r"a: \d+ files match sha256:[0-9a-f]{64}\n", out)
    assert "b: error[model-digest]" in err
    status, out, _ = call("verify", "--json")
    rows = json.loads(out)["models"]
    assert [(row["model"], row["verified"]) for row in rows] == [("a", True), ("b", False)]
    assert {"expected", "found"} <= set(rows[1]["error"]["facts"])


def test_verify_settles_a_model_that_was_only_touched(call, folder, home):
    call("import", folder, "--name", "tiny", "--accept-license")
    os.utime(home / "models" / "tiny" / "config.json")
    assert json.loads(call("list", "--json")[1])["models"][0]["touched"] == ["config.json"]
    assert call("verify", "tiny")[0] == 0
    assert json.loads(call("list", "--json")[1])["models"][0]["state"] == "ok"
    (home / "models" / "half").mkdir()
    assert call("verify")[0] == 4
    assert call("verify", "half")[0] == 2


@pytest.mark.parametrize("command", [("show", "tiny"), ("verify", "tiny"), ("verify",)])
def test_a_changed_manifest_is_exit_status_4_with_both_digests(call, folder, home, command):
    call("import", folder, "--name", "tiny", "--accept-license")
    path = home / "models" / "tiny" / "model-manifest.json"
    path.write_text(path.read_text().replace('"mit"', '"own"'))
    status, out, err = call(*command)
    assert (status, out) == (4, "")
    assert "model-manifest-changed" in err
    assert len(set(re.findall(r"sha256:[0-9a-f]{64}", err))) == 2
    assert "broken" in call("list")[1]


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
