"""A lane in plain numpy float32: the contract's abstract operators and nothing else.

It promises no bits (numpy sums as it likes); it shows that the models need nothing beyond the
contract, and gives a second opinion on every lane to within rounding. Quantised weights are
dequantised by the `gguf` package when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.ops import BLOCK, AttentionSpec, Batch, Fault, Ints, Ops, StoredTensor, is_quantised
from mens_core.rotary import table

F32 = np.float32
Array = npt.NDArray[np.float32]


@dataclass
class Cache:
    k: Array  # [layers, blocks, BLOCK, kv_heads, head_dim]
    v: Array


class Rotary:
    """Cosines and sines by block of 128 positions, made when first asked for."""

    def __init__(self, frequencies: Sequence[int], factor: tuple[int, int] | None) -> None:
        self._frequencies, self._factor = frequencies, factor
        self._blocks: dict[int, tuple[Array, Array]] = {}

    def at(self, positions: Ints) -> tuple[Array, Array]:
        for block in set((positions // BLOCK).tolist()) - set(self._blocks):
            span = range(block * BLOCK, (block + 1) * BLOCK)
            self._blocks[block] = table(self._frequencies, self._factor, span)
        pairs = [self._blocks[p // BLOCK] for p in positions.tolist()]
        within = (positions % BLOCK).tolist()
        cos = np.stack([cos[i] for (cos, _), i in zip(pairs, within, strict=True)])
        sin = np.stack([sin[i] for (_, sin), i in zip(pairs, within, strict=True)])
        return cos, sin


def to_float32(stored: StoredTensor) -> Array:
    """The tensor's values, exactly or as GGML's formulas give them."""
    if is_quantised(stored.format):
        import gguf

        kind = gguf.GGMLQuantizationType[stored.format.upper()]
        rows = np.frombuffer(stored.data, np.uint8).reshape(stored.shape[0], -1)
        return np.asarray(gguf.quants.dequantize(rows, kind), F32)
    if stored.format == "bf16":
        raw = np.frombuffer(stored.data, "<u2").astype(np.uint32) << 16
        return raw.view(F32).reshape(stored.shape)
    dtype = "<f2" if stored.format == "f16" else "<f4"
    return np.frombuffer(stored.data, dtype).astype(F32).reshape(stored.shape)


class NumpyLane(Ops):
    float: type[np.floating[Any]] = F32
    """What it computes in; float64_lane has more bits."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def _checked(self, name: str, y: Array) -> Array:
        bad = np.flatnonzero(~np.isfinite(y).all(axis=1))
        if len(bad):
            self._faults.append(Fault(name, tuple(bad.tolist())))
        assert y.dtype == self.float, (name, y.dtype)
        return y

    # --- memory

    def load_matrix(self, stored: StoredTensor) -> Array:
        return to_float32(stored).astype(self.float, copy=False)

    def load_vector(self, stored: StoredTensor, *, plus_one: bool = False) -> Array:
        vector = to_float32(stored).astype(self.float, copy=False)
        return vector + self.float(1) if plus_one else vector

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> Cache:
        # Not zeros: reading a position that was never written must show.
        shape = (layers, blocks, BLOCK, kv_heads, head_dim)
        return Cache(np.full(shape, np.nan, self.float), np.full(shape, np.nan, self.float))

    def rotary_table(self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None) -> Rotary:
        return Rotary(frequencies, attention_factor)

    def to_host(self, x: Array) -> Array:
        return x

    def take_faults(self) -> list[Fault]:
        faults, self._faults = self._faults, []
        return faults

    # --- operators

    def embed(self, table: Array, token_ids: Ints, scale: float | None, *, name: str) -> Array:
        rows = table[token_ids]
        return self._checked(name, rows if scale is None else rows * self.float(scale))

    def linear(self, x: Array, weight: Array, *, name: str) -> Array:
        return self._checked(name, x @ weight.T)

    def rms_norm(self, x: Array, weight: Array, eps: float, *, name: str) -> Array:
        inverse = self.float(1) / np.sqrt(
            np.mean(x * x, axis=-1, keepdims=True, dtype=self.float) + self.float(eps)
        )
        return self._checked(name, x * inverse * weight)

    def head_norm(self, x: Array, weight: Array, heads: int, eps: float, *, name: str) -> Array:
        rows = self.rms_norm(x.reshape(len(x) * heads, -1), weight, eps, name=name)
        self._faults = [
            Fault(f.name, tuple(sorted({r // heads for r in f.rows}))) if f.name == name else f
            for f in self._faults
        ]
        return rows.reshape(x.shape)

    def rope(self, x: Array, heads: int, table: Rotary, positions: Ints, *, name: str) -> Array:
        cos, sin = (part[:, None, :] for part in table.at(positions))
        x1, x2 = np.split(x.reshape(len(x), heads, -1), 2, axis=2)
        return self._checked(
            name, np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=2).reshape(x.shape)
        )

    def kv_append(self, cache: Cache, layer: int, k: Array, v: Array, batch: Batch) -> None:
        for s in range(len(batch.starts) - 1):
            for row in range(batch.starts[s], batch.starts[s + 1]):
                block, slot = divmod(int(batch.positions[row]), BLOCK)
                place = layer, int(batch.block_tables[s, block]), slot
                assert place[1] >= 0, "a row's block is not in its sequence's table"
                cache.k[place] = k[row].reshape(cache.k.shape[3:])
                cache.v[place] = v[row].reshape(cache.v.shape[3:])

    def attention(
        self, q: Array, cache: Cache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Array:
        out = np.empty((len(q), spec.heads, spec.head_dim), self.float)
        group = spec.heads // spec.kv_heads
        for s in range(len(batch.starts) - 1):
            rows = slice(int(batch.starts[s]), int(batch.starts[s + 1]))
            positions = batch.positions[rows]
            seen = int(positions[-1]) + 1
            blocks = batch.block_tables[s, : -(-seen // BLOCK)]
            k = cache.k[layer, blocks].reshape(-1, spec.kv_heads, spec.head_dim)[:seen]
            v = cache.v[layer, blocks].reshape(-1, spec.kv_heads, spec.head_dim)[:seen]
            queries = q[rows].reshape(-1, spec.kv_heads, group, spec.head_dim)
            scores = np.einsum("ngjc,tgc->ngjt", queries, k) * self.float(spec.scale)
            if spec.softcap is not None:
                scores = self.float(spec.softcap) * np.tanh(scores / self.float(spec.softcap))
            distance = positions[:, None] - np.arange(seen)[None, :]
            visible = distance >= 0
            if spec.window is not None:
                visible &= distance < spec.window
            scores = np.where(visible[:, None, None, :], scores, self.float(-np.inf))
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            # What is masked takes no part, be it NaN: 0 * NaN would let it in.
            broken = ~np.isfinite(v).all(axis=(1, 2))
            mixed = np.einsum("ngjt,tgc->ngjc", weights, np.where(broken[:, None, None], self.float(0), v))
            mixed[(visible & broken).any(axis=1)] = np.nan
            out[rows] = mixed.reshape(-1, spec.heads, spec.head_dim)
        return self._checked(name, out.reshape(q.shape))

    def add(self, a: Array, b: Array, *, name: str) -> Array:
        return self._checked(name, a + b)

    def silu_gate(self, gate: Array, up: Array, *, name: str) -> Array:
        with np.errstate(over="ignore"):
            return self._checked(name, gate / (self.float(1) + np.exp(-gate)) * up)

    def gelu_gate(self, gate: Array, up: Array, *, name: str) -> Array:
        u = self.float(0.7978845608028654) * (gate + self.float(0.044715) * gate * gate * gate)
        return self._checked(name, self.float(0.5) * gate * (self.float(1) + np.tanh(u)) * up)

    def softcap(self, x: Array, cap: float, *, name: str) -> Array:
        return self._checked(name, self.float(cap) * np.tanh(x / self.float(cap)))

    def take_rows(self, x: Array, rows: Ints) -> Array:
        return x[rows]

    # --- choosing tokens

    def penalise(
        self, logits: Array, row: int, token_ids: Ints, *, repetition: Array, subtract: Array
    ) -> None:
        x = logits[row, token_ids]
        logits[row, token_ids] = np.where(x > 0, x / repetition, x * repetition) - subtract

    def argmax(self, logits: Array) -> Ints:
        return np.argmax(logits + self.float(0), axis=1).astype(np.int32)

    def token_weights(self, logits: Array, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        x = logits[row]
        weights = np.exp((x - x.max()) / self.float(temperature))
        return np.floor(weights.astype(np.float64) * 2.0**32).astype(np.uint64)

    def log_normaliser(self, logits: Array) -> Array:
        top = logits.max(axis=1)
        return top + np.log(np.exp(logits - top[:, None]).sum(axis=1, dtype=self.float))
