"""vox-host merge and export, with a worker of their own."""

from __future__ import annotations

import json

import pytest

from fixtures.adapters import import_base, write_adapter, write_base
from fixtures.installed_lane import install_lane
from vox_host.cli import run

CODE = """
from mens_core.backend import MensBackend
from mens_core.conformance.quick import self_test
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import load_library
from mens_cpu_ref.training_lane import CpuTrainingOps
from vox_plugin_api.backend import BackendInfo


def backend():
    library = load_library()

    def make_lane(params=None):
        return CpuOps(library.kernels)

    info = BackendInfo("vox-lane", "1.0.0", "cpu", ("canonical",), ({capabilities},))
    return MensBackend(
        info,
        make_lane,
        lambda: self_test(make_lane),
        make_training_lane=lambda ops: CpuTrainingOps(library),
    )
"""
CAPABILITIES = '"generate", "evaluate", "trace", "adapters"'


@pytest.fixture
def home(tmp_path):
    """A home with a base, and an adapter beside it."""
    home = tmp_path / "home"
    base = import_base(home, write_base(tmp_path / "base", "gemma3"))
    write_adapter(tmp_path / "tuned", base.path, ["q_proj", "lm_head"])
    return home


@pytest.fixture
def lane(home):
    code = CODE.replace("{capabilities}", CAPABILITIES)
    return install_lane(home, "vox-lane", code, capabilities=CAPABILITIES)


@pytest.fixture
def here(home, tmp_path, monkeypatch, capsys):
    """Run the command line in this process, in the folder of the test."""
    monkeypatch.setenv("VOX_HOME", str(home))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        status = run(arguments)
        return status, *capsys.readouterr()

    return call


