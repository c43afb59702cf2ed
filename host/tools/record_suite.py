"""Record what is right: run the suite's cases on the scalar reference, and write `recorded/`.

    python host/tools/record_suite.py mens_cpu_ref.training_lane:ReferenceTrainingOps [--to FOLDER]

Run it when the numerics or the cases change, and commit what it wrote with that change. Any
other lane than the scalar reference would make itself the judge of itself.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mens_core.backend import MensBackend
from mens_core.conformance.definition import SUITE_VERSION
from mens_core.conformance.planted import RoundedToBf16
from mens_core.conformance.suite import GROUPS, answer, cases_of
from mens_core.numerics import NUMERICS_VERSION
from mens_core.ops import Ops
from vox_host.conformance.expected import EXPECTED_DIR
from vox_host.conformance.session import Answer
from vox_host.conformance.tiny_adapters import write_adapter
from vox_host.conformance.tiny_models import TINY_MODELS, TinyModel, philox, write_model
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import BackendInfo, Reply
from vox_plugin_api.conformance_messages import ConformanceParams, ConformanceResult
from vox_plugin_api.merge_messages import MergeParams, MergeResult

MakeOps = Callable[[], Ops]
_DTYPES = {"f32": "F32", "i32": "I32", "u64": "U64"}


def main(arguments: list[str]) -> int:
    """Record everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lane", help="the scalar reference, as module:callable")
    parser.add_argument("--to", type=Path, default=EXPECTED_DIR)
    options = parser.parse_args(arguments)
    module, _, name = options.lane.partition(":")
    make_ops: MakeOps = getattr(importlib.import_module(module), name)
    options.to.mkdir(parents=True, exist_ok=True)
    for group in GROUPS:
        record_group(group, make_ops, options.lane, options.to)
    record_models(make_ops, options.lane, options.to)
    return 0


def record_group(group: str, make_ops: MakeOps, made_by: str, folder: Path) -> None:
    """Write GROUP.json and GROUP.safetensors."""
    cases: dict[str, Any] = {}
    arrays: list[tuple[str, str, list[int], bytes]] = []
    ops = make_ops()
    for case in cases_of(group):
        reply = answer(lambda: ops, ConformanceParams(group=group, case=case))
        assert isinstance(reply.result, ConformanceResult)
        cases[case] = reply.result.model_dump(mode="json", include={"outputs", "faults", "definition"})
        for number, (output, data) in enumerate(zip(reply.result.outputs, reply.slices, strict=True)):
            arrays.append((f"{case}#{number}", _DTYPES[output.dtype], output.shape, data))
    refuse_same_version(group, cases)
    index = {
        "numerics_version": NUMERICS_VERSION,
        "suite_version": SUITE_VERSION,
        "made_by": made_by,
        "cases": cases,
    }
    write(folder, group, index, arrays)


def refuse_same_version(group: str, cases: dict[str, Any]) -> None:
    """Exit where cases differ from those recorded under the same version of the suite."""
    recorded = json.loads((EXPECTED_DIR / f"{group}.json").read_bytes())
    if recorded.get("suite_version") != SUITE_VERSION:
        return
    before = {name: case["definition"] for name, case in recorded["cases"].items()}
    now = {name: case["definition"] for name, case in cases.items()}
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        sys.exit(
            f"{group}: these cases are not those recorded as suite {SUITE_VERSION}: {', '.join(changed)}; "
            "nothing was written for it. Raise SUITE_VERSION in mens_core/conformance/definition.py."
        )


