"""Calls of the CPU lane's native backward functions with numpy arrays, kernels and reference alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from lanes.cpu_calls import Floats, Native, Step, address
from mens_cpu_ref.backward_library import BACKWARD_OPERATORS


class BackwardNative(Native):
    """One side of a comparison, with the backward functions beside the others."""

    @contextmanager
    def functions(self) -> Iterator[dict]:
        prefix = "ref_" if self.isa is None else "vox_"
        with super().functions() as forward:
            yield {**forward, **self.library.bind(prefix, BACKWARD_OPERATORS)}

    def norm_backward(
        self, dy: Floats, x: Floats, weight: Floats, heads: int, eps: float
    ) -> tuple[Floats, int]:
        dx = np.empty_like(x)
        with self.functions() as f:
            code = f["norm_backward"](
                address(dy), address(x), address(weight), len(x), heads, x.shape[1] // heads, eps, address(dx)
            )
        return dx, code

    def rope_backward(self, dy: Floats, heads: int, table: Floats, slots, positions) -> tuple[Floats, int]:
        dx = np.empty_like(dy)
        with self.functions() as f:
            code = f["rope_backward"](
                address(dy), len(dy), heads, table.shape[-1], address(table), address(slots), len(slots),
                address(positions), address(dx),
            )  # fmt: skip
        return dx, code

    def gate_backward(self, name: str, dy: Floats, gate: Floats, up: Floats) -> tuple[Floats, int]:
        """Gradients of gate and up, stacked."""
        both = np.empty((2, *dy.shape), np.float32)
        with self.functions() as f:
            code = f[name](*map(address, (dy, gate, up)), *dy.shape, address(both[0]), address(both[1]))
        return both, code

    def softcap_backward(self, dy: Floats, x: Floats, cap: float) -> tuple[Floats, int]:
        dx = np.empty_like(x)
        with self.functions() as f:
            return dx, f["softcap_backward"](address(dy), address(x), *x.shape, cap, address(dx))

    def attention_saving(
        self, step: Step, q: Floats, window: int, softcap: float, scale: float
    ) -> tuple[tuple[Floats, Floats, Floats], int]:
        """Outputs, m and l over a cache that holds the step's keys and values."""
        heads = q.shape[1] // step.keys.shape[2]
        saved = (np.empty_like(q), *(np.empty((len(q), heads), np.float32) for _ in range(2)))
        with self.functions() as f:
            code = f["attention_saving"](
                address(q), *_step(step, q), scale, window, softcap, *map(address, saved)
            )
        return saved, code

    def attention_backward(
        self, step: Step, dy: Floats, q: Floats, saved, window: int, softcap: float, scale: float
    ) -> tuple[Floats, int]:
        """Gradients of q, k and v, one after the other in one flat array."""
        made = np.empty(q.size + step.k.size + step.v.size, np.float32)
        outputs = np.split(made, [q.size, q.size + step.k.size])
        with self.functions() as f:
            code = f["attention_backward"](
                address(dy), address(q), *map(address, saved), *_step(step, q), scale, window, softcap,
                *map(address, outputs),
            )  # fmt: skip
        return made, code


def gradients(step: Step, q: Floats, made: Floats) -> tuple[Floats, Floats, Floats]:
    """Gradients of q, k and v in their shapes."""
    dq, dk, dv = np.split(made, [q.size, q.size + step.k.size])
    return dq.reshape(q.shape), dk.reshape(step.k.shape), dv.reshape(step.v.shape)


def filled(step: Step) -> Step:
    """Put the step's keys and values into its cache."""
    kv_heads, head_dim = step.keys.shape[1:3]
    for s in range(len(step.starts) - 1):
        for row in range(step.starts[s], step.starts[s + 1]):
            block, slot = divmod(int(step.positions[row]), 128)
            cache = step.block_tables[s, block]
            step.keys[cache, :, :, slot] = step.k[row].reshape(kv_heads, head_dim)
            step.values[cache, :, slot, :head_dim] = step.v[row].reshape(kv_heads, head_dim)
    return step


def _step(step: Step, q: Floats) -> tuple[int, ...]:
    blocks, kv_heads, head_dim = step.keys.shape[:3]
    return (
        len(q), q.shape[1] // head_dim, kv_heads, head_dim,
        address(step.positions), address(step.starts), address(step.block_tables),
        *step.block_tables.shape, blocks, address(step.keys), address(step.values),
    )  # fmt: skip
