"""Gradients of the models' explicit backward against autograd of an independent float64 forward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from lanes import every_lane
from lanes.float64_training_lane import Float64TrainingLane
from lanes.tiny_models import BY_FAMILY, open_model, random_tensors, write_model
from lanes.training import (
    ALL_TARGETS,
    LAYER_TARGETS,
    a_config,
    gradients_of,
    random_adapter,
    read,
    some_examples,
)
from mens_core.adapters.keys import parameter_key
from mens_core.adapters.plan import plan_adapter
from oracle.float64_forward import settings_of
from oracle.torch_float64 import Adapted
from vox_plugin_api.families import expected_shapes, parse_config


@pytest.fixture(autouse=True)
def one_thread():
    """More of them only wait for each other at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LENGTHS = (2, 40, 7, 150, 21)
"""One of them crosses a block of 128 and the window of the sliding layers many times."""
TARGET_SETS = {
    "attention": ("q_proj", "v_proj"),
    "o": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "layers": LAYER_TARGETS,
    "head": ("lm_head",),
    "one matrix": ("layers.1.mlp.up_proj",),
    "all": ALL_TARGETS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": BY_FAMILY["qwen3"],
    "qwen3 tied": BY_FAMILY["qwen3"] | {"tie_word_embeddings": True},
    "gemma3": BY_FAMILY["gemma3"],
    "gemma3 untied": BY_FAMILY["gemma3"] | {"tie_word_embeddings": False},
    "gemma3 capped": BY_FAMILY["gemma3"] | {"attn_logit_softcapping": 3.0},
}


def oracle(config: dict[str, Any], adapter: dict[str, np.ndarray], scale: float, seed: int = 3) -> Adapted:
    """The same weights in torch; constants that our config rounds to float32 are given so rounded."""
    parsed = parse_config(config)
    settings = dataclasses.replace(
        settings_of(config),
        eps=parsed.rms_eps,
        scale=parsed.attention_scale,
        embed_scale=parsed.embed_scale or 1.0,
    )
    weights = {name.removeprefix("model."): w for name, w in random_tensors(parsed, seed).items()}
    weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
    return Adapted(settings, weights, adapter, scale)


@dataclasses.dataclass(frozen=True)
class Exact:
    """What autograd makes of a case, and how far rounding of one unit may move it."""

    adapter: dict[str, np.ndarray]
    losses: np.ndarray
    gradients: dict[str, np.ndarray]
    loss_spread: float
    """Relative, per unit of rounding u."""
    gradient_spread: float
    """Of a parameter's gradient, relative to its norm, per unit of rounding."""


def plan_of(config, targets):
    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in expected_shapes(parse_config(config)).items()
        if len(shape) == 2
    }
    shapes["lm_head"] = shapes["embed_tokens"]
    shapes["embed_tokens"] = shapes["embed_tokens"][::-1]
    return plan_adapter(a_config(targets).adapter, shapes)


@functools.cache
def exact(config_name: str, targets_name: str) -> Exact:
    """Gradients in float64, and the spread of those of disturbed weights.

    A rounded sum of K products is the exact sum with each weight off by at most (K + 1) u, and
    the few operations between two products add no more than a dozen u (see oracle.rounding). So
    a disturbance of every weight by (K + 12) u, drawn with random signs, shows what rounding does
    to a gradient; the worst of a few draws, doubled, bounds the rest. A loss has eight u more of
    its own: the operators behind the logits, whose error does not go through a weight.
    """
    config = CONFIGS[config_name]
    plan = plan_of(config, TARGET_SETS[targets_name])
    adapter, examples = random_adapter(plan.shapes), read(some_examples(LENGTHS))
    losses, gradients = differentiated(oracle(config, adapter, plan.matrices[0].scale), examples)
    unit = 2.0**-30
    loss_spread = gradient_spread = 0.0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        moved = oracle(config, adapter, plan.matrices[0].scale)
        for weight in [*moved.weights.values(), *moved.adapter.values()]:
            signs = torch.tensor(rng.choice((-1.0, 1.0), weight.shape))
            weight.data *= 1 + signs * (weight.shape[-1] + 12) * unit
        other_losses, other = differentiated(moved, examples)
        loss_spread = max(loss_spread, np.abs(other_losses / losses - 1).max() / unit)
        gradient_spread = max(gradient_spread, max(relative_errors(other, gradients).values()) / unit)
    assert min(np.abs(g).max() for g in gradients.values()) > 1e-6, "a gradient of nothing proves nothing"
    return Exact(adapter, losses, gradients, 2 * loss_spread + 8, 2 * gradient_spread)


def differentiated(judge: Adapted, examples) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    losses = [judge.losses(example.token_ids, example.trained).sum() for example in examples]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).detach().numpy(), {
        key: tensor.grad.numpy() for key, tensor in judge.adapter.items()
    }


