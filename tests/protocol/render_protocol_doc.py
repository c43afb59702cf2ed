"""Write the facts of docs/protocol.md that the code states, when run."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from vox_host.workers import Limits
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.conformance_messages import ConformanceParams
from vox_plugin_api.framing import MAX_BINARY_BYTES, MAX_JSON_BYTES
from vox_plugin_api.merge_messages import MergeParams
from vox_plugin_api.request_loop import HEARTBEAT_INTERVAL_S
from vox_plugin_api.transcript import LOCAL_PARAMS

PATH = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
_METHODS = {
    "load_model": (m.LoadModelParams, "one `LoadResult`"),
    "generate": (m.GenerateParams, "`GenerateResult`s; the last has a `finish_reason`"),
    "evaluate": (m.EvaluateParams, "one `EvaluateResult` per sequence, in order"),
    "trace": (m.TraceParams, "one `TraceResult`, with one binary frame per name in `slices`"),
    "unload": (m.UnloadParams, "nothing but the final event"),
    "self_test": (m.SelfTestParams, "one `SelfTestResult`"),
    "train_plan": (t.TrainPlanParams, "one `TrainPlanResult`; its observation is a `TrainMemory`"),
    "train_begin": (t.TrainBeginParams, "one `TrainBeginResult`"),
    "train_step": (t.TrainStepParams, "one `TrainStepResult`"),
    "train_evaluate": (t.TrainEvaluateParams, "one `TrainEvaluateResult` per example, in order"),
    "train_save": (t.TrainSaveParams, "one `TrainSaveResult`"),
    "merge_adapter": (MergeParams, "one `MergeResult`"),
    "conformance": (
        ConformanceParams,
        "one `ConformanceResult`, with one binary frame per output where `with_bytes`",
    ),
}


def render(document: str) -> str:
    """Return `document` with its generated parts as the code has them now."""
    parts = {
        "limits": _limits(),
        "messages": "\n".join(_messages()),
        "methods": "\n".join(_methods()),
        "times": "\n".join(_times()),
        "local": None,
    }

    def fill(match: re.Match[str]) -> str:
        start, name, _, end = match.groups()
        if name == "local":
            return f"{start}{', '.join(f'`{p}`' for p in sorted(LOCAL_PARAMS))}{end}"
        return f"{start}\n{parts[name]}\n{end}"

    return _BLOCK.sub(fill, document)


def _limits() -> str:
    return (
        f"A message may have {MAX_JSON_BYTES // 2**20} MiB, a binary frame {MAX_BINARY_BYTES // 2**20} MiB. "
        "A longer one is refused from its header, before anything of that size is allocated."
    )


def _messages() -> Iterator[str]:
    for union, way in ((m.ToWorker, "Host to worker"), (m.ToHost, "Worker to host")):
        yield f"**{way}**\n"
        yield "| `type` | fields | meaning |"
        yield "|---|---|---|"
        for model in typing.get_args(typing.get_args(union)[0]):
            fields = ", ".join(_field(name, model) for name in model.model_fields if name != "type")
            meaning = " ".join((model.__doc__ or "").split())
            yield f"| `{model.model_fields['type'].default}` | {fields} | {meaning} |"
        yield ""


def _methods() -> Iterator[str]:
    assert set(_METHODS) == set(typing.get_args(m.Method))
    yield "| method | parameters | answer |"
    yield "|---|---|---|"
    for method, (params, answer) in _METHODS.items():
        fields = ", ".join(_field(name, params) for name in params.model_fields) or "none"
        yield f"| `{method}` | {fields} | {answer} |"


def _times() -> Iterator[str]:
    tree = ast.parse(inspect.getsource(Limits)).body[0]
    assert isinstance(tree, ast.ClassDef)
    meanings = {
        before.target.id: ast.literal_eval(after.value)
        for before, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr)
    }
    yield "| limit of the host | default | meaning |"
    yield "|---|---|---|"
    for name, value in vars(Limits()).items():
        yield f"| `{name}` | {value:g} | {' '.join(meanings[name].split())} |"
    yield f"\nA heartbeat comes every {HEARTBEAT_INTERVAL_S:g} s."


def _field(name: str, model: type[BaseModel]) -> str:
    field = model.model_fields[name]
    return f"`{name}`" if field.is_required() else f"`{name}`?"


if __name__ == "__main__":
    PATH.write_text(render(PATH.read_text()))
