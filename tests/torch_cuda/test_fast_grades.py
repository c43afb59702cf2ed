"""Fast mode by the suite's own tolerance, on its tiny models: what `plugin check --numerics fast` grades."""

from __future__ import annotations

import pytest
import torch

from lanes.numpy_training import NumpyTrainingLane
from mens_core.backend import MensBackend
from mens_torch_cuda.fast.mode import fast_mode
from mens_torch_cuda.fast.ops import FastOps, Normed
from vox_host.conformance.expected import load_models
from vox_host.conformance.grading import grade_rows
from vox_host.conformance.session import Answer
from vox_host.conformance.tiny_models import TINY_MODELS, write_model
from vox_plugin_api import messages as m
from vox_plugin_api.backend import BackendInfo

pytestmark = pytest.mark.usefixtures("one_thread")

INFO = BackendInfo("vox-lane", "1.0.0", "cuda", ("canonical", "fast"), ("generate", "evaluate"))
PASSED = m.SelfTestResult(numerics_version=1, cases=1, failed=[], vectors_digest="0" * 64)


def grades(name: str, folder) -> set[str]:
    """The grade of each of the model's texts."""
    model = next(model for model in TINY_MODELS if model.name == name)
    digest = write_model(model, folder)
    fast = fast_mode(torch.device("cpu"), facts={})
    backend = MensBackend(INFO, lambda params: NumpyTrainingLane(), lambda: PASSED, fast=fast)
    loading = m.LoadModelParams(model_dir=str(folder), model_digest=digest, numerics="fast")
    *_, loaded = backend.load_model(loading)
    assert loaded.result.numerics == "fast"
    recorded = load_models()[0]["models"][name]
    asked = m.EvaluateParams(sequences=recorded["scores"]["sequences"], top_logprobs=2)
    found = [reply.result for reply in backend.evaluate(asked) if reply]
    tolerance = m.f32_from_bits(recorded["tolerance"])
    return {
        str(grade_rows(text["rows"], Answer(tuple(result.tokens), None).as_rows(),
                       group="evaluate", case="", tolerance=tolerance).grade)
        for text, result in zip(recorded["scores"]["results"], found, strict=True)
    }  # fmt: skip


@pytest.mark.parametrize("name", [model.name for model in TINY_MODELS])
def test_it_is_within_the_suite_s_tolerance_and_not_bitwise(name, tmp_path):
    # A text of one token has no logprob that could differ.
    assert grades(name, tmp_path / "model") - {"bitwise"} == {"same tokens"}


@pytest.mark.parametrize("name", [model.name for model in TINY_MODELS])
def test_a_norm_without_its_weight_is_not(name, tmp_path, monkeypatch):
    plain = lambda self, x, weight, heads, eps, *, name: Normed(x, weight * 0 + 1, eps)  # noqa: E731
    monkeypatch.setattr(FastOps, "head_norm", plain)
    assert "failed" in grades(name, tmp_path / "model")
