"""Gradients against `transformers` and `peft` in true float64: their model, their adapter, their names.

`test_backward_models` holds the lanes to a float64 forward of our own, with a bound that is
derived; here an outside program judges both. Rounding is bounded as there: every weight of theirs
is disturbed by what a rounded sum of its length may be off.
"""

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
    a_config,
    gradients_of,
    random_adapter,
    read,
    some_examples,
)
from mens_core.adapters.initial import initial_tensors
from mens_core.adapters.keys import parameter_key
from mens_core.adapters.plan import plan_adapter
from mens_core.trainer import Trainer, TrainerConfig
from oracle.transformers_float64 import float64_parts
from vox_plugin_api.families import parse_config
from vox_plugin_api.messages import RankAndAlpha

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # theirs: of tied weights, of renamed options
]
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="the outside judge of adapters: pip install peft")

LENGTHS = (2, 40, 140)
TARGETS = {
    "attention": ("q_proj", "v_proj"),
    "all": ALL_TARGETS,
    "head": ("lm_head",),
    "embedding": ("embed_tokens",),
    "patterns": ("q_proj", "o_proj", "lm_head", "embed_tokens"),
}
EXCEPTIONS = {
    "patterns": {
        "layers.0.self_attn.q_proj": RankAndAlpha(rank=2, alpha=7.0),
        "layers.1.self_attn.o_proj": RankAndAlpha(rank=4, alpha=3.0),
        "embed_tokens": RankAndAlpha(rank=3, alpha=8.0),
    }
}
"""Ranks and alphas of their own, which PEFT has by patterns."""
CASES = [("qwen3", "attention"), ("qwen3", "all"), ("qwen3", "embedding")]
CASES += [("qwen3", "patterns"), ("gemma3", "patterns")]
CASES += [("gemma3", "head"), ("gemma3", "embedding"), ("gemma3", "all")]
"""Gemma 3 is tied here, Qwen3 is not."""
RANK, ALPHA = 4, 8.0


def config_of(targets_name: str) -> TrainerConfig:
    config = a_config(TARGETS[targets_name], rank=RANK, alpha=ALPHA)
    changed = {"exceptions": EXCEPTIONS.get(targets_name, {})}
    return dataclasses.replace(config, adapter=config.adapter.model_copy(update=changed))


