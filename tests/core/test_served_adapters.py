"""A model served with an adapter: what was trained, to the bit, or an error that names what doesn't fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lanes import every_lane
from lanes.quantised_model import write_both
from lanes.row_lane import RowLane
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from lanes.training import ALL_TARGETS, a_config, random_adapter, some_examples
from mens_core.adapters.file import safetensors_bytes
from mens_core.adapters.keys import adapter_digest
from mens_core.adapters.plan import plan_adapter
from mens_core.adapters.served import layer_shapes
from mens_core.backend import MensBackend
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.adapter_keys import adapter_keys
from vox_plugin_api.backend import BackendError, BackendInfo, Reply
from vox_plugin_api.checkpoint import read_json_object
from vox_plugin_api.families import parse_config

INFO = BackendInfo(
    "mens-test", "1.0.0", "cpu", ("canonical",), ("generate", "evaluate", "trace", "train", "adapters")
)
DIGEST = "ab" * 32
PASSED = m.SelfTestResult(numerics_version=1, cases=1, failed=[], vectors_digest=DIGEST)
CONFIG = a_config(dropout=0.2, learning_rate=0.05)
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
        "head_dim": 32}  # fmt: skip
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9], [*range(1, 90)]]


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def bases(family, tmp_path_factory) -> dict[str, Path]:
    config = BY_FAMILY[family] | WIDE | ({"sliding_window_pattern": 2} if family == "gemma3" else {})
    quantised, plain = write_both(tmp_path_factory.mktemp(family), config)
    return {"quantised": quantised, "float": plain}


@pytest.fixture(scope="module")
def tiny(family, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp(f"tiny-{family}"), BY_FAMILY[family])


@pytest.fixture
def cpu(request) -> Iterator[Any]:
    """Makes the CPU lane's backend, as its plugin does."""
    every_lane.make_lane("mens-cpu-ref", request.config)
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.training_lane import CpuTrainingOps

    library = load_library()

    def make_lane(params: m.LoadModelParams) -> CpuOps:
        library.set_threads(params.threads)
        return CpuOps(library.kernels)

    yield lambda: MensBackend(
        INFO, make_lane, lambda: PASSED, make_training_lane=lambda ops: CpuTrainingOps(library)
    )
    library.set_threads(1)


def load(backend: MensBackend, path: Path, **params: Any) -> Reply:
    *_, reply = backend.load_model(
        m.LoadModelParams(model_dir=str(path), model_digest=DIGEST, **{"threads": 1, **params})
    )
    return reply


def replies(stream: Any) -> list[Reply]:
    return [reply for reply in stream if reply is not None]


def wire(stream: Any) -> list[bytes]:
    return [m.canonical_json(reply.result) for reply in replies(stream)]


def evaluated(backend: MensBackend, sequences: list[list[int]] = SEQUENCES) -> list[str]:
    stream = backend.evaluate(m.EvaluateParams(sequences=sequences))
    return [reply.result.logits_digest for reply in replies(stream)]


def params_of(path: Path, plan: Any, **changes: Any) -> m.AdapterParams:
    fields = {
        "file": str(path),
        "digest": hashlib.sha256(path.read_bytes()).hexdigest(),
        "config": plan.config,
        "key_map": {key: key for key in plan.shapes},
    }
    return m.AdapterParams(**{**fields, **changes})


