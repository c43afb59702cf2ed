"""Answer the protocol's `merge_adapter`: from paths and parameters to a folder that is written."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

from mens_core.adapters.copies import compare_copies
from mens_core.adapters.merging import Merging
from mens_core.adapters.served import read_adapter
from mens_core.numerics import NUMERICS_VERSION
from mens_core.training_ops import TrainingOps
from vox_plugin_api.backend import BackendError, Reply
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError, read_json_object
from vox_plugin_api.families import parse_config, plan_tensors, stored_tensors
from vox_plugin_api.merge_messages import MergeParams, MergeResult

__all__ = ["merge"]


def merge(params: MergeParams, ops: TrainingOps) -> Generator[Reply | None, None, None]:
    """Write `params.folder`, yielding None after each part and one `MergeResult` at the end.

    Raises:
        BackendError: base, adapter or folder are not right, or a number would not be finite;
            nothing is at the folder.
    """
    started = time.perf_counter()
    path = Path(params.model_dir)
    try:
        config = parse_config(read_json_object(path / "config.json"), source=str(path / "config.json"))
        adapter = read_adapter(params.adapter, config)
        checkpoint = Checkpoint.open(path)
        plan = plan_tensors(config, stored_tensors(checkpoint), source=str(path))
        merging = Merging(
            config,
            checkpoint,
            plan,
            adapter.plan,
            adapter.tensors,
            ops,
            form=params.form,
            dtype=params.dtype,
        )
        warnings = yield from compare_copies(adapter.file, adapter.copies, merging.base_table, ops)
        merged = yield from merging.write(Path(params.folder))
        checkpoint.close()
    except CheckpointError as error:
        raise BackendError(
            error.code, f"{error.message}. Nothing was written.", facts=error.facts, remedy=error.remedy
        ) from error
    result = MergeResult(
        model_digest=params.model_digest,
        adapter_digest=adapter.digest,
        numerics_version=NUMERICS_VERSION,
        files=dict(merged.files),
        matrices=list(merged.matrices),
        unchanged=list(merged.unchanged),
        is_untied=merged.is_untied,
        left_out=list(merged.left_out),
        warnings=[*adapter.warnings, *warnings],
    )
    yield Reply(result, {"merge_s": time.perf_counter() - started})