def record_models(make_ops: MakeOps, made_by: str, folder: Path) -> None:
    """Write models.json and models.safetensors."""
    models: dict[str, Any] = {}
    arrays: list[tuple[str, str, list[int], bytes]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, model in enumerate(TINY_MODELS):
            path = Path(temporary) / model.name
            digest = write_model(model, path)
            right = Loaded(make_ops(), model, path, digest)
            rounded = Loaded(RoundedToBf16(make_ops()), model, path, digest)
            traces = {}
            for title, length in (("short", 9), ("long", 140)):
                traces[title] = right.trace(f"{model.name}/{title}", prompt(model, length), title, arrays)
            scores = right.scores()
            adapter = write_adapter(model, Path(temporary) / f"{model.name}.safetensors")
            adapted = Loaded(make_ops(), model, path, digest, adapter)
            asked = dict(requests(model, right))
            answers = {title: right.answer(params) for title, params in asked.items()}
            # The stop token is no part of its answer, and its lead is that of the same token elsewhere.
            stopped = answers["stop token"]
            stopped["margins"] = answers["greedy"]["margins"][: len(stopped["rows"]) + 1]
            for title, recorded in answers.items():
                mark_undecided(recorded, rounded.answer(asked[title]))
            models[model.name] = {
                "digest": digest,
                "tolerance": m.f32_bits(2 * greatest_change(scores, rounded.scores())),
                "traces": traces,
                "answers": answers,
                "training": right.training(number),
                "adapter": {
                    "digest": adapted.report.adapter_digest,
                    "results": adapted.scores(),
                    "merged": adapted.merged(Path(temporary) / f"{model.name}-merged"),
                },
                "scores": {"sequences": score_sequences(model), "results": scores},
            }
    write(
        folder, "models", {"numerics_version": NUMERICS_VERSION, "made_by": made_by, "models": models}, arrays
    )


def prompt(model: TinyModel, length: int, sample: int = 0) -> list[int]:
    """Return token ids that every machine draws alike."""
    return [philox(11, (i, sample, 1, 0))[0] % model.vocab_size for i in range(length)]


def score_sequences(model: TinyModel) -> list[list[int]]:
    """Return texts to be scored: one token, a line, and more than a KV block."""
    return [prompt(model, length, 5 + i) for i, length in enumerate((1, 33, 150))]


def requests(model: TinyModel, right: Loaded) -> Iterator[tuple[str, m.GenerateParams]]:
    """Yield what is asked of a model."""
    greedy = m.SamplingParams(temperature=0)
    yield "greedy", ask(prompt(model, 12), 40, greedy)
    yield "one token", ask(prompt(model, 1, 1), 20, greedy)
    # Longer than the rows of a step: read in chunks, differently so among others.
    yield "long prompt", ask(prompt(model, 330, 2), 8, greedy)
    fifth = right.answer(ask(prompt(model, 12), 5, greedy))["rows"][4][0]
    stopping = ask(prompt(model, 12), 40, greedy)
    yield "stop token", stopping.model_copy(update={"stop_token_ids": [fifth]})
    drawn = m.SamplingParams(temperature=0.800000011920929, top_k=40, top_p=0.949999988079071, seed=7)
    yield "drawn", ask(prompt(model, 20, 3), 40, drawn)
    yield (
        "repetition alone",
        ask(prompt(model, 12), 20, m.SamplingParams(temperature=0, repetition_penalty=1.5)),
    )
    yield "presence alone", ask(prompt(model, 12), 20, m.SamplingParams(temperature=0, presence_penalty=1.5))
    yield (
        "drawn with penalties",
        ask(
            prompt(model, 131, 4),
            30,
            m.SamplingParams(
                temperature=1.2999999523162842,
                min_p=0.05000000074505806,
                repetition_penalty=1.2000000476837158,
                presence_penalty=0.30000001192092896,
                frequency_penalty=0.20000000298023224,
                logit_bias={3: 1.5, 77: -2.25},
                seed=2**63 + 5,
                sample=3,
            ),
        ),
    )


def mark_undecided(recorded: dict[str, Any], rounded: dict[str, Any]) -> None:
    """Take the lead from the token at which rounding to bfloat16, which is within tolerance, parts.

    A lead in the unmodified distribution says little where penalties or a draw decided.
    """
    pairs = zip(recorded["rows"], rounded["rows"], strict=False)
    parted = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
    if parted is not None:
        recorded["margins"][parted] = m.f32_bits(0.0)


def ask(token_ids: list[int], max_tokens: int, sampling: m.SamplingParams) -> m.GenerateParams:
    """Return a request that shows the lead of each token over the next best."""
    return m.GenerateParams(token_ids=token_ids, max_tokens=max_tokens, sampling=sampling, logprobs=2)


def greatest_change(right: list[dict[str, Any]], rounded: list[dict[str, Any]]) -> float:
    """Return how far any logprob moved."""
    pairs = [
        (m.f32_from_bits(a[1]), m.f32_from_bits(b[1]))
        for one, other in zip(right, rounded, strict=True)
        for a, b in zip(one["rows"], other["rows"], strict=True)
        if a[1] is not None
    ]
    return max(abs(a - b) for a, b in pairs)


class Loaded:
    """A tiny model in a backend of this process."""

    def __init__(
        self, ops: Ops, model: TinyModel, path: Path, digest: str, adapter: m.AdapterParams | None = None
    ) -> None:
        capabilities: tuple[m.Capability, ...] = ("generate", "evaluate", "trace", "train", "adapters")
        info = BackendInfo("recorder", "0", "cpu", ("canonical",), capabilities)
        self._model = model
        self._backend = MensBackend(info, lambda _: ops, _no_self_test)
        load = m.LoadModelParams(
            model_dir=str(path), model_digest=digest, memory_bytes=64 << 20, adapter=adapter
        )
        *_, reply = self._backend.load_model(load)
        assert reply is not None and isinstance(reply.result, m.LoadResult)
        self.report = reply.result
        self._load = load

    def merged(self, folder: Path) -> dict[str, Any]:
        """Return what merging its adapter into it writes, and what became of which matrix."""
        assert self._load.adapter is not None
        params = MergeParams(
            model_dir=self._load.model_dir,
            model_digest=self._load.model_digest,
            adapter=self._load.adapter,
            folder=str(folder),
        )
        *_, reply = self._backend.merge_adapter(params)
        assert reply is not None and isinstance(reply.result, MergeResult)
        compared = {"adapter_digest", "files", "matrices", "unchanged", "is_untied", "left_out"}
        return reply.result.model_dump(mode="json", include=compared)

    def trace(
        self, key: str, token_ids: list[int], title: str, arrays: list[tuple[str, str, list[int], bytes]]
    ) -> dict[str, Any]:
        """Return a trace; the bytes of a short one, of a long one those of its end."""
        operators = _only(self._backend.trace(m.TraceParams(token_ids=token_ids))).operators
        names = [o.name for o in operators]
        assert len(set(names)) == len(names)
        kept = names if title == "short" else names[-1:]
        reply = next(self._backend.trace(m.TraceParams(token_ids=token_ids, slices=kept)))
        assert reply is not None
        for name, data in zip(kept, reply.slices, strict=True):
            number = names.index(name)
            arrays.append((f"{key}#{number}", "F32", operators[number].shape, data))
        return {"token_ids": token_ids, "operators": [o.model_dump(mode="json") for o in operators]}

    def answer(self, params: m.GenerateParams) -> dict[str, Any]:
        """Return an answer, with the lead of each token."""
        tokens: list[m.GeneratedToken] = []
        reason = None
        for reply in self._backend.generate(params):
            if reply is not None and isinstance(reply.result, m.GenerateResult):
                tokens += reply.result.tokens
                reason = reply.result.finish_reason or reason
        leads = [m.f32_bits(token.top[0].logprob - token.top[1].logprob) for token in tokens]
        return {
            "params": params.model_dump(mode="json"),
            "rows": Answer(tuple(tokens), None).as_rows(),
            "margins": leads,
            "finish_reason": reason,
        }

    def scores(self) -> list[dict[str, Any]]:
        """Return the scores of the texts."""
        params = m.EvaluateParams(sequences=score_sequences(self._model), top_logprobs=2)
        made = []
        for reply in self._backend.evaluate(params):
            if reply is not None and isinstance(reply.result, m.EvaluateResult):
                rows = Answer(tuple(reply.result.tokens), None).as_rows()
                made.append({"rows": rows, "logits_digest": reply.result.logits_digest})
        return made

    def training(self, number: int) -> dict[str, Any]:
        """Return steps of training: with and without dropout, clipping and decay."""
        begin = t.TrainBeginParams(
            adapter=t.AdapterConfig(
                rank=4,
                alpha=8.0,
                targets=["q_proj", "v_proj", "down_proj", *(["embed_tokens"] if number else [])],
                dropout=0.125 if number == 1 else 0.0,
            ),
            optimizer=t.OptimizerConfig(
                learning_rate=0.0078125,
                weight_decay=0.0 if number == 0 else 0.0625,
                max_gradient_norm=None if number == 2 else 0.5,
            ),
            schedule=t.Schedule(kind="cosine", warmup_steps=1, total_steps=5),
            seed=41 + number,
        )
        (begun,) = self._results(self._backend.train_begin(begin))
        steps = []
        for step in range(4):
            examples = [self._example(step, sample) for sample in range(3)]
            (result,) = self._results(self._backend.train_step(t.TrainStepParams(examples=examples)))
            steps.append({"examples": [e.model_dump(mode="json") for e in examples], "result": result})
        scored = t.TrainEvaluateParams(
            examples=[t.TrainExample.model_validate(e) for e in steps[0]["examples"]], logits_digest=True
        )
        evaluated = self._results(self._backend.train_evaluate(scored))
        with tempfile.TemporaryDirectory() as folder:
            save = t.TrainSaveParams(folder=str(Path(folder) / "saved"))
            (saved,) = self._results(self._backend.train_save(save))
        return {
            # Which device computes what decides no bit, and is not the suite's to say.
            "begin": begin.model_dump(mode="json", exclude={"devices"}),
            "begun": begun,
            "steps": steps,
            "evaluated": evaluated,
            "files": saved["files"],
        }

    def _example(self, step: int, sample: int) -> t.TrainExample:
        length = (5, 17, 140 if step == 1 else 9)[sample]
        token_ids = prompt(self._model, length, 100 + 3 * step + sample)
        mask = [position > 0 and (sample != 1 or position % 3 > 0) for position in range(length)]
        return t.TrainExample(token_ids=token_ids, loss_mask=mask)

    def _results(self, stream: Iterator[Reply | None]) -> list[dict[str, Any]]:
        replies = [reply for reply in stream if reply is not None and reply.result is not None]
        return [reply.result.model_dump(mode="json") for reply in replies if reply.result is not None]


def _no_self_test() -> m.SelfTestResult:
    raise AssertionError("the recorder starts no worker")


def _only(stream: Iterator[Reply | None]) -> m.TraceResult:
    reply = next(stream)
    assert reply is not None and isinstance(reply.result, m.TraceResult)
    return reply.result


def write(
    folder: Path, name: str, index: dict[str, Any], arrays: list[tuple[str, str, list[int], bytes]]
) -> None:
    """Write an index and its arrays; two recordings give the same bytes."""
    header: dict[str, Any] = {
        "__metadata__": {"index_sha256": hashlib.sha256(m.canonical_json(index)).hexdigest()}
    }
    at = 0
    for key, dtype, shape, data in arrays:
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    blob = len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in arrays)
    (folder / f"{name}.json").write_bytes(m.canonical_json(index) + b"\n")
    (folder / f"{name}.safetensors").write_bytes(blob)
    sys.stdout.write(f"{name}: {len(arrays)} arrays, {len(blob)} bytes\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