def plan_of(model: Path, targets: Any = ALL_TARGETS, **options: Any) -> Any:
    config = parse_config(read_json_object(model / "config.json"))
    return plan_adapter(a_config(targets, **options).adapter, layer_shapes(config), is_served=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Of one layer, where the lane doesn't matter."""
    return write_model(tmp_path_factory.mktemp("small"), BY_FAMILY["qwen3"] | {"num_hidden_layers": 1})


@pytest.fixture
def little(small, tmp_path) -> tuple[Any, dict[str, np.ndarray], Path]:
    """An adapter of every layer of the small model: plan, tensors, file."""
    return an_adapter(small, tmp_path)


@pytest.fixture
def some(tiny, tmp_path) -> tuple[Any, dict[str, np.ndarray], Path]:
    """An adapter of every layer of the tiny model: plan, tensors, file."""
    return an_adapter(tiny, tmp_path)


def an_adapter(model: Path, tmp_path: Path) -> tuple[Any, dict[str, np.ndarray], Path]:
    plan = plan_of(model)
    tensors = random_adapter(plan.shapes)
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    return plan, tensors, path


@pytest.mark.parametrize("base", ["float", "quantised"])
def test_what_was_trained_is_what_is_served(cpu, bases, base, tmp_path):
    """The project's promise: training's logits are the served adapter's, byte for byte."""
    trained = cpu()
    load(trained, bases[base])
    list(trained.train_begin(t.TrainBeginParams(adapter=CONFIG.adapter, optimizer=CONFIG.optimizer)))
    for seed in range(2):
        list(trained.train_step(t.TrainStepParams(examples=some_examples((12, 5), seed=seed))))
    examples = [
        t.TrainExample(token_ids=ids, loss_mask=[False, *[True] * (len(ids) - 1)]) for ids in SEQUENCES
    ]
    within = [
        reply.result.logits_digest
        for reply in replies(
            trained.train_evaluate(t.TrainEvaluateParams(examples=examples, logits_digest=True))
        )
    ]
    (saved,) = replies(trained.train_save(t.TrainSaveParams(folder=str(tmp_path / "step"))))
    plan = plan_of(bases[base], dropout=0.2)
    for threads in (1, 2):
        served = cpu()
        adapter = params_of(tmp_path / "step" / "adapter.safetensors", plan)
        report = load(served, bases[base], adapter=adapter, threads=threads).result
        assert report.adapter_digest == saved.result.adapter_digest
        assert report.warnings == load(cpu(), bases[base]).result.warnings
        assert evaluated(served) == within
        assert evaluated(trained) != within, "the trained worker serves its base"


def test_layers_are_replayed_with_their_updates(cpu, tiny, some):
    """The native recording has the update; one by one and in one call, the bytes are the same."""
    from mens_cpu_ref.replaying import Replayer

    plan, _, path = some
    made = []
    for is_replaying in (True, False):
        backend = cpu()
        load(backend, tiny, adapter=params_of(path, plan))
        replayer = backend._served.ops._replayer
        assert isinstance(replayer, Replayer)
        if not is_replaying:
            backend._served.ops._replayer = None
        made.append(wire(backend.generate(ask([5, 6, 7]))) + wire(backend.generate(ask([*range(90)]))))
        if is_replaying:
            assert replayer._recording is not None
            kinds = replayer._recording.operations[:, 0].tolist()
            ends = ("lm_head", "embed_tokens")
            layers = len([name for name in layer_shapes(backend._served.config) if name not in ends])
            assert kinds.count(10) == layers
    assert made[0] == made[1]


def ask(token_ids: list[int], **wishes: Any) -> m.GenerateParams:
    sampling = m.SamplingParams(temperature=0)
    return m.GenerateParams(token_ids=token_ids, max_tokens=6, sampling=sampling, logprobs=3, **wishes)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_nothing_but_the_row_decides(cpu, tiny, some, threads):
    """Threads, other sequences in the batch and the cut of a prompt change no bit."""
    plan, _, path = some
    alone = cpu()
    load(alone, tiny, adapter=params_of(path, plan))
    # Longer than the rows of a step: read in chunks, differently so among others.
    sequences = [*SEQUENCES, [7 * i % 97 for i in range(300)]]
    expected = [wire(alone.generate(ask(ids))) for ids in sequences]
    together = cpu()
    load(together, tiny, adapter=params_of(path, plan), threads=threads)
    streams = [together.generate(ask(ids)) for ids in sequences]
    found: list[list[bytes]] = [[] for _ in streams]
    while any(streams):
        for i, stream in enumerate(streams):
            try:
                reply = next(stream) if stream else None
            except StopIteration:
                streams[i] = None
                continue
            if reply is not None:
                found[i].append(m.canonical_json(reply.result))
    assert found == expected


@pytest.mark.parametrize("which", ["A", "B", "alpha"])
def test_a_zero_adapter_gives_the_bases_bytes(cpu, tiny, some, which):
    plan, tensors, path = some
    if which == "alpha":
        config = plan.config.model_copy(update={"alpha": 0.0})
    else:
        config = plan.config
        tensors = {
            key: np.zeros_like(values) if key.removesuffix(".weight").endswith(f"_{which}") else values
            for key, values in tensors.items()
        }
        path.write_bytes(safetensors_bytes(tensors))
    base, adapted = cpu(), cpu()
    load(base, tiny)
    report = load(adapted, tiny, adapter=params_of(path, plan, config=config)).result
    assert evaluated(adapted) == evaluated(base)
    assert wire(adapted.generate(ask([1, 2, 3]))) == wire(base.generate(ask([1, 2, 3])))
    # Left out, not added: +0 would turn a -0 into +0.
    trace = m.TraceParams(token_ids=[1, 2, 3])
    assert wire(adapted.trace(trace)) == wire(base.trace(trace))
    # L2: an alpha of 0 is served with a warning, which is the host's: it read the configuration.
    said = [w for w in report.warnings if "changes nothing" in w]
    assert len(said) == (which != "alpha")


@pytest.mark.parametrize("by", ["alpha", "values"])
def test_an_update_after_which_nothing_would_be_finite_is_refused_at_the_load(cpu, tiny, some, by):
    plan, tensors, path = some
    config = plan.config
    if by == "alpha":
        config = config.model_copy(update={"alpha": 1e29})
    else:
        large = {key: values * np.float32(2.0**40) for key, values in tensors.items()}
        path.write_bytes(safetensors_bytes(large))
    with pytest.raises(BackendError) as caught:
        load(cpu(), tiny, adapter=params_of(path, plan, config=config))
    found = caught.value.error
    assert (found.code, found.facts["layer"] in {x.name for x in plan.matrices}) == ("adapter-scale", True)
    assert "whose square float32 doesn't hold" in found.message and found.remedy


def test_logits_may_be_as_large_as_they_are(cpu, tiny, tmp_path, some):
    """Nothing squares them."""
    plan, tensors, path = some
    ((*keys,),) = (matrix.keys for matrix in plan.matrices if matrix.name == "lm_head")
    path.write_bytes(
        safetensors_bytes({k: v * np.float32(2.0**40 if k in keys else 1) for k, v in tensors.items()})
    )
    load(cpu(), tiny, adapter=params_of(path, plan))


CASES = Path(__file__).parents[1] / "cases" / "hand" / "lora"


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """The model of the cases: one layer, q_proj [64, 32], k_proj [32, 32], down_proj [32, 64]."""
    config = BY_FAMILY["qwen3"] | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return write_model(tmp_path_factory.mktemp("toy"), config)


def case(name: str, *layers: str) -> m.AdapterParams:
    """A case's file with its configuration, for the named layers, else those of its targets in layer 0."""
    config = json.loads((CASES / name / "adapter_config.json").read_text())
    rooms = {"q_proj": "self_attn", "k_proj": "self_attn", "down_proj": "mlp"}
    named = layers or [f"layers.0.{rooms[target]}.{target}" for target in config["target_modules"]]
    path = CASES / name / "adapter_model.safetensors"
    return m.AdapterParams(
        file=str(path),
        digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        config=m.AdapterConfig(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=list(named),
            rank_stabilised=config["use_rslora"],
        ),
        key_map={key: key for layer in named for key in adapter_keys(layer)},
    )


def test_one_adapter_after_another_leaves_nothing_behind(toy):
    """L8: what ran before leaves nothing: each step gives what it gives on a fresh worker."""
    sequence = json.loads((CASES / "L8_sequence.json").read_text())
    prompt = [ord(letter) % 97 for letter in sequence["prompt"]]

    def answers(backend: MensBackend, name: str | None) -> list[bytes]:
        load(backend, toy, adapter=None if name is None else case(name))
        wish = ask(prompt).model_copy(update={"max_tokens": sequence["max_tokens"]})
        found = wire(backend.generate(wish))
        backend.unload(m.UnloadParams())
        return found

    steps = [step["adapter"] for step in sequence["steps"]]
    cold = {name: answers(a_backend(), name) for name in set(steps)}
    assert len({b"".join(found) for found in cold.values()}) == 3
    warm = a_backend()
    for name in steps:
        assert answers(warm, name) == cold[name]


def test_the_cases_that_fit_change_the_answer_by_their_scale(toy):
    """L1, L2: what fits is applied, with alpha / r, or alpha / sqrt(r)."""
    base = a_backend()
    load(base, toy)
    for name, scale in (("L1_right", 2.0), ("L2_plain", 2.0), ("L2_rslora", 8.0)):
        adapted = a_backend()
        assert load(adapted, toy, adapter=case(name)).result.warnings == []
        assert evaluated(adapted) != evaluated(base)
        linears = adapted._served.loaded.model.linears.values()
        assert {linear.lora.scale for linear in linears if linear.lora is not None} == {scale}
    adapted = a_backend()
    # Whoever read its configuration says so (`AdapterSource.notes`): once is enough.
    assert load(adapted, toy, adapter=case("L2_alpha0")).result.warnings == []
    assert evaluated(adapted) == evaluated(base)


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        (
            "L1_no_match",
            ["missing: 4", "without a place in this model: 4", "transformer.h.layers.0.mlp.down_proj.lora_A"],
        ),
        ("L1_partial", ["without a place in this model: 2", "layers.7.self_attn.q_proj.lora_A"]),
        ("L1_unpaired", ["without a place in this model: 1", "layers.0.self_attn.v_proj.lora_A"]),
        ("L1_bad_shape", ["layers.0.self_attn.k_proj.lora_B.weight is F32 [64, 4]", "[32, 4]"]),
        ("L2_r_mismatch", ["config r=8, tensors r=16"]),
    ],
)
def test_the_cases_that_do_not_fit_are_refused_by_name(toy, name, mentions):
    error = refusal(toy, case(name))
    assert error.code == "adapter-tensors"
    for mention in mentions:
        assert mention in error.message


