"""The operators of training in plain numpy, for any lane of the numpy family.

`NumpyTraining` computes in the lane's own floats and promises no bits. `NumpyTrainingLane` is
float32. `RowTrainingLane` makes each row, and each example, by itself, so that its bits depend on
neither the batch nor its packing: for tests that compare bytes. Everything is written from the
contract's sentences and from calculus, not from docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from lanes.numpy_lane import Array, Cache, NumpyLane, Rotary
from lanes.row_lane import RowLane
from mens_core.ops import AttentionSpec, Batch, Ints
from mens_core.philox import philox
from mens_core.training_ops import AdamW, AttentionSaved, DropoutKey, TrainingOps

STREAM_DROPOUT = 77
"""Which elements are dropped is the lane's own: only that the same ones are, whatever the batch, matters."""


class NumpyTraining(NumpyLane, TrainingOps):
    # --- memory

    def from_host(self, x):
        return np.array(x, self.float)

    def matrix(self, x, *, name):
        assert x.ndim == 2, name
        return x.copy()

    # --- backward of the forward's operators

    def linear_backward(self, dy, weight, *, name):
        return self._checked(name, dy @ weight)

    def rms_norm_backward(self, dy, x, weight, eps, *, name):
        inverse = self.float(1) / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.float(eps))
        scaled = dy * weight
        shared = np.mean(scaled * x, axis=-1, keepdims=True) * inverse**3
        return self._checked(name, scaled * inverse - x * shared)

    def head_norm_backward(self, dy, x, weight, heads, eps, *, name):
        width = x.shape[1] // heads
        rows = self.rms_norm_backward(dy.reshape(-1, width), x.reshape(-1, width), weight, eps, name=name)
        return rows.reshape(x.shape)

    def rope_backward(self, dy, heads, table: Rotary, positions: Ints, *, name):
        cos, sin = (part[:, None, :].astype(self.float) for part in table.at(positions))
        y1, y2 = np.split(dy.reshape(len(dy), heads, -1), 2, axis=2)
        turned = np.concatenate([y1 * cos + y2 * sin, y2 * cos - y1 * sin], axis=2)
        return self._checked(name, turned.reshape(dy.shape))

    def attention_saving(self, q, cache: Cache, layer, batch: Batch, spec: AttentionSpec, *, name):
        out = self.attention(q, cache, layer, batch, spec, name=name)
        m = np.empty((len(q), spec.heads), self.float)
        total = np.empty_like(m)
        for rows, k, _ in self._sequences(cache, layer, batch):
            scores, visible = self._scores(q[rows], k, batch.positions[rows], spec)
            scores = np.where(visible, self._capped(scores, spec), self.float(-np.inf))
            m[rows] = scores.max(axis=2)
            total[rows] = np.exp(scores - m[rows][:, :, None]).sum(axis=2)
        return AttentionSaved(out, m, total)

    def attention_backward(
        self, dy, q, saved: AttentionSaved, cache, layer, batch: Batch, spec: AttentionSpec, *, name
    ):
        heads, group, width = spec.heads, spec.heads // spec.kv_heads, spec.head_dim
        dq = np.empty_like(q)
        dk, dv = (np.empty((len(q), spec.kv_heads * width), self.float) for _ in range(2))
        for rows, k, v in self._sequences(cache, layer, batch):
            assert batch.positions[rows][0] == 0, "a sequence has all its rows in the batch"
            scores, visible = self._scores(q[rows], k, batch.positions[rows], spec)
            capped = self._capped(scores, spec)
            p = np.where(visible, np.exp(capped - saved.m[rows][:, :, None]), 0) / saved.l[rows][:, :, None]
            p = p.astype(self.float)
            up = dy[rows].reshape(-1, heads, width)
            own = np.repeat(np.arange(spec.kv_heads), group)
            dp = np.einsum("nhc,thc->nht", up, v[:, own])
            delta = (up * saved.out[rows].reshape(-1, heads, width)).sum(axis=2)[:, :, None]
            ds = p * (dp - delta)
            if spec.softcap is not None:
                ds = ds * (self.float(1) - (capped / self.float(spec.softcap)) ** 2)
            ds = ds * self.float(spec.scale)
            queries = q[rows].reshape(-1, heads, width)
            dq[rows] = np.einsum("nht,thc->nhc", ds, k[:, own]).reshape(dq[rows].shape)
            by_group = (len(p), spec.kv_heads, group, -1)
            dk[rows] = np.einsum("ngjt,ngjc->tgc", ds.reshape(by_group), queries.reshape(by_group)).reshape(
                dk[rows].shape
            )
            dv[rows] = np.einsum("ngjt,ngjc->tgc", p.reshape(by_group), up.reshape(by_group)).reshape(
                dv[rows].shape
            )
        return tuple(self._checked(name, gradient) for gradient in (dq, dk, dv))

    def _sequences(self, cache: Cache, layer: int, batch: Batch) -> Iterator[tuple[slice, Array, Array]]:
        for s, (begin, end) in enumerate(pairwise(batch.starts.tolist())):
            seen = int(batch.positions[end - 1]) + 1
            blocks = batch.block_tables[s][batch.block_tables[s] >= 0]
            k, v = (part[layer, blocks].reshape(-1, *cache.k.shape[3:])[:seen] for part in (cache.k, cache.v))
            yield slice(begin, end), k, v

    def _scores(self, q, k, positions, spec: AttentionSpec):
        group = spec.heads // spec.kv_heads
        queries = q.reshape(-1, spec.kv_heads, group, spec.head_dim)
        scores = np.einsum("ngjc,tgc->ngjt", queries, k) * self.float(spec.scale)
        distance = positions[:, None] - np.arange(len(k))[None, :]
        visible = (distance >= 0) & (distance < (spec.window or 1 << 30))
        return scores.reshape(len(q), spec.heads, -1), visible[:, None, :]

    def _capped(self, scores, spec: AttentionSpec):
        if spec.softcap is None:
            return scores
        return self.float(spec.softcap) * np.tanh(scores / self.float(spec.softcap))

    def silu_gate_backward(self, dy, gate, up, *, name):
        with np.errstate(over="ignore"):
            sigmoid = self.float(1) / (self.float(1) + np.exp(-gate))
        slope = sigmoid * (self.float(1) + gate * (self.float(1) - sigmoid))
        return self._checked(name, dy * up * slope), self._checked(name, dy * gate * sigmoid)

    def gelu_gate_backward(self, dy, gate, up, *, name):
        one, half = self.float(1), self.float(0.5)
        root, cubic = self.float(0.7978845608028654), self.float(0.044715)
        t = np.tanh(root * (gate + cubic * gate**3))
        inner = root * (one + self.float(3) * cubic * gate**2)
        slope = half * (one + t) + half * gate * (one - t * t) * inner
        return self._checked(name, dy * up * slope), self._checked(name, dy * half * gate * (one + t))

    def softcap_backward(self, dy, x, cap, *, name):
        t = np.tanh(x / self.float(cap))
        return self._checked(name, dy * (self.float(1) - t * t))

    def put_rows(self, x, rows: Ints, count: int):
        out = np.zeros((count, x.shape[1]), self.float)
        out[rows] = x
        return out

    # --- loss

    def cross_entropy(self, logits, targets: Ints, *, name):
        rows = np.arange(len(logits))
        m = logits.max(axis=1)
        p = np.exp(logits - m[:, None])
        total = p.sum(axis=1)
        p = p / total[:, None]
        losses = (m + np.log(total)) - logits[rows, targets]
        p[rows, targets] -= self.float(1)
        self._checked(name, losses[:, None])
        return losses, p

    def example_sums(self, losses, positions: Ints, starts: Ints):
        return np.array([losses[a:b].sum() for a, b in pairwise(starts.tolist())], self.float)

    # --- adapters

    def scale(self, x, factor, *, name):
        return self._checked(name, x * self.float(factor))

    def add_scaled(self, y, x, factor, *, name):
        return self._checked(name, y + x * self.float(factor))

    def dropout(self, x, rate, key: DropoutKey, positions: Ints, examples: Ints, *, name):
        kept = np.empty(x.shape, bool)
        for row, (position, example) in enumerate(zip(positions.tolist(), examples.tolist(), strict=True)):
            seed, *_ = philox(key.seed, (position, example, STREAM_DROPOUT, key.layer))
            kept[row] = np.random.default_rng([seed, key.step]).random(x.shape[1]) >= rate
        return np.where(kept, x * self.float(1 / (1 - rate)), self.float(0))

    def embed_backward(self, dy, token_ids: Ints, starts: Ints, rows: int, *, name):
        made = []
        for a, b in pairwise(starts.tolist()):
            gradient = np.zeros((rows, dy.shape[1]), self.float)
            np.add.at(gradient, token_ids[a:b], dy[a:b])
            made.append(self._checked(name, gradient))
        return made

    def example_products(self, a, b, starts: Ints, *, name):
        return [
            self._checked(name, a[begin:end].T @ b[begin:end]) for begin, end in pairwise(starts.tolist())
        ]

    # --- the update

    def sum_of_squares(self, x, *, name):
        return np.float32((x * x).sum())

    def adamw(self, parameter, gradient, m, v, by: AdamW, *, name):
        f = self.float
        m[...] = m * f(by.beta1) + gradient * f(by.one_minus_beta1)
        v[...] = v * f(by.beta2) + gradient * gradient * f(by.one_minus_beta2)
        step = (m / f(by.correction1)) / (np.sqrt(v / f(by.correction2)) + f(by.eps))
        parameter[...] = parameter * f(by.decay) - step * f(by.learning_rate)
        self._checked(name, parameter)


class NumpyTrainingLane(NumpyTraining):
    """float32, with numpy's own order of sums."""


class RowTrainingLane(RowLane, NumpyTraining):
    """float32, one row and one example at a time."""

    def linear_backward(self, dy, weight, *, name):
        rows = [(row[:, None] * weight).sum(axis=0, dtype=self.float) for row in dy]
        return self._checked(name, np.array(rows, self.float).reshape(len(dy), weight.shape[1]))

    def attention_saving(self, q, cache, layer, batch, spec, *, name):
        saved = super().attention_saving(q, cache, layer, batch, spec, name=name)
        return AttentionSaved(self.attention(q, cache, layer, batch, spec, name=name), saved.m, saved.l)
