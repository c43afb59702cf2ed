"""An adapter that isn't its base's: serve, merge and export say the same of it, and nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fixtures.adapters import CONFIGS, import_base, write_adapter, write_base
from vox_host.cli import run

CASES = Path(__file__).parents[2] / "cases" / "hand" / "lora"
COMMANDS = {
    "peft": ("export", "tuned", "--to", "peft", "--out", "new"),
    "gguf": ("export", "tuned", "--to", "gguf", "--out", "new"),
    "hf": ("export", "tuned", "--to", "hf", "--out", "new"),
    "merge": ("merge", "tuned", "--out", "new"),
    "serve": ("serve", "--model", "tuned"),
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    # The sizes that the cases were made for, but for fewer layers than one of them has.
    monkeypatch.setitem(CONFIGS, "qwen3", {**CONFIGS["qwen3"], "hidden_size": 32})
    import_base(home, write_base(tmp_path / "base", "qwen3"))
    monkeypatch.setenv("VOX_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return home


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("case", "says"),
    [
        (
            "L1_partial",
            "2 tensors of layers that the base hasn't: "
            "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight, "
            "base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight.",
        ),
        (
            "L1_bad_shape",
            "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight is [64, 4], expected [32, 4] "
            "since the base's layers.0.self_attn.k_proj is [32, 32].",
        ),
    ],
)
def test_every_command_names_what_has_no_place_in_the_base(home, tmp_path, capsys, command, case, says):
    shutil.copytree(CASES / case, tmp_path / "tuned")
    before = sorted(tmp_path.iterdir())
    assert run((*command, "--base", "base")) == 2
    said = capsys.readouterr().err
    assert f"tuned/adapter_model.safetensors does not fit the base 'base': {says} The base has " in said
    assert "layers.0 to layers.1, each with mlp.down_proj, " in said and "Nothing was done" in said
    assert "Targets are" not in said and "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before


def test_of_many_tensors_ten_are_named_and_the_others_counted(home, tmp_path, monkeypatch, capsys):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
    write_adapter(tmp_path / "tuned", home / "models" / "base", targets)
    monkeypatch.setitem(CONFIGS, "qwen3", {**CONFIGS["qwen3"], "num_hidden_layers": 1})
    import_base(home, write_base(tmp_path / "shallow", "qwen3"), "shallow")
    assert run((*COMMANDS["peft"], "--base", "shallow")) == 2
    said = capsys.readouterr().err.splitlines()[0]
    assert "12 tensors of layers that the base hasn't: " in said
    assert said.count(".layers.1.") == 10 and " and 2 more. The base has layers.0 with mlp" in said
    # Its own base has a place for each, head and embedding included.
    assert run((*COMMANDS["peft"], "--base", "base")) == 0


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors"])
def test_a_damaged_base_is_told_as_damaged_before_an_adapter_is_blamed(home, capsys, command, damaged):
    write_adapter(Path("tuned"), home / "models" / "base", ["q_proj"])
    if damaged == "config.json":
        # Of the same size, and now the adapter that was made for it would not fit.
        path = home / "models" / "base" / damaged
        path.write_text(path.read_text().replace('"hidden_size": 32', '"hidden_size": 48'))
    else:
        shutil.rmtree("tuned")
        shutil.copytree(CASES / "L1_bad_shape", "tuned")
        path = home / "models" / "base" / damaged
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert run((*command, "--base", "base")) == 4
    said = capsys.readouterr().err
    assert f"error[model-digest]: {damaged} of model 'base' is not what was imported" in said
    assert "does not fit" not in said
    assert not Path("new").exists()