def a_backend(**options: Any) -> MensBackend:
    from lanes.numpy_training import RowTrainingLane

    return MensBackend(
        INFO, lambda params: RowLane(), lambda: PASSED, make_training_lane=lambda ops: RowTrainingLane(),
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_formats_are_widened_exactly(small, little, dtype):
    plan, tensors, path = little
    header, pieces, wide, at = {}, [], {}, 0
    for key, values in tensors.items():
        if dtype == "float16":
            stored = values.astype("<f2")
            wide[key] = stored.astype(np.float32)
        else:
            stored = (values.view(np.uint32) >> 16).astype("<u2")
            wide[key] = (stored.astype(np.uint32) << 16).view(np.float32)
        header[key] = {
            "dtype": {"float16": "F16", "bfloat16": "BF16"}[dtype],
            "shape": list(values.shape),
            "data_offsets": [at, at + stored.nbytes],
        }
        at += stored.nbytes
        pieces.append(stored.tobytes())
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))
    report = load(a_backend(), small, adapter=params_of(path, plan)).result
    assert report.adapter_digest == adapter_digest(wide)


def test_other_names_in_the_file_are_mapped(small, little):
    plan, tensors, path = little
    key_map = {key: f"x/{number}" for number, key in enumerate(plan.shapes)}
    save_file({key_map[key]: values for key, values in tensors.items()}, path)
    report = load(a_backend(), small, adapter=params_of(path, plan, key_map=key_map)).result
    assert report.adapter_digest == adapter_digest(tensors)


