"""Text that nests as deep as no reader goes, wherever a file of someone else's is read."""

from __future__ import annotations

import pytest

from vox_host.discovery.environment import _editable_source
from vox_host.errors import IntegrityError, ModelError, PluginError, VoxError
from vox_host.installation.sources import _read_project
from vox_host.models.demo_model import load_demo_manifest
from vox_host.models.tokenizer import _chat_template, _read_json
from vox_host.runs.manifest import parse_manifest
from vox_host.stat_cache import StatCache
from vox_host.training.presets import load_presets

DEEP = "[" * 100_000
TOML = f"x = {DEEP}"


def test_deep_json_is_an_error_in_words_or_nothing(tmp_path):
    file = tmp_path / "deep.json"
    file.write_text(DEEP)
    assert StatCache.load(file, "x").knows(file) is False
    assert _editable_source(DEEP) is None
    with pytest.raises(ModelError, match="could not be read"):
        _read_json(file)
    with pytest.raises(IntegrityError):
        parse_manifest(DEEP.encode(), file)


def test_deep_toml_is_an_error_in_words(tmp_path):
    for name in ("pyproject.toml", "deep.toml"):
        (tmp_path / name).write_text(TOML)
    with pytest.raises(PluginError, match="can't be read"):
        _read_project(tmp_path)
    with pytest.raises(PluginError, match="can't be read"):
        load_presets(tmp_path / "deep.toml")
    with pytest.raises(VoxError):
        load_demo_manifest("deep", tmp_path)


def test_a_template_that_is_no_text_is_an_error_in_words(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(ModelError, match="it is not UTF-8 text"):
        _chat_template(tmp_path, {})
