"""What is right is what the scalar reference makes, and nothing else can have been shipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lanes.every_lane import make_lane
from mens_core import philox as numpy_philox
from mens_core.conformance.definition import SUITE_VERSION, definition
from mens_core.conformance.suite import GROUPS, cases_of
from vox_host.conformance import expected
from vox_host.conformance.tiny_models import TINY_MODELS, philox, write_model
from vox_host.errors import IntegrityError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def recorder():
    spec = importlib.util.spec_from_file_location("record_suite", ROOT / "host/tools/record_suite.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_bytes_are_the_reference_s(recorder, request, tmp_path):
    make_lane("mens-cpu-ref:reference", request.config)  # skips where it can't run
    lane = "mens_cpu_ref.training_lane:ReferenceTrainingOps"
    assert recorder.main([lane, "--to", str(tmp_path)]) == 0
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in expected.EXPECTED_DIR.iterdir())
    for name in made:
        assert (tmp_path / name).read_bytes() == (expected.EXPECTED_DIR / name).read_bytes(), name


@pytest.mark.parametrize("group", GROUPS)
def test_every_case_has_its_bytes(group):
    suite = expected.load_group(group)
    cases = suite.cases
    assert suite.suite_version == SUITE_VERSION
    assert {case.name: case.definition for case in cases} == {
        name: definition(case) for name, case in cases_of(group).items()
    }
    assert {case.name for case in cases} == set(cases_of(group))
    assert all(output.data is not None for case in cases for output in case.outputs)
    assert sum(len(case.outputs) + len(case.faults) for case in cases) > len(cases)


def test_changed_cases_are_not_recorded_under_the_old_version(recorder, monkeypatch):
    cases = {case.name: {"definition": case.definition} for case in expected.load_group("updates").cases}
    recorder.refuse_same_version("updates", cases)
    cases["adamw"] = {"definition": "0" * 64}
    with pytest.raises(SystemExit, match=r"adamw; nothing was written for it\. Raise SUITE_VERSION"):
        recorder.refuse_same_version("updates", cases)
    monkeypatch.setattr(recorder, "SUITE_VERSION", SUITE_VERSION + 1)
    recorder.refuse_same_version("updates", cases)


def test_the_suite_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in expected.EXPECTED_DIR.iterdir()) < 4 << 20


def test_tiny_models_are_the_same_bytes_everywhere(tmp_path):
    digests = [write_model(model, tmp_path / model.name)[:16] for model in TINY_MODELS]
    index, _ = expected.load_models()
    assert digests == [index["models"][model.name]["digest"][:16] for model in TINY_MODELS]


def test_the_host_s_philox_is_the_lanes():
    for counter in ((0, 0, 0, 0), (1, 2, 3, 4), (2**32 - 1,) * 4):
        assert philox(0x0123456789ABCDEF, counter) == numpy_philox.philox(0x0123456789ABCDEF, counter)


@pytest.mark.parametrize("damage", ["index", "bytes", "missing"])
def test_a_damaged_suite_checks_nothing(damage, tmp_path, monkeypatch):
    for path in expected.EXPECTED_DIR.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index, data = tmp_path / "operators.json", tmp_path / "operators.safetensors"
    if damage == "index":
        index.write_bytes(index.read_bytes().replace(b'"failed"', b"x").replace(b'"add"', b'"sub"', 1))
    elif damage == "bytes":
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
    else:
        data.unlink()
    monkeypatch.setattr(expected, "EXPECTED_DIR", tmp_path)
    expected._load.cache_clear()
    try:
        with pytest.raises(IntegrityError) as caught:
            expected.load_group("operators")
    finally:
        expected._load.cache_clear()
    assert caught.value.code == "suite-damaged"
