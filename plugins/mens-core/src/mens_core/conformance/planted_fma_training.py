"""Every operator of training that has an fma, in numpy, over any fma: right with the exact one alone."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.inputs import Floats
from mens_core.conformance.numpy_fma import double_rounded, flushed
from mens_core.conformance.planted_fma import Fma, NumpyFmaOps
from mens_core.ops import BLOCK, AttentionSpec, Ops

__all__ = ["with_training_fma"]

F32 = np.float32
Mask = npt.NDArray[np.bool_]


def _bits(word: int) -> np.float32:
    return F32(np.array(word, np.uint32).view(F32))


def with_training_fma(lane: Ops, fma: Fma = double_rounded) -> Ops:
    """Return the lane with docs/numerics.md, sections 12 and 13, computed with `fma`; its forward stays.

    The lane is one that trains and whose tensors are arrays of the host (`values`): AdamW works in place.
    A call in which something is not finite is the lane's own.
    """
    planted = copy.copy(lane)
    changed = {name: value for name, value in vars(_TrainingFma).items() if callable(value)}
    planted.__class__ = type("TrainingFma", (type(lane),), changed)  # one base, so that the layout stays
    vars(planted).update(_kit=_Arithmetic(lane, fma), _appended={})
    return planted


class _Arithmetic(NumpyFmaOps):
    """What the operators are made of."""

    def fma(self, a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
        return self._fma(a, b, c)

    def norm_gradient(self, dy: Floats, x: Floats, w: Floats, eps: float) -> Floats:
        width = F32(x.shape[-1])
        g = flushed(dy * w)
        inverse = F32(1) / np.sqrt(flushed(self.c128(x, x) / width) + flushed(F32(eps)))
        c = flushed(flushed(self.c128(g, x) * inverse) / width)
        n = flushed(x * inverse[..., None])
        return flushed(self.fma(-n, c[..., None], g) * inverse[..., None])

    def slopes(self, operator: str, x: Floats) -> tuple[Floats, Floats]:
        """Return an activation and its derivative."""
        z = flushed(x * x)
        is_silu = operator == "silu_gate_backward"
        exponent = -x if is_silu else flushed(x * self.fma(z, _bits(0xBD922279), _bits(0xBFCC422A)))
        e = self.exp(np.where(exponent < 88, exponent, F32(88)))
        d = F32(1) + e
        a, r = flushed(x / d), flushed(F32(1) / d)
        q = flushed(e * r)
        if is_silu:
            return a, self.fma(a, q, r)
        n = self.fma(np.minimum(z, _bits(0x43000000)), _bits(0x3E5B33B6), _bits(0x3FCC422A))
        return a, self.fma(flushed(a * q), n, r)

    def tanh_slope(self, x: Floats) -> Floats:
        e = self.exp(np.abs(x) * F32(-2))
        u = F32(2) / (F32(1) + e)
        return flushed(flushed(e * u) * u)

    def pairs(self, rows: dict[str, Floats], spec: AttentionSpec, seen: Mask) -> tuple[Floats, Floats]:
        """Return P and dS of one head's pairs [i, j]; of those that are not seen, anything."""
        delta = self.c128(rows["dy"], rows["out"])
        x = flushed(self.c128(rows["q"][:, None], rows["k"][None]) * flushed(F32(spec.scale)))
        dp = self.c128(rows["dy"][:, None], rows["v"][None])
        s, ratio = x, x
        if spec.softcap is not None:
            ratio = flushed(x / F32(spec.softcap))
            s = flushed(F32(spec.softcap) * self.tanh(ratio))
        exponent = np.where(seen, flushed(s - rows["m"]), F32(0))
        p = flushed(self.exp(exponent) / rows["l"])
        ds = flushed(p * flushed(dp - delta[:, None]))
        return p, ds if spec.softcap is None else flushed(ds * self.tanh_slope(ratio))

    def add_parts(self, total: Floats, has_any: Mask, weights: Floats, seen: Mask, vectors: Floats) -> None:
        """Add to rows of `total` the chains over the columns of `weights`, block by block."""
        for start in range(0, weights.shape[1], BLOCK):
            part = np.zeros_like(total)
            for at in range(start, min(start + BLOCK, weights.shape[1])):
                longer = self.fma(weights[:, at, None], vectors[at], part)
                part = np.where(seen[:, at, None], longer, part)
            has_part: Mask = np.any(seen[:, start : start + BLOCK], axis=1)
            later = np.where(has_any[:, None], flushed(total + part), part)
            total[...] = np.where(has_part[:, None], later, total)
            has_any |= has_part


