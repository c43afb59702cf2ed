"""Blocks that an earlier prompt wrote, read by the grid kernels: the bytes of a prompt on the CPU lane."""

from __future__ import annotations

import pytest

from lanes.tiny_models import BY_FAMILY, open_model, write_model
from mens_core.engine import Engine
from mens_core.sequence import SequenceRequest
from vox_plugin_api.messages import SamplingParams

PROMPT = tuple((17 * i * i + 5) % 97 for i in range(140))
LAYERS = {"qwen3": {"num_hidden_layers": 1}, "gemma3": {"num_hidden_layers": 2, "sliding_window_pattern": 2}}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_two_prompts_that_begin_alike_have_the_bytes_of_prompts_alone(family, started, library, tmp_path):
    from mens_cpu_ref.lane import CpuOps

    path = write_model(tmp_path, BY_FAMILY[family] | LAYERS[family])

    def answers(ops, *ends):
        model = open_model(path, ops).model
        engine = Engine(model, model.new_cache(8), vocab_size=97, context_length=400, blocks=8)
        told = []
        for end in ends:
            request = SequenceRequest(
                token_ids=(*PROMPT, end), max_tokens=3, sampling=SamplingParams(temperature=0), logprobs=3
            )
            sequence = engine.submit(request)
            while not sequence.is_done:
                engine.step()
            told.append((sequence.reused, [token.model_dump() for token in sequence.ready]))
        return told

    # One behind the other on the lane; each alone on the CPU lane.
    (_, first), (reused, second) = answers(started().lane(), 1, 2)
    assert reused == 128
    expected = [answers(CpuOps(library.kernels), end)[0] for end in (1, 2)]
    assert [(0, first), (0, second)] == expected
