"""Merging without a process of its own."""

from __future__ import annotations

import pytest

from fixtures.adapters import fold_here, import_base, write_adapter, write_base
from vox_host.exporting import gguf_model, merged_folder
from vox_host.exporting.merging import MergeJob
from vox_host.runs.open import open_adapter
from vox_host.settings import Settings


@pytest.fixture
def make_job(tmp_path, monkeypatch):
    """Make a home with a base and an adapter, and return the job that merges them."""
    monkeypatch.setattr(merged_folder, "fold", fold_here)
    monkeypatch.setattr(gguf_model, "fold", fold_here)

    def make(family, targets=("q_proj", "v_proj", "down_proj"), *, quantised=False, dtype=None, **changes):
        base = import_base(tmp_path / "home", write_base(tmp_path / "base", family, quantised=quantised))
        folder = write_adapter(tmp_path / "tuned", base.path, targets, **changes)
        return MergeJob(
            settings=Settings(home=tmp_path / "home"),
            base=base,
            adapter=open_adapter(folder),
            plugin=None,
            dtype=dtype,
        )

    return make
