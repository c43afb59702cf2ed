"""A model that was merged into the store is recorded as of its adapter, not of a folder that is gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vox_host.cli import merge


@pytest.mark.parametrize(("folder", "called"), [("store/.merging-81xzepdk", "tuned"), ("mine/out", "out")])
def test_the_source_s_name_is_one_that_stays(monkeypatch, folder, called):
    imported = []

    def import_model(source, catalogue, **_):
        imported.append(source)
        return SimpleNamespace(model=SimpleNamespace(name="x", digest="y"))

    monkeypatch.setattr(merge, "import_model", import_model)
    monkeypatch.setattr(merge, "HuggingFaceSource", lambda path: SimpleNamespace(called=path.name))
    opened = SimpleNamespace(
        catalogue=SimpleNamespace(models_dir=Path("store")),
        base=SimpleNamespace(license="l", license_terms="t"),
        source=SimpleNamespace(name="tuned"),
    )
    merge._import(opened, Path(folder), "x")
    assert imported[0].called == called
