"""Every operator with an fma in it, in numpy, over any fma: right with the exact one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mens_core.conformance.inputs import Floats
from mens_core.conformance.numpy_fma import double_rounded, flushed
from mens_core.conformance.planted_weights import HeldMatrix, HeldRotary, RememberingOps
from mens_core.ops import BLOCK, AttentionSpec, Batch, Ints, KvCache, Ops, Tensor, is_quantised
from mens_core.rotary import table as rotary_values

__all__ = ["NumpyFmaOps"]

Fma = Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], Floats]
Flush = Callable[[npt.ArrayLike], Floats]
F32 = np.float32

_EXP = (0x3C091EF0, 0x3D2AAC2C, 0x3E2AAA46, 0x3EFFFFFE, 0x3F800000, 0x3F800000)
_LOG = (0xBDDF91EC, 0x3DF7F82E, 0xBE0081F1, 0x3E1181B7, 0xBE2A978C, 0x3E4CD2A0, 0xBE800038, 0x3EAAAAA4)
_TANH = (0x3CA8FC67, 0xBD5C1AD2, 0x3E08837B, 0xBEAAAA99)


def _bits(word: int) -> np.float32:
    return F32(np.array(word, np.uint32).view(F32))


@dataclass(slots=True)
class _Cache:
    """A lane's cache, and what was put into it by layer, block and slot: keys and values [G, C]."""

    inner: KvCache
    kv_heads: int
    head_dim: int
    held: dict[tuple[int, int, int], tuple[Floats, Floats]] = field(default_factory=dict)


