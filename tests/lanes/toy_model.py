"""A small real model over a small real lane: one attention layer, numpy, row by row.

Every row is computed on its own, so the lane keeps the promise the engine relies on, and the
attention looks at the whole context, so a wrong block, position or row shows in the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mens_core.models.model import RowFault, StepResult
from mens_core.ops import BLOCK, AttentionSpec, Batch, Fault, Ops
from mens_core.philox import philox_words
from mens_core.wishes import Reading, read_logits

VOCAB = 48
WIDTH = 16
SPEC = AttentionSpec(heads=1, kv_heads=1, head_dim=WIDTH, scale=0.5)


@dataclass
class ToyLane(Ops):
    """The operators the toy model and the engine call; the others are not in this lane."""

    faults: list[Fault] = field(default_factory=list)

    def new_kv_cache(self, *, layers, kv_heads, head_dim, blocks):
        return np.full((layers, 2, blocks, BLOCK, kv_heads * head_dim), np.nan, np.float32)

    def to_host(self, x):
        return x

    def take_faults(self):
        faults, self.faults = self.faults, []
        return faults

    def _checked(self, x, name):
        finite = np.isfinite(x)
        bad = np.flatnonzero(~finite if x.ndim == 1 else ~finite.all(axis=1))
        if bad.size:
            self.faults.append(Fault(name, tuple(bad.tolist())))
        return x

    def embed(self, table, token_ids, scale, *, name):
        return self._checked(table[token_ids], name)

    def linear(self, x, weight, *, name):
        rows = [(row * weight).sum(axis=1, dtype=np.float32) for row in x]
        return self._checked(np.array(rows, np.float32).reshape(len(x), len(weight)), name)

    def kv_append(self, cache, layer, k, v, batch):
        for s in range(len(batch.starts) - 1):
            for row in range(batch.starts[s], batch.starts[s + 1]):
                block, offset = divmod(int(batch.positions[row]), BLOCK)
                cache[layer, 0, batch.block_tables[s, block], offset] = k[row]
                cache[layer, 1, batch.block_tables[s, block], offset] = v[row]

    def attention(self, q, cache, layer, batch, spec, *, name):
        out = np.empty_like(q)
        for s in range(len(batch.starts) - 1):
            for row in range(batch.starts[s], batch.starts[s + 1]):
                seen = int(batch.positions[row]) + 1
                table = batch.block_tables[s, : -(-seen // BLOCK)]
                assert (table >= 0).all()
                k, v = (cache[layer, i, table].reshape(-1, spec.head_dim)[:seen] for i in (0, 1))
                scores = (k * q[row]).sum(axis=1, dtype=np.float32) * np.float32(spec.scale)
                p = np.exp(scores - scores.max())
                out[row] = (p[:, None] * v).sum(axis=0) / p.sum()
        return self._checked(out, name)

    def add(self, a, b, *, name):
        return self._checked(a + b, name)

    def take_rows(self, x, rows):
        return x if rows.tolist() == list(range(len(x))) else x[rows]  # a view where it can be

    def penalise(self, logits, row, token_ids, *, repetition, subtract):
        x = logits[row, token_ids]
        with np.errstate(over="ignore"):
            logits[row, token_ids] = np.where(x > 0, x / repetition, x * repetition) - subtract
        self._checked(logits[row : row + 1], "penalise")

    def argmax(self, logits):
        return logits.argmax(axis=1).astype(np.int32)

    def token_weights(self, logits, row, temperature):
        x = logits[row].astype(np.float64)
        return np.floor(np.exp((x - x.max()) / temperature) * 2**32).astype(np.uint64)

    def log_normaliser(self, logits):
        rows = [x.max() + np.log(np.exp(x - x.max()).sum(dtype=np.float32)) for x in logits]
        return self._checked(np.array(rows, np.float32), "log_normaliser")

    load_matrix = load_vector = rotary_table = None
    rms_norm = head_norm = rope = silu_gate = gelu_gate = softcap = None


def matrix(seed: int, rows: int, columns: int) -> np.ndarray:
    words = philox_words(seed, 9, 0, rows * columns).astype(np.int64) - 2**31
    return (words / 2**31).astype(np.float32).reshape(rows, columns)


@dataclass
class ToyModel:
    """Embedding (token and position), one attention layer, output; records each step's shape."""

    lane: ToyLane
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    """Per step, (first position, rows) of each sequence."""
    poison: int | None = None
    """A token id whose embedding is not a number."""
    break_on: int | None = None
    """A token id that makes the lane raise."""

    def __post_init__(self):
        self.table = matrix(1, VOCAB, WIDTH)
        self.places = matrix(2, 509, WIDTH)
        self.q, self.k, self.v, self.out = (matrix(i, WIDTH, WIDTH) for i in (3, 4, 5, 6))
        self.head = matrix(7, VOCAB, WIDTH) * np.float32(2)

    def new_cache(self, blocks):
        return self.lane.new_kv_cache(layers=1, kv_heads=1, head_dim=WIDTH, blocks=blocks)

    def forward(self, batch: Batch, cache, wishes=()):
        starts = batch.starts.tolist()
        self.steps.append([(int(batch.positions[a]), b - a) for a, b in pairwise(starts)])
        if self.break_on in batch.token_ids.tolist():
            raise MemoryError("the lane ran out of memory")
        table = self.table.copy()
        if self.poison is not None:
            table[self.poison] = np.nan
        lane = self.lane
        x = lane.embed(table, batch.token_ids, None, name="embed")
        x = lane.add(x, self.places[batch.positions % 509], name="places")
        q, k, v = (lane.linear(x, w, name=n) for w, n in ((self.q, "q"), (self.k, "k"), (self.v, "v")))
        lane.kv_append(cache, 0, k, v, batch)
        x = lane.add(
            x, lane.linear(lane.attention(q, cache, 0, batch, SPEC, name="a"), self.out, name="o"), name="r"
        )
        faults = [RowFault(row, fault.name) for fault in lane.take_faults() for row in fault.rows]
        if not len(batch.logit_rows):
            return StepResult(None, tuple(faults))
        logits = lane.linear(lane.take_rows(x, batch.logit_rows), self.head, name="logits")
        rows = batch.logit_rows.tolist()
        faults += [RowFault(rows[i], fault.name) for fault in lane.take_faults() for i in fault.rows]
        spoiled = {fault.row for fault in faults}
        left = [wish for wish in wishes if rows[wish.row] not in spoiled]
        read = dict(zip([wish.row for wish in left], read_logits(lane, logits, left), strict=True))
        return StepResult(logits, tuple(faults), tuple(read.get(wish.row, Reading()) for wish in wishes))