def their_model(
    family: str, targets_name: str, adapter: dict[str, np.ndarray], spread: float = 0.0, seed: int = 0
) -> Any:
    """Their model with the adapter on it in float64, weights and adapter disturbed by `spread` units."""
    fields = BY_FAMILY[family]
    kind = {"qwen3": transformers.Qwen3Config, "gemma3": transformers.Gemma3TextConfig}[family]
    left_out = ("architectures", "torch_dtype", "model_type")
    # Theirs gives the column of a padding token no gradient; here nothing is padded, so there is none.
    config = kind(
        **{k: v for k, v in fields.items() if k not in left_out},
        attn_implementation="eager",
        pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    tensors = random_tensors(parse_config(fields), 3)
    names = {name: torch.tensor(value).double() for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(names, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    exceptions = EXCEPTIONS.get(targets_name, {})
    lora = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(TARGETS[targets_name]),
        task_type="CAUSAL_LM",
        rank_pattern={name: by.rank for name, by in exceptions.items()},
        alpha_pattern={name: by.alpha for name, by in exceptions.items()},
    )
    adapted = peft.get_peft_model(model, lora).double()
    state = {key: torch.tensor(value).double() for key, value in adapter.items()}
    loaded = peft.set_peft_model_state_dict(adapted, state)
    assert not loaded.unexpected_keys
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for weight in adapted.parameters():
            weight *= (
                1 + torch.tensor(rng.choice((-1.0, 1.0), weight.shape)) * (weight.shape[-1] + 12) * spread
            )
    return adapted


def their_gradients(model: Any, examples) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The loss of each example, and the gradients of their sum by the keys of a PEFT file."""
    losses = []
    with float64_parts(model):
        for example in examples:
            logits = model(torch.tensor([example.token_ids]), use_cache=False).logits[0]
            at = torch.tensor(example.trained)
            wanted = torch.tensor(example.token_ids)[at]
            losses.append(-torch.log_softmax(logits, dim=1)[at - 1, wanted].sum())
        torch.stack(losses).sum().backward()
    found = {
        name.replace(".default", ""): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return torch.stack(losses).detach().numpy(), found


@functools.cache
def judged(family: str, targets_name: str):
    """Adapter, losses and gradients; spreads per unit of rounding of a loss and of a gradient."""
    examples = read(some_examples(LENGTHS))
    linears = {
        name.removeprefix("base_model.model.").removeprefix("model."): tuple(module.weight.shape)
        for name, module in their_model(family, "attention", {}).named_modules()
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name
    }
    layers = {name.removesuffix(".base_layer"): shape for name, shape in linears.items()}
    layers["embed_tokens"] = layers["lm_head"][::-1]
    plan = plan_adapter(config_of(targets_name).adapter, layers)
    adapter = random_adapter(plan.shapes)
    losses, gradients = their_gradients(their_model(family, targets_name, adapter), examples)
    unit, loss_spread, gradient_spread = 2.0**-30, 0.0, 0.0
    for seed in range(2):
        other_losses, other = their_gradients(
            their_model(family, targets_name, adapter, unit, seed), examples
        )
        loss_spread = max(loss_spread, np.abs(other_losses / losses - 1).max() / unit)
        gradient_spread = max(gradient_spread, max(errors(other, gradients).values()) / unit)
    return adapter, losses, gradients, 2 * loss_spread + 8, 2 * gradient_spread


def errors(found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {
        key: float(np.linalg.norm(found[key] - gradient) / np.linalg.norm(gradient))
        for key, gradient in exact.items()
    }


@pytest.mark.parametrize(("family", "targets"), CASES)
@pytest.mark.parametrize("lane", ["float64", "mens-cpu-ref"])
def test_gradients_are_theirs(lane, family, targets, tmp_path, request):
    ops = every_lane.make_training_lane(lane, request.config)
    adapter, losses, gradients, loss_spread, gradient_spread = judged(family, targets)
    model = open_model(write_model(tmp_path, BY_FAMILY[family], seed=3), ops).model
    config = config_of(targets)
    assert Trainer.plan_for(model, config).shapes.keys() == adapter.keys()
    found_losses, found = gradients_of(model, ops, config, adapter, read(some_examples(LENGTHS)))
    # The float64 lane shares our float32 constants (eps, scales): that is all that may differ.
    unit = 2.0**-26 if isinstance(ops, Float64TrainingLane) else 2.0**-24
    named = {parameter_key(name): gradient for name, gradient in found.items()}
    worst = max(errors(named, gradients).values())
    print(f"worst relative error of a gradient: {worst:.2e}, {worst / unit:.1f} units")
    assert gradient_spread < 10_000, "a bound that allows everything proves nothing"
    assert np.abs(found_losses / losses - 1).max() < loss_spread * unit
    assert worst < gradient_spread * unit


def test_an_update_on_a_tied_head_is_the_head_s_alone():
    """In their model as in ours: the embedding stays the base's."""
    adapter = judged("gemma3", "head")[0]
    model = their_model("gemma3", "head", adapter).base_model.model
    assert model.lm_head.base_layer.weight is model.model.embed_tokens.weight
    assert not hasattr(model.model.embed_tokens, "lora_A")
    assert set(adapter) == {f"base_model.model.lm_head.lora_{part}.weight" for part in "AB"}


def test_an_update_on_a_tied_embedding_is_the_embedding_s_alone():
    adapter = judged("gemma3", "embedding")[0]
    model = their_model("gemma3", "embedding", adapter).base_model.model
    assert model.model.embed_tokens.base_layer.weight is model.lm_head.weight
    assert type(model.lm_head) is torch.nn.Linear
    assert set(adapter) == {f"base_model.model.model.embed_tokens.lora_embedding_{part}" for part in "AB"}


def test_a_new_adapter_of_theirs_is_drawn_as_ours():
    """A zero A, a B of mean 0 and variance 1: of 97 x 40 numbers the mean is within 4 / sqrt(n)."""
    layers = {"embed_tokens": (40, 97)}
    plan = plan_adapter(a_config(("embed_tokens",), rank=97).adapter, layers)
    ours = initial_tensors(plan, 5)
    lora = peft.LoraConfig(r=97, target_modules=["embed_tokens"])
    theirs = peft.get_peft_model(their_model("gemma3", "attention", {}).base_model.unload(), lora)
    embedding = theirs.base_model.model.model.embed_tokens
    a, b = (getattr(embedding, f"lora_embedding_{part}")["default"].detach().numpy() for part in "AB")
    for found_a, found_b in ((a, b), (ours[key] for key in plan.matrices[0].keys)):
        assert (found_a.shape, found_b.shape) == ((97, 97), (40, 97))
        assert not found_a.any()
        assert abs(found_b.mean()) < 4 / found_b.size**0.5
        assert abs((found_b.astype(float) ** 2).mean() - 1) < 4 * (2 / found_b.size) ** 0.5
