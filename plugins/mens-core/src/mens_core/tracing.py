"""Answer `trace`: one forward pass with a digest of everything that was made."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

import numpy as np

from mens_core.kv_blocks import blocks_for
from mens_core.models.model import Model
from mens_core.ops import Batch
from mens_core.trace import TracingOps
from vox_plugin_api import messages as m
from vox_plugin_api.backend import BackendError, Reply

__all__ = ["trace_forward"]


def trace_forward(model: Model, token_ids: Sequence[int], slices: Sequence[str]) -> Reply:
    """Run the tokens as one prefill, in a cache of its own; logits are the last row's.

    Raises:
        BackendError: `unknown-operator` for a slice that nothing is called; `non-finite`.
    """
    tracing = TracingOps(model.ops, keep=slices)
    traced = dataclasses.replace(model, ops=tracing)
    count, blocks = len(token_ids), blocks_for(len(token_ids))
    batch = Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        starts=np.array([0, count], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None, :],
        logit_rows=np.array([count - 1], np.int32),
    )
    result = traced.forward(batch, traced.new_cache(blocks))
    _refuse_unknown(slices, tracing)
    operators = [
        m.OperatorDigest(
            name=made.name,
            operator=made.operator,
            shape=list(made.shape),
            dtype=made.dtype,
            digest=made.digest,
        )
        for made in tracing.operators
    ]
    kept = tuple(tracing.kept[name].astype("<f4").tobytes() for name in slices)
    faults = [{"position": fault.row, "operator": fault.name} for fault in result.faults]
    return Reply(m.TraceResult(operators=operators), {"non_finite": faults} if faults else {}, kept)


def _refuse_unknown(slices: Sequence[str], tracing: TracingOps) -> None:
    unknown = [name for name in slices if name not in tracing.kept]
    if unknown:
        names = [made.name for made in tracing.operators]
        near = {name: difflib.get_close_matches(name, names, n=1) for name in unknown}
        raise BackendError(
            "unknown-operator",
            f"nothing in this model is called {', '.join(map(repr, unknown))}; no trace was returned",
            facts={"unknown": unknown, "near": near},
            remedy="Trace without slices to see every name.",
        )