def refusal(small: Path, adapter: m.AdapterParams) -> m.WorkerError:
    backend = a_backend()
    with pytest.raises(BackendError) as caught:
        load(backend, small, adapter=adapter)
    load(backend, small)  # nothing was loaded, so something can be
    return caught.value.error


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (lambda tensors: tensors.pop(Q), ["missing: 1", Q]),
        (lambda tensors: tensors.update(more=tensors[Q]), ["without a place in this model: 1", "more"]),
        (lambda tensors: tensors.update({Q: tensors[Q].T.copy()}), [Q, "[40, 4]", "[4, 40]"]),
        (
            lambda tensors: tensors.update({Q: tensors[Q].astype(np.float64)}),
            [Q, "F64", "F32 or F16 or BF16"],
        ),
        (lambda tensors: tensors[Q].__setitem__((0, 0), np.nan), ["infinities or NaN", Q]),
        (lambda tensors: tensors[Q].__setitem__((0, 0), np.inf), ["infinities or NaN", Q]),
    ],
    ids=["missing", "orphan", "shape", "format", "nan", "infinite"],
)
def test_a_tensor_that_does_not_fit_is_named(small, little, change, mentions):
    """L1: nothing is dropped, nothing is made up."""
    plan, tensors, path = little
    tensors = dict(tensors)
    change(tensors)
    save_file(tensors, path)
    error = refusal(small, params_of(path, plan))
    assert error.code == "adapter-tensors"
    for mention in mentions:
        assert mention in error.message