def facts(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_becomes_a_model_that_is_imported_and_served(lane, here, tmp_path):
    out = tmp_path / "merged"
    merged = facts(lane.run("merge", tmp_path / "tuned", "--out", out, "--name", "tuned", "--json"))
    assert (merged["base"], merged["out"], merged["name"]) == ("base", str(out), "tuned")
    assert merged["is_untied"] is True and len(merged["matrices"]) == 3
    shown = json.loads(here("model", "show", "tuned", "--json")[1])
    assert shown["digest"] == merged["digest"]
    assert shown["merged_from"] == {
        "base_digest": merged["model_digest"],
        "adapter_digest": merged["adapter_digest"],
    }
    base = json.loads(here("model", "show", "base", "--json")[1])
    assert (shown["license"], shown["license_terms"]) == (base["license"], base["license_terms"])
    # The folder is the same model, under any name.
    imported = json.loads(here("model", "import", "merged", "--name", "b", "--accept-license", "--json")[1])
    assert imported["digest"] == merged["digest"]
    answered = facts(lane.run("generate", "--model", "tuned", "--prompt", "a", "--max-tokens", "2", "--json"))
    assert answered["adapter"] is None
    assert answered["merged_from"] == {**shown["merged_from"], "applied": "merged"}


def test_each_form_is_written_and_told(lane, here, tmp_path):
    done = facts(lane.run("export", tmp_path / "tuned", "--to", "hf", "--out", tmp_path / "hf", "--json"))
    assert done["files"] == sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert {"README.md", "config.json", "merged-from.json", "model.safetensors"} <= set(done["files"])
    status, out, _ = here("export", "tuned", "--to", "peft", "--out", "peft")
    assert status == 0
    assert out.splitlines() == [
        "peft: LICENSE, README.md, adapter_config.json, adapter_model.safetensors",
        "The base model's terms apply (tiny-1.0): README.md there says where they are.",
    ]
    status, _, err = here("export", "tuned", "--to", "gguf", "--out", "g")
    assert status == 2 and "gguf-tied-head" in err
    assert not (tmp_path / "g").exists()
    merged = lane.run("export", tmp_path / "tuned", "--to", "gguf", "--merged", "--out", tmp_path / "g")
    assert merged.returncode == 0 and "tuned.gguf" in merged.stdout, merged.stderr
    assert merged.stdout.startswith("3 matrices merged; the output matrix is no longer the embedding.\n")
    has_terms(tmp_path / "hf", tmp_path / "peft", tmp_path / "g")


def test_a_folder_that_is_not_named_lies_beside_the_run(home, here, tmp_path, monkeypatch):
    status, out, err = here("export", "tuned", "--to", "peft")
    assert status == 0, err
    assert out.startswith("tuned-peft: LICENSE, README.md, adapter_config.json")
    before = sorted((tmp_path / "tuned-peft").iterdir())
    status, _, err = here("export", "tuned/", "--to", "peft")
    assert status == 2 and "tuned-peft exists; nothing was written" in err and "--out DIR" in err
    assert sorted((tmp_path / "tuned-peft").iterdir()) == before
    # Also where the run is named from within.
    write_adapter(tmp_path / "plain", home / "models" / "base", ["q_proj"])
    monkeypatch.chdir(tmp_path / "plain")
    assert here("export", ".", "--to", "gguf")[0] == 0
    assert (tmp_path / "plain-gguf" / "plain-lora.gguf").is_file()


def has_terms(*folders) -> None:
    """Whatever goes out says under whose terms, and has their text."""
    for folder in folders:
        assert (folder / "LICENSE").read_text() == "as you like", folder
        said = (folder / "README.md").read_text()
        assert said.startswith("---\nlicense: tiny-1.0\n---\n"), folder
        assert said.endswith("The base model's terms apply (tiny-1.0): LICENSE\n"), folder


def test_an_adapter_for_llama_cpp_has_the_base_s_terms_beside_it(home, here, tmp_path):
    base = json.loads(here("model", "show", "base", "--json")[1])
    write_adapter(tmp_path / "plain", tmp_path / "home" / "models" / "base", ["q_proj"])
    status, out, err = here("export", "plain", "--to", "gguf", "--out", "g", "--json")
    assert status == 0, err
    assert json.loads(out)["files"] == ["LICENSE", "README.md", "plain-lora.gguf"]
    has_terms(tmp_path / "g")
    said = (tmp_path / "g" / "README.md").read_text()
    assert f"The adapter plain of base (sha256:{base['digest']})" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["merge", "tuned"], "Give --out or --name"),
        (["merge", "./tuned", "--name", "base"], "model-exists"),
        (["merge", "base", "--out", "new"], "is a model of the store, not an adapter"),
        (["merge", "tuned", "--name", "No!"], "model-name"),
        (["merge", "tuned", "--out", "base"], "out-exists"),
        (["merge", "nowhere", "--out", "new"], "run-not-found"),
        (["merge", "tuned", "--out", "new", "--dtype", "f16"], "--dtype is one of"),
        (["export", "tuned", "--to", "onnx", "--out", "new"], "--to is one of peft, hf, gguf"),
        (["export", "tuned", "--to", "peft", "--merged", "--out", "new"], "--merged is for --to gguf"),
        (["export", "tuned", "--to", "peft", "--dtype", "f32"], "--dtype f32 is of a merged model"),
        (["export", "tuned", "--to", "gguf", "--dtype", "bf16"], "--to gguf --merged"),
        (["export", "no/such/run", "--to", "peft"], "run-not-found"),
    ],
)
def test_a_mistake_is_told_before_anything_is_begun(here, tmp_path, arguments, says):
    before = sorted(tmp_path.iterdir())
    status, _, err = here(*arguments)
    assert status == 2 and says in err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_plugin_without_the_capability_is_not_started(here, tmp_path):
    install_lane(tmp_path / "home", "vox-lane", "", capabilities='"generate"')
    status, _, err = here("merge", "tuned", "--out", "merged")
    assert status != 0 and "adapters" in err
    assert not (tmp_path / "merged").exists()