def relative_errors(found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {
        key: float(np.linalg.norm(found[key] - gradient) / np.linalg.norm(gradient))
        for key, gradient in exact.items()
    }


def errors_of(lane, config_name: str, targets_name: str, tmp_path, **options) -> tuple[float, float]:
    """The worst relative error of a loss and of a parameter's gradient, in units of what is allowed."""
    judged = exact(config_name, targets_name)
    model = open_model(write_model(tmp_path / "model", CONFIGS[config_name], seed=3), lane).model
    losses, gradients = gradients_of(
        model,
        lane,
        a_config(TARGET_SETS[targets_name]),
        judged.adapter,
        read(some_examples(LENGTHS)),
        **options,
    )
    named = {parameter_key(name): gradient for name, gradient in gradients.items()}
    unit = 2.0**-53 if isinstance(lane, Float64TrainingLane) else 2.0**-24
    return (
        float(np.abs(losses / judged.losses - 1).max()) / (judged.loss_spread * unit),
        max(relative_errors(named, judged.gradients).values()) / (judged.gradient_spread * unit),
    )


CASES = [
    *((config, targets) for config in ("qwen3", "gemma3") for targets in TARGET_SETS),
    *((config, "all") for config in CONFIGS if config not in ("qwen3", "gemma3")),
]


@pytest.mark.parametrize(("config", "targets"), CASES)
@pytest.mark.parametrize("lane", every_lane.TRAINING)
def test_gradients_are_those_of_autograd(lane, config, targets, tmp_path, request):
    ops = every_lane.make_training_lane(lane, request.config)
    loss, gradient = errors_of(ops, config, targets, tmp_path)
    assert exact(config, targets).gradient_spread < 10_000, "a bound that allows everything proves nothing"
    assert loss < 1
    assert gradient < 1


class Planted(Float64TrainingLane):
    """A lane that makes one classic mistake of a backward pass."""

    def __init__(self, bug):
        super().__init__()
        self.bug = bug

    def add(self, a, b, *, name):
        if self.bug == "no-residual" and name.endswith("mlp_residual.backward"):
            return b
        if self.bug == "last-of-three" and name.endswith(".sum.backward"):
            return b
        if self.bug == "update-without-input-gradient" and name.endswith(".adapted.backward"):
            return a
        return super().add(a, b, name=name)

    def scale(self, x, factor, *, name):
        if self.bug == "embedding-scale-forgotten" and name.endswith(".scaled.backward"):
            return x
        return x if self.bug == "no-scale" else super().scale(x, factor, name=name)

    def embed_backward(self, dy, token_ids, starts, rows, *, name):
        if self.bug == "a-token-counts-once":
            _, first = np.unique(token_ids, return_index=True)
            dy = np.where(np.isin(np.arange(len(dy)), first)[:, None], dy, 0)
        if self.bug == "neighbour-s-column":
            token_ids = (token_ids + 1) % rows
        return super().embed_backward(dy, token_ids, starts, rows, name=name)

    def rope_backward(self, dy, heads, table, positions, *, name):
        if self.bug == "rope-turned-further":
            return self.rope(dy, heads, table, positions, name=name)
        return super().rope_backward(dy, heads, table, positions, name=name)

    def attention_backward(self, dy, q, saved, cache, layer, batch, spec, *, name):
        if self.bug == "window-forgotten":
            spec = dataclasses.replace(spec, window=None)
        if self.bug == "softcap-forgotten":
            spec = dataclasses.replace(spec, softcap=None)
        dq, dk, dv = super().attention_backward(dy, q, saved, cache, layer, batch, spec, name=name)
        if self.bug == "one-head-of-a-group":
            dk = dk / (spec.heads // spec.kv_heads)
        return dq, dk, dv

    def softcap_backward(self, dy, x, cap, *, name):
        return (
            dy if self.bug == "logit-softcap-forgotten" else super().softcap_backward(dy, x, cap, name=name)
        )

    def rms_norm_backward(self, dy, x, weight, eps, *, name):
        if self.bug == "norm-without-its-mean":
            return dy * weight / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
        return super().rms_norm_backward(dy, x, weight, eps, name=name)

    def gelu_gate_backward(self, dy, gate, up, *, name):
        if self.bug == "other-activation":
            return super().silu_gate_backward(dy, gate, up, name=name)
        return super().gelu_gate_backward(dy, gate, up, name=name)

    def put_rows(self, x, rows, count):
        return super().put_rows(x, np.maximum(rows - (self.bug == "rows-shifted"), 0), count)


BUGS = ["no-residual", "last-of-three", "update-without-input-gradient", "no-scale", "rope-turned-further"]
BUGS += ["window-forgotten", "softcap-forgotten", "one-head-of-a-group", "logit-softcap-forgotten"]
BUGS += ["norm-without-its-mean", "other-activation", "rows-shifted"]
BUGS += ["embedding-scale-forgotten", "a-token-counts-once", "neighbour-s-column"]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_out_of_bounds(bug, tmp_path):
    _, gradient = errors_of(Planted(bug), "gemma3 capped", "all", tmp_path)
    float32_units = 2.0**-24 / 2.0**-53
    assert gradient > 10 * float32_units, "not even float32's bound would notice"
