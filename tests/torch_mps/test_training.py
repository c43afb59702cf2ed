"""The Metal lane training, run on the CPU in an Apple GPU's place, beside the CPU lane."""

from __future__ import annotations

import numpy as np
import pytest

from lanes.tiny_models import BY_FAMILY, write_model
from lanes.training import a_config, some_examples
from mens_core.backend import MensBackend
from mens_core.conformance.cases_training import TRAINING_CASES
from mens_core.kernel_source import grid_source
from mens_torch_mps import plugin
from mens_torch_mps.kernel_text import metal_training_source
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import BackendInfo

CONFIG = a_config(rank=3, dropout=0.25)
BEGIN = t.TrainBeginParams(adapter=CONFIG.adapter, optimizer=CONFIG.optimizer, seed=5)
EXAMPLES = some_examples((9, 21, 4))


def results(case, ops):
    ops.take_faults()
    arrays = [np.asarray(array).tobytes() for array in case(ops)]
    return [*arrays, *((fault.name, fault.rows) for fault in ops.take_faults())]


def test_every_operator_of_training_gives_the_reference_s_bytes(started, library):
    from mens_cpu_ref.training_lane import ReferenceTrainingOps

    ready = started()
    lane, reference = ready.training_lane(ready.lane()), ReferenceTrainingOps()
    for name, case in TRAINING_CASES.items():
        found = results(case, lane)
        assert found and found == results(case, reference), name


def test_a_worker_that_serves_compiles_no_kernel_of_training(started):
    ready = started()
    assert metal_training_source() == grid_source("metal", "training")
    serving = set(ready.device._kernels)
    ready.training_lane(ready.lane())
    assert {"vox_adamw", "vox_norm_backward"} & (set(ready.device._kernels) - serving)


def the_cpu_lane(library):
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.training_lane import CpuTrainingOps

    info = BackendInfo("mens-cpu-ref", "1.0.0", "cpu", ("canonical",), ("generate", "train"))
    return MensBackend(
        info,
        lambda params: CpuOps(library.kernels),
        lambda: None,
        make_training_lane=lambda serving: CpuTrainingOps(library),
    )


def steps(backend, path):
    """A load, an adapter's beginning, two steps, and an answer that the trained weights have no part in."""
    load = m.LoadModelParams(model_dir=str(path), model_digest="cd" * 32, memory_bytes=1 << 22)
    asked = [
        backend.load_model(load),
        lambda: backend.train_begin(BEGIN),
        lambda: backend.train_step(t.TrainStepParams(examples=EXAMPLES)),
        lambda: backend.train_step(t.TrainStepParams(examples=EXAMPLES, micro_batch_size=1)),
        lambda: backend.generate(
            m.GenerateParams(
                token_ids=[5, 6, 7],
                max_tokens=3,
                logprobs=2,
                sampling=m.SamplingParams(temperature=0.9, seed=3),
            )
        ),
    ]
    made = []
    for call in asked:
        stream = call() if callable(call) else call
        made += [reply.result.model_dump_json() for reply in stream if reply is not None and reply.result]
    return made


@pytest.mark.parametrize("family", BY_FAMILY)
def test_steps_and_answers_are_the_cpu_lane_s(started, library, family, tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "version", lambda name: "1.0.0")
    path = write_model(tmp_path, {**BY_FAMILY[family], "num_hidden_layers": 1})
    found = steps(plugin.backend_on(started()), path)
    assert found == steps(the_cpu_lane(library), path)
    assert len({line for line in found if "adapter_digest" in line}) >= 2, "each step is another adapter"