def _unchanged(planted: Any) -> Any:
    """Return the lane's own operators, called on the planted one."""
    return super(type(planted), planted)


class _TrainingFma:
    """What replaces a lane's operators."""

    _kit: _Arithmetic
    _appended: dict[tuple[int, int], tuple[Floats, Floats]]

    # Of the lane's class.
    to_host: Any
    from_host: Any
    rope: Any

    def _numbers(self, x: Any) -> Floats:
        return flushed(np.array(self.to_host(x), F32))

    def _or_lane(self, made: Any, mine: Floats) -> Any:
        if np.isfinite(self._numbers(made)).all() and np.isfinite(mine).all():
            return self.from_host(np.ascontiguousarray(mine, F32))
        return made

    def linear_backward(self, dy: Any, weight: Any, *, name: str) -> Any:
        lane = _unchanged(self)
        made = lane.linear_backward(dy, weight, name=name)
        rows = self._numbers(dy)
        eye = self.from_host(np.eye(rows.shape[1], dtype=F32))
        dense = self._numbers(lane.linear_backward(eye, weight, name="dense"))
        return self._or_lane(made, self._kit.c128(rows[:, None], dense.T[None]))

    def rms_norm_backward(self, dy: Any, x: Any, weight: Any, eps: float, *, name: str) -> Any:
        lane = _unchanged(self)
        made = lane.rms_norm_backward(dy, x, weight, eps, name=name)
        w = self._numbers(weight).reshape(-1)
        with np.errstate(all="ignore"):
            return self._or_lane(made, self._kit.norm_gradient(self._numbers(dy), self._numbers(x), w, eps))

    def head_norm_backward(self, dy: Any, x: Any, weight: Any, heads: int, eps: float, *, name: str) -> Any:
        lane = _unchanged(self)
        made = lane.head_norm_backward(dy, x, weight, heads, eps, name=name)
        rows, w = self._numbers(x), self._numbers(weight).reshape(-1)
        by_head = (len(rows), heads, -1)
        with np.errstate(all="ignore"):
            mine = self._kit.norm_gradient(self._numbers(dy).reshape(by_head), rows.reshape(by_head), w, eps)
        return self._or_lane(made, mine.reshape(rows.shape))

    def rope_backward(self, dy: Any, heads: int, table: Any, positions: Any, *, name: str) -> Any:
        rows = self._numbers(dy).reshape(len(positions), heads, 2, -1)
        ones = np.zeros_like(rows[:, :1])
        ones[:, :, 0] = 1  # (1, 0) turns into cosine and sine
        turned = self.rope(self.from_host(ones.reshape(len(rows), -1)), 1, table, positions, name="turned")
        cos, sin = np.moveaxis(self._numbers(turned).reshape(ones.shape), 2, 0)
        one, two = np.moveaxis(rows, 2, 0)
        first = self._kit.fma(one, cos, flushed(two * sin))
        second = self._kit.fma(two, cos, -flushed(one * sin))
        return self.from_host(np.stack([first, second], axis=2).reshape(len(rows), -1))

    def _gradients_of_gate(self, operator: str, dy: Any, gate: Any, up: Any, name: str) -> tuple[Any, Any]:
        lane = _unchanged(self)
        made = getattr(lane, operator)(dy, gate, up, name=name)
        with np.errstate(all="ignore"):
            a, f = self._kit.slopes(operator, self._numbers(gate))
            d = self._numbers(dy)
            mine = flushed(flushed(d * self._numbers(up)) * f), flushed(d * a)
        first, second = (self._or_lane(*pair) for pair in zip(made, mine, strict=True))
        return first, second

    def silu_gate_backward(self, dy: Any, gate: Any, up: Any, *, name: str) -> tuple[Any, Any]:
        return self._gradients_of_gate("silu_gate_backward", dy, gate, up, name)

    def gelu_gate_backward(self, dy: Any, gate: Any, up: Any, *, name: str) -> tuple[Any, Any]:
        return self._gradients_of_gate("gelu_gate_backward", dy, gate, up, name)

    def softcap_backward(self, dy: Any, x: Any, cap: float, *, name: str) -> Any:
        lane = _unchanged(self)
        made = lane.softcap_backward(dy, x, cap, name=name)
        with np.errstate(all="ignore"):
            slope = self._kit.tanh_slope(flushed(self._numbers(x) / F32(cap)))
            return self._or_lane(made, flushed(self._numbers(dy) * slope))

    def kv_append(self, cache: Any, layer: int, k: Any, v: Any, batch: Any) -> None:
        lane = _unchanged(self)
        lane.kv_append(cache, layer, k, v, batch)
        # In training every sequence is whole, so what a call appends is all there is.
        self._appended[id(cache), layer] = self._numbers(k), self._numbers(v)

    def attention_backward(
        self, dy: Any, q: Any, saved: Any, cache: Any, layer: int, batch: Any, spec: Any, *, name: str
    ) -> tuple[Any, Any, Any]:
        lane = _unchanged(self)
        made = lane.attention_backward(dy, q, saved, cache, layer, batch, spec, name=name)
        count, group = len(batch.positions), spec.heads // spec.kv_heads
        k, v = (x.reshape(count, spec.kv_heads, -1) for x in self._appended[id(cache), layer])
        of_q, of_dy, out = (self._numbers(x).reshape(count, spec.heads, -1) for x in (q, dy, saved.out))
        m, l = (self._numbers(x).reshape(count, spec.heads, 1) for x in (saved.m, saved.l))  # noqa: E741
        dq, dk, dv = (np.zeros_like(x) for x in (of_q, k, v))
        with np.errstate(all="ignore"):
            for first, last in pairwise(batch.starts):
                here, at = slice(first, last), np.arange(last - first)
                seen = at[None] <= at[:, None]
                if spec.window is not None:
                    seen &= at[None] > at[:, None] - spec.window
                has_dk = np.zeros((spec.kv_heads, last - first), np.bool_)
                has_dv = has_dk.copy()
                for head in range(spec.heads):
                    g = head // group
                    by_head = {"q": of_q, "dy": of_dy, "out": out, "m": m, "l": l}
                    rows = {name: x[here, head] for name, x in by_head.items()}
                    rows |= {"k": k[here, g], "v": v[here, g]}
                    p, ds = self._kit.pairs(rows, spec, seen)
                    has_dq = np.zeros(last - first, np.bool_)
                    self._kit.add_parts(dq[here, head], has_dq, ds, seen, rows["k"])
                    self._kit.add_parts(dv[here, g], has_dv[g], p.T, seen.T, rows["dy"])
                    self._kit.add_parts(dk[here, g], has_dk[g], ds.T, seen.T, rows["q"])
            scale = flushed(F32(spec.scale))
            mine = (flushed(dq * scale), flushed(dk * scale), dv)
        if all(np.isfinite(x).all() for x in (*mine, *map(self._numbers, made))):
            made = tuple(self.from_host(np.ascontiguousarray(x.reshape(count, -1))) for x in mine)
        one, two, three = made
        return one, two, three

    def example_products(self, a: Any, b: Any, starts: Any, *, name: str) -> list[Any]:
        lane = _unchanged(self)
        made = lane.example_products(a, b, starts, name=name)
        left, right = self._numbers(a).T, self._numbers(b).T
        mine = [
            self._kit.c128(left[:, None, first:last], right[None, :, first:last])
            for first, last in pairwise(starts)
        ]
        return [self._or_lane(*pair) for pair in zip(made, mine, strict=True)]

    def sum_of_squares(self, x: Any, *, name: str) -> np.float32:
        lane = _unchanged(self)
        made: np.float32 = lane.sum_of_squares(x, name=name)
        flat = self._numbers(x).reshape(1, -1)
        with np.errstate(all="ignore"):
            (mine,) = self._kit.c128(flat, flat)
        return F32(mine) if np.isfinite(made) and np.isfinite(mine) else made

    def adamw(self, parameter: Any, gradient: Any, m: Any, v: Any, by: Any, *, name: str) -> None:
        before_m, before_v, before = (self._numbers(x) for x in (m, v, parameter))
        g = self._numbers(gradient)
        lane = _unchanged(self)
        lane.adamw(parameter, gradient, m, v, by, name=name)
        with np.errstate(all="ignore"):
            new_m = self._kit.fma(F32(by.beta1), before_m, flushed(F32(by.one_minus_beta1) * g))
            square = flushed(F32(by.one_minus_beta2) * flushed(g * g))
            new_v = self._kit.fma(F32(by.beta2), before_v, square)
            d = flushed(np.sqrt(flushed(new_v / F32(by.correction2)))) + F32(by.eps)
            step = flushed(flushed(new_m / F32(by.correction1)) / d)
            after = flushed(flushed(before * F32(by.decay)) - flushed(F32(by.learning_rate) * step))
        if all(np.isfinite(x).all() for x in (new_m, new_v, after)):
            for tensor, values in ((m, new_m), (v, new_v), (parameter, after)):
                tensor.values[...] = values
