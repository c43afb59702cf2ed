"""An adapter on a base of quantised weights: the same bytes for every cut, near the dequantised base's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lanes import every_lane
from lanes.quantised_model import write_both
from lanes.tiny_models import BY_FAMILY, open_model
from lanes.training import a_config, finish, gradients_of, random_adapter, read, some_examples
from mens_core.trainer import Trainer

CONFIG = BY_FAMILY["gemma3"] | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "sliding_window_pattern": 2,
    "num_attention_heads": 8,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> tuple[Path, Path]:
    """One model twice: its matrices as GGML blocks of several formats, and dequantised to float32."""
    return write_both(tmp_path_factory.mktemp("bases"), CONFIG)


def lane_of(name, request):
    return every_lane.make_training_lane(name, request.config)


def test_cuts_and_kernels_change_no_bit_on_a_quantised_base(bases, request):
    config = a_config(dropout=0.2, max_gradient_norm=1.0)
    made = []
    for name in every_lane.EXACT:
        for size in (1, 2, None):
            lane = lane_of(name, request)
            trainer = Trainer(open_model(bases[0], lane).model, lane, config, micro_batch_size=size)
            made.append(
                [finish(trainer.train_step(read(some_examples((9, 40, 3), seed=i)))) for i in range(2)]
            )
    assert all(outcomes == made[0] for outcomes in made[1:])


def test_gradients_are_near_those_of_the_dequantised_base(bases, request):
    """The forward rounds activations to int8: the gap is that, and is reported, not derived."""
    lane, config, examples = lane_of("mens-cpu-ref", request), a_config(), read(some_examples((30, 12)))
    found = []
    for base in bases:
        model = open_model(base, lane).model
        adapter = random_adapter(Trainer.plan_for(model, config).shapes)
        found.append(gradients_of(model, lane, config, adapter, examples))
    (losses, gradients), (exact_losses, exact) = found
    gaps = [
        float(np.linalg.norm(gradients[name] - exact[name]) / np.linalg.norm(exact[name])) for name in exact
    ]
    print(f"relative gap of gradients: median {np.median(gaps):.3g}, worst {max(gaps):.3g}")
    assert np.abs(losses / exact_losses - 1).max() < 0.01
    assert 0 < max(gaps) < 0.2