def test_another_rank_than_the_configuration_says(small, little):
    """L2: config r=8, tensors r=16."""
    _, tensors, path = little
    plan = plan_of(small, rank=8)
    error = refusal(small, params_of(path, plan))
    assert error.code == "adapter-tensors"
    assert "config r=8, tensors r=4" in error.message
    assert len(error.facts["wrong"]) == len(tensors)


def test_a_layer_that_the_model_has_not(small, little):
    """L1: one pair for a layer beyond the last."""
    plan, _, path = little
    config = plan.config.model_copy(update={"targets": ["lm_head", "layers.77.self_attn.q_proj"]})
    error = refusal(small, params_of(path, plan, config=config))
    assert error.code == "adapter-target"
    assert "layers.77.self_attn.q_proj" in error.message


def test_one_tensor_for_two_places(small, little):
    plan, _, path = little
    first, second, *_ = sorted(plan.shapes)
    error = refusal(small, params_of(path, plan, key_map={**{k: k for k in plan.shapes}, second: first}))
    assert error.code == "adapter-tensors"
    assert "two places" in error.message


def test_another_file_than_was_named(small, little):
    plan, _, path = little
    adapter = params_of(path, plan)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    error = refusal(small, adapter)
    assert error.code == "adapter-digest"
    assert error.facts["expected"] == f"sha256:{adapter.digest}"
    assert error.facts["found"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    path.unlink()
    assert refusal(small, adapter).code == "adapter-unreadable"
    path.write_bytes(b"no safetensors")
    assert refusal(small, params_of(path, plan)).code == "safetensors-invalid"


def test_a_lane_without_the_capability_refuses_before_it_reads(small, little):
    plan, _, path = little
    info = BackendInfo("mens-test", "1.0.0", "cpu", ("canonical",), ("generate",))
    backend = MensBackend(info, lambda params: RowLane(), lambda: PASSED)
    with pytest.raises(BackendError) as caught:
        load(backend, small, adapter=params_of(path, plan))
    assert caught.value.error.code == "not-supported"


def test_a_trace_names_the_updates_operators(cpu, tiny, some):
    plan, _, path = some
    backend = cpu()
    load(backend, tiny, adapter=params_of(path, plan))
    wanted = "layers.0.self_attn.q_proj.adapted"
    (reply,) = replies(backend.trace(m.TraceParams(token_ids=[3, 1, 4], slices=[wanted])))
    by_name = {made.name: made for made in reply.result.operators}
    names = [f"layers.0.self_attn.q_proj{part}" for part in ("", ".lora_A", ".lora_B", ".adapted")]
    assert [by_name[name].operator for name in names] == ["linear", "linear", "linear", "add_scaled"]
    assert by_name[names[1]].shape == [3, 4]
    of_embedding = [made.operator for made in reply.result.operators if made.name.startswith("embed_tokens")]
    scaled = ["scale"] if parse_config(read_json_object(tiny / "config.json")).embed_scale else []
    assert of_embedding == ["embed", "embed", "linear", "add_scaled", *scaled]
    y, v = (
        np.frombuffer(
            replies(backend.trace(m.TraceParams(token_ids=[3, 1, 4], slices=[name])))[0].slices[0], "<f4"
        )
        for name in (names[0], names[2])
    )
    assert np.array_equal(np.frombuffer(reply.slices[0], "<f4"), y + v * np.float32(plan.matrices[0].scale))


def test_training_begins_from_the_base_whatever_is_served(small, little):
    plan, _, path = little
    begin = t.TrainBeginParams(adapter=CONFIG.adapter, optimizer=CONFIG.optimizer)
    step = t.TrainStepParams(examples=some_examples((5, 9)))
    made = []
    for adapter in (None, params_of(path, plan)):
        backend = a_backend()
        load(backend, small, adapter=adapter)
        list(backend.train_begin(begin))
        made.append(wire(backend.train_step(step)))
    assert made[0] == made[1]


def test_the_shapes_of_a_config_are_those_of_its_model(tiny):
    model = open_model(tiny, RowLane()).model
    shapes = layer_shapes(model.config)
    assert shapes == model.layer_shapes
    assert shapes == {name: linear.shape for name, linear in model.linears.items()} | {
        "embed_tokens": (model.config.hidden_size, model.config.vocab_size)
    }


def test_the_file_is_the_one_that_training_saves(little):
    _, tensors, path = little
    assert {key: values.tobytes() for key, values in load_file(path).items()} == {
        key: values.tobytes() for key, values in tensors.items()
    }