class NumpyFmaOps(RememberingOps):
    """docs/numerics.md, sections 2 to 9 and 11, with one `fma`; quantised products are the lane's."""

    def __init__(self, lane: Ops, fma: Fma = double_rounded, flush: Flush = flushed) -> None:
        """`flush`: of what every other operation is given and makes; `fma` does so itself."""
        super().__init__(lane)
        self._fma = fma
        self._flush = flush

    # --- what operators are made of ------------------------------------------------------------

    def values(self, x: Tensor) -> Floats:
        """Return a tensor's numbers as operands: what is subnormal counts as zero."""
        return self._flush(super().values(x))

    def c128(self, a: Floats, b: Floats) -> Floats:
        """Return the sum over the last axis of a * b."""
        a, b = np.broadcast_arrays(a, b)
        total = np.zeros(a.shape[:-1], F32)
        for start in range(0, a.shape[-1], BLOCK):
            part = np.zeros_like(total)
            for k in range(start, min(start + BLOCK, a.shape[-1])):
                part = self._fma(a[..., k], b[..., k], part)
            total = part if start == 0 else self._flush(total + part)
        return total

    def _polynomial(self, first: int, x: Floats, coefficients: Sequence[int]) -> Floats:
        p = np.full_like(x, _bits(first))
        for word in coefficients:
            p = self._fma(p, x, _bits(word))
        return p

    def exp(self, x: Floats) -> Floats:
        x = np.asarray(x, F32)
        n = self._fma(x, _bits(0x3FB8AA3B), _bits(0x4B400000)) - _bits(0x4B400000)
        r = self._fma(n, _bits(0xB5BFBE8E), self._fma(n, _bits(0xBF317200), x))
        p = np.ascontiguousarray(self._polynomial(0x3AB5639D, r, _EXP))
        shifted = p.view(np.int32) + np.where(x < -87, 0, n).astype(np.int32) * np.int32(1 << 23)
        return np.where(x < -87, F32(0), shifted.view(F32))

    def _log(self, x: Floats) -> Floats:
        b = np.ascontiguousarray(x).view(np.int32)
        e = (b - np.int32(0x3F3504F3)) >> 23
        m, n = (b - (e << 23)).view(F32), e.astype(F32)
        f = m - F32(1)
        z = self._flush(f * f)
        t = self._flush(self._flush(z * f) * self._polynomial(0x3D5AC715, f, _LOG))
        t = self._fma(z, F32(-0.5), self._fma(n, _bits(0x35BFBE8E), t))
        return self._fma(n, _bits(0x3F317200), self._flush(f + t))

    def _logistic(self, x: Floats, exponent: Floats) -> Floats:
        return self._flush(x / (F32(1) + self.exp(np.where(exponent < 88, exponent, F32(88)))))

    def tanh(self, x: Floats) -> Floats:
        a = np.abs(x)
        z = self._flush(a * a)
        small = self._fma(self._flush(self._polynomial(0xBBBA8671, z, _TANH) * z), a, a)
        e = self.exp(a * F32(-2))
        return np.copysign(np.where(a < F32(0.625), small, (F32(1) - e) / (F32(1) + e)), x)

    def _or_lane(self, made: Tensor, mine: Floats) -> Tensor:
        """Faults and what goes with them are the lane's own."""
        is_whole = np.isfinite(self.values(made)).all() and np.isfinite(mine).all()
        return self.tensor(mine) if is_whole else made

    # --- operators -----------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: HeldMatrix, *, name: str) -> Tensor:
        made = super().linear(x, weight, name=name)
        if is_quantised(weight.format):
            return made
        return self._or_lane(made, self.c128(self.values(x)[:, None], self.dense(weight).T[None]))

    def _norm(self, x: Floats, w: Floats, eps: float) -> Floats:
        with np.errstate(all="ignore"):
            mean = self._flush(self.c128(x, x) / F32(x.shape[-1]))
            inverse = F32(1) / np.sqrt(mean + self._flush(F32(eps)))
            return self._flush(self._flush(x * inverse[..., None]) * w)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, name: str) -> Tensor:
        made = self.lane.rms_norm(x, weight, eps, name=name)
        return self._or_lane(made, self._norm(self.values(x), self.values(weight).reshape(-1), eps))

    def head_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float, *, name: str) -> Tensor:
        made = self.lane.head_norm(x, weight, heads, eps, name=name)
        rows = self.values(x)
        mine = self._norm(rows.reshape(len(rows), heads, -1), self.values(weight).reshape(-1), eps)
        return self._or_lane(made, mine.reshape(rows.shape))

    def rope(self, x: Tensor, heads: int, table: HeldRotary, positions: Ints, *, name: str) -> Tensor:
        rows = self.values(x)
        made = np.empty_like(rows)
        for row, position in enumerate(positions.tolist()):
            cos, sin = rotary_values(table.frequencies, table.factor, range(position, position + 1))
            one, two = np.moveaxis(rows[row].reshape(heads, 2, -1), 1, 0)
            first = self._fma(one, cos[0], -self._flush(two * sin[0]))
            second = self._fma(two, cos[0], self._flush(one * sin[0]))
            made[row] = np.stack([first, second], axis=1).reshape(-1)
        return self.tensor(made)

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> _Cache:
        inner = self.lane.new_kv_cache(layers=layers, kv_heads=kv_heads, head_dim=head_dim, blocks=blocks)
        return _Cache(inner, kv_heads, head_dim)

    def kv_append(self, cache: _Cache, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.lane.kv_append(cache.inner, layer, k, v, batch)
        shape = (-1, cache.kv_heads, cache.head_dim)
        keys, values = self.values(k).reshape(shape), self.values(v).reshape(shape)
        for row, position in enumerate(batch.positions.tolist()):
            sequence = int(np.searchsorted(batch.starts, row, "right")) - 1
            block = int(batch.block_tables[sequence, position // BLOCK])
            cache.held[layer, block, position % BLOCK] = keys[row], values[row]

    def attention(
        self, q: Tensor, cache: _Cache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Tensor:
        made = self.lane.attention(q, cache.inner, layer, batch, spec, name=name)
        rows = self.values(q)
        mine = np.empty_like(rows)
        with np.errstate(all="ignore"):
            for row, position in enumerate(batch.positions.tolist()):
                sequence = int(np.searchsorted(batch.starts, row, "right")) - 1
                seen = range(max(0, position + 1 - (spec.window or position + 1)), position + 1)
                blocks: dict[int, list[tuple[Floats, Floats]]] = {}
                for p in seen:
                    block = int(batch.block_tables[sequence, p // BLOCK])
                    blocks.setdefault(p // BLOCK, []).append(cache.held[layer, block, p % BLOCK])
                query = rows[row].reshape(spec.heads, -1)
                mine[row] = self._attend(query, list(blocks.values()), spec).reshape(-1)
        return self._or_lane(made, mine)

    def _attend(
        self, query: Floats, blocks: list[list[tuple[Floats, Floats]]], spec: AttentionSpec
    ) -> Floats:
        group = spec.heads // spec.kv_heads
        m = total = o = np.zeros(0, F32)
        for number, held in enumerate(blocks):
            keys, values = (np.repeat(np.stack(part), group, axis=1) for part in zip(*held, strict=True))
            s = self._flush(self.c128(query[None], keys) * self._flush(F32(spec.scale)))
            if spec.softcap is not None:
                s = self._flush(F32(spec.softcap) * self.tanh(self._flush(s / F32(spec.softcap))))
            m_b = s.max(axis=0) + F32(0)
            p = self.exp(self._flush(s - m_b))
            l_b, o_b = np.zeros(len(query), F32), np.zeros_like(query)
            for j in range(len(held)):
                l_b = l_b + p[j]
                o_b = self._fma(p[j][:, None], values[j], o_b)
            if number == 0:
                m, total, o = m_b, l_b, o_b
                continue
            top = np.maximum(m, m_b) + F32(0)
            a, b = self.exp(m - top), self.exp(m_b - top)
            total = self._fma(total, a, self._flush(l_b * b))
            o = self._fma(o, a[:, None], self._flush(o_b * b[:, None]))
            m = top
        return self._flush(o / total[:, None])

    def silu_gate(self, gate: Tensor, up: Tensor, *, name: str) -> Tensor:
        made = self.lane.silu_gate(gate, up, name=name)
        with np.errstate(all="ignore"):
            x = self.values(gate)
            return self._or_lane(made, self._flush(self._logistic(x, -x) * self.values(up)))

    def gelu_gate(self, gate: Tensor, up: Tensor, *, name: str) -> Tensor:
        made = self.lane.gelu_gate(gate, up, name=name)
        with np.errstate(all="ignore"):
            x = self.values(gate)
            w = self._fma(self._flush(x * x), _bits(0xBD922279), _bits(0xBFCC422A))
            return self._or_lane(made, self._flush(self._logistic(x, self._flush(x * w)) * self.values(up)))

    def softcap(self, x: Tensor, cap: float, *, name: str) -> Tensor:
        made = self.lane.softcap(x, cap, name=name)
        with np.errstate(all="ignore"):
            return self._or_lane(
                made, self._flush(F32(cap) * self.tanh(self._flush(self.values(x) / F32(cap))))
            )

    def token_weights(self, logits: Tensor, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        x = self.values(logits)[row]
        with np.errstate(all="ignore"):
            e = self.exp(self._flush(self._flush(x - (x.max() + F32(0))) / F32(temperature)))
        return np.floor(e.astype(np.float64) * 2.0**32).astype(np.uint64)

    def log_normaliser(self, logits: Tensor) -> npt.NDArray[np.float32]:
        made = self.lane.log_normaliser(logits)
        x = self.values(logits)
        with np.errstate(all="ignore"):
            m = x.max(axis=1) + F32(0)
            e = self.exp(self._flush(x - m[:, None]))
            mine = self._flush(m + self._log(self.c128(e, np.ones((1, 1), F32))))
        return mine if np.isfinite(made).all() else made
