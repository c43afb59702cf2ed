"""The operators of the CPU lane.

`CpuOps` owns shapes, memory and names; the arithmetic is native. It is parametrised by a table
of functions, so that the scalar reference is the same lane with other functions
(`reference_lane`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.ops import (
    BLOCK,
    AttentionSpec,
    Batch,
    Fault,
    Ints,
    Ops,
    ServedLayer,
    ServedStep,
    StoredTensor,
    Tensor,
    is_quantised,
    rows_of_batch,
)
from mens_core.wishes import Reading, Wish
from mens_cpu_ref import quantised
from mens_cpu_ref.arrays import AddressCache, Rows, WeightMemory, address_of, new_rows, untouched_zeros
from mens_cpu_ref.float_weights import load_float_matrix, load_float_vector, raise_for
from mens_cpu_ref.library import Function
from mens_cpu_ref.matrices import FloatMatrix, KvCache
from mens_cpu_ref.quantised import QuantisedMatrix
from mens_cpu_ref.replaying import Replayer
from mens_cpu_ref.rotary import RotaryTable
from mens_cpu_ref.searching import Search
from vox_plugin_api.backend import BackendError

__all__ = ["CpuOps"]

_OUT_OF_RANGE = -2
_STRIDE = 16
"""Channels of cached values are a multiple of this apart: whole vectors."""


class CpuOps(Ops):
    """The operator contract over native functions (`library.Library.kernels` or `.reference`)."""

    kv_is_taken_when_touched = True

    def __init__(self, functions: Mapping[str, Function], *, facts: Mapping[str, Any] | None = None) -> None:
        self._functions = functions
        self._facts = dict(facts or {})
        self._faults: list[Fault] = []
        self._index = AddressCache()
        self._weights = WeightMemory()
        # Looked up once: a step calls these hundreds of times.
        self._linear = functions["linear"]
        self._norm = functions["norm"]
        self._rope = functions["rope"]
        self._kv_append = functions["kv_append"]
        self._attention = functions["attention"]
        self._add = functions["add"]
        # The scalar reference has no replay: it is the definition.
        self._replayer = Replayer(functions, self._index) if "replay" in functions else None
        self._search = Search(functions)

    # --- memory ------------------------------------------------------------------------------

    def load_matrix(self, stored: StoredTensor) -> FloatMatrix | QuantisedMatrix:
        """Pack a weight for the kernels; the mapping behind `stored` may be dropped afterwards."""
        if is_quantised(stored.format):
            return quantised.pack_matrix(self._functions, stored, self._weights)
        return load_float_matrix(self._functions, stored, self._weights)

    def load_vector(self, stored: StoredTensor, *, plus_one: bool = False) -> Rows:
        """Take a float vector as f32."""
        return load_float_vector(self._functions, stored, plus_one=plus_one)

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> KvCache:
        """Reserve blocks; memory is touched, and so taken, block by block as they are used.

        Raises:
            BackendError: `insufficient-memory`: so much can't even be reserved.
        """
        stride = -(-head_dim // _STRIDE) * _STRIDE
        positions = layers * blocks * kv_heads * BLOCK
        try:
            keys = untouched_zeros(positions * head_dim, np.float32)
            values = untouched_zeros(positions * stride, np.float32)
        except OSError as problem:
            needed = 4 * positions * (head_dim + stride)
            raise BackendError(
                "insufficient-memory",
                f"{needed} bytes of addresses could not be reserved for the KV cache "
                f"({problem.strerror}); nothing was loaded",
                facts={"needed_bytes": needed, "blocks": blocks},
                remedy="Ask for a shorter context or a smaller KV cache, or lift the limit (ulimit -v).",
            ) from None
        return KvCache(
            kv_heads=kv_heads,
            head_dim=head_dim,
            blocks=blocks,
            keys=keys,
            values=values,
            key_addresses=_slices(keys, layers),
            value_addresses=_slices(values, layers),
        )

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> RotaryTable:
        """Return a table that grows by blocks of 128 positions as they are reached."""
        return RotaryTable(self._functions["rotary"], frequencies, attention_factor)

    def to_host(self, x: Rows) -> npt.NDArray[np.float32]:
        """Return the values themselves: a view."""
        return x.values

    def take_faults(self) -> list[Fault]:
        """Return what was not finite since the last call, first operator first."""
        if not self._faults:
            return []
        taken, self._faults = self._faults, []
        return taken

    def facts(self) -> dict[str, Any]:
        """Say which instruction set and how many threads, where the maker of the lane said so."""
        return self._facts

    # --- operators ---------------------------------------------------------------------------

    def run_layers(self, x: Rows, layers: Sequence[ServedLayer], batch: Batch, cache: KvCache) -> Rows:
        """The layers one after another, in one native call where that is possible."""
        out = None if self._replayer is None else self._replayer.run(x, layers, batch, cache)
        return super().run_layers(x, layers, batch, cache) if out is None else out

    def run_and_read(
        self, step: ServedStep, batch: Batch, cache: KvCache, wishes: Sequence[Wish]
    ) -> tuple[Tensor | None, list[Fault], list[Reading]]:
        """A step and what is wished of its logits, which are not computed where only the greatest is."""
        if not wishes or not all(wish.is_for_greatest for wish in wishes):
            return super().run_and_read(step, batch, cache, wishes)
        self.take_faults()  # of a step that was given up half-way
        hidden = step.hidden(self, batch, cache)
        if len(batch.logit_rows) < len(batch.positions):  # ascending: else they are all rows
            hidden = self.take_rows(hidden, batch.logit_rows)
        faults = self.take_faults()
        ids = None if faults else step.greatest(self, hidden, batch, cache)
        if ids is not None and not self._faults:
            found = ids.tolist()
            return None, [], [Reading(token_id=found[wish.row]) for wish in wishes]
        self.take_faults()  # which the logits will have again
        logits = step.logits(self, hidden, batch, cache)
        faults += rows_of_batch(self.take_faults(), batch)
        return logits, faults, self.read_step(logits, faults, batch, wishes)

    def greatest(self, x: Rows, weight: FloatMatrix | QuantisedMatrix, *, name: str) -> Ints:
        """`argmax` of `linear`: of few outputs where bounds say enough, else of all, none of them kept."""
        ids = None
        if isinstance(weight, QuantisedMatrix):
            ids = self._search.greatest(x.values, weight)
            if ids is None:
                ids = quantised.greatest(self._functions, x.values, weight)
        return super().greatest(x, weight, name=name) if ids is None else ids

    def embed(
        self, table: FloatMatrix | QuantisedMatrix, token_ids: Ints, scale: float | None, *, name: str
    ) -> Rows:
        """Rows of `table`, dequantised, times `scale`."""
        if isinstance(table, QuantisedMatrix):
            values, code = quantised.take_rows(self._functions, table, token_ids, scale)
            return self._checked(code, Rows(values), name)
        out = new_rows(len(token_ids), table.columns)
        code = self._functions["embed"](
            table.number,
            table.address,
            table.rows,
            table.columns,
            self._index(token_ids),
            len(token_ids),
            1.0 if scale is None else scale,
            out.address,
        )
        return self._checked(code, out, name)

    def linear(self, x: Rows, weight: FloatMatrix | QuantisedMatrix, *, name: str) -> Rows:
        """x W^T."""
        if isinstance(weight, QuantisedMatrix):
            return self.linear_many(x, (weight,), names=(name,))[0]
        rows, columns = x.values.shape
        if columns != weight.columns:
            raise ValueError(f"{name}: x [{rows}, {columns}] does not fit [{weight.rows}, {weight.columns}]")
        out = new_rows(rows, weight.rows)
        code = self._linear(weight.number, weight.address, weight.rows, columns, x.address, rows, out.address)
        return out if code == 0 else self._checked(code, out, name)

    def linear_many(
        self, x: Rows, weights: Sequence[FloatMatrix | QuantisedMatrix], *, names: Sequence[str]
    ) -> list[Rows]:
        """`linear` with several weights; the activations are quantised once per block size."""
        activations: dict[int, quantised.Activations] = {}
        outputs: list[Rows] = []
        for weight, name in zip(weights, names, strict=True):
            if not isinstance(weight, QuantisedMatrix):
                outputs.append(self.linear(x, weight, name=name))
                continue
            codes = activations.get(weight.block)
            if codes is None:
                codes = activations[weight.block] = quantised.quantise(
                    self._functions, x.values, weight.block
                )
            values, code = quantised.linear(self._functions, codes, weight)
            outputs.append(self._checked(code, Rows(values), name))
        return outputs

    def rms_norm(self, x: Rows, weight: Rows, eps: float, *, name: str) -> Rows:
        """Each row over its root mean square, times `weight`."""
        return self.head_norm(x, weight, 1, eps, name=name)

    def head_norm(self, x: Rows, weight: Rows, heads: int, eps: float, *, name: str) -> Rows:
        """`rms_norm` of each head."""
        rows, width = x.values.shape
        if width != heads * len(weight.values):
            raise ValueError(f"{name}: x [{rows}, {width}] is not {heads} heads of {len(weight.values)}")
        out = new_rows(rows, width)
        code = self._norm(x.address, weight.address, rows, heads, width // heads, eps, out.address)
        return out if code == 0 else self._checked(code, out, name)

    def rope(self, x: Rows, heads: int, table: RotaryTable, positions: Ints, *, name: str) -> Rows:
        """Rotate each head's halves."""
        rows, width = x.values.shape
        if width != heads * 2 * table.pairs or len(positions) != rows:
            raise ValueError(
                f"{name}: x [{rows}, {width}] with {len(positions)} positions is not "
                f"{heads} heads of {2 * table.pairs}"
            )
        out = new_rows(rows, width)
        index = self._index(positions)
        code = self._rope(x.address, rows, heads, *table.arguments, index, out.address)
        if code == _OUT_OF_RANGE:
            # Some block is not made yet: the only time it is worth looking at the positions.
            table.reach(positions)
            code = self._rope(x.address, rows, heads, *table.arguments, index, out.address)
        return out if code == 0 else self._checked(code, out, name)

    def kv_append(self, cache: KvCache, layer: int, k: Rows, v: Rows, batch: Batch) -> None:
        """Store k and v at their rows' positions."""
        index, width = self._index, cache.kv_heads * cache.head_dim
        rows = len(batch.positions)
        if k.values.shape != (rows, width) or v.values.shape != (rows, width):
            raise ValueError(
                f"layer {layer}: k {k.values.shape}, v {v.values.shape} are not [{rows}, {width}]"
            )
        sequences, blocks_per_sequence = batch.block_tables.shape
        code = self._kv_append(
            k.address,
            v.address,
            rows,
            cache.kv_heads,
            cache.head_dim,
            index(batch.positions),
            index(batch.starts),
            index(batch.block_tables),
            sequences,
            blocks_per_sequence,
            cache.blocks,
            cache.key_addresses[layer],
            cache.value_addresses[layer],
        )
        if code != 0:
            raise_for(code, f"kv_append of layer {layer}")

    def attention(
        self, q: Rows, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Rows:
        """Causal attention over the KV blocks of each row's sequence."""
        index = self._index
        rows, width = q.values.shape
        if (width, spec.kv_heads, spec.head_dim) != (
            spec.heads * spec.head_dim,
            cache.kv_heads,
            cache.head_dim,
        ):
            raise ValueError(f"{name}: q [{rows}, {width}] and the cache do not fit {spec}")
        sequences, blocks_per_sequence = batch.block_tables.shape
        out = new_rows(rows, width)
        code = self._attention(
            q.address,
            rows,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            index(batch.positions),
            index(batch.starts),
            index(batch.block_tables),
            sequences,
            blocks_per_sequence,
            cache.blocks,
            cache.key_addresses[layer],
            cache.value_addresses[layer],
            spec.scale,
            spec.window or 0,
            spec.softcap or 0.0,
            out.address,
        )
        return out if code == 0 else self._checked(code, out, name)

    def add(self, a: Rows, b: Rows, *, name: str) -> Rows:
        """a + b."""
        rows, width = a.values.shape
        out = new_rows(rows, width)
        code = self._add(a.address, b.address, rows, width, out.address)
        return out if code == 0 else self._checked(code, out, name)

    def silu_gate(self, gate: Rows, up: Rows, *, name: str) -> Rows:
        """silu(gate) * up."""
        return self._gate("silu_gate", gate, up, name)

    def gelu_gate(self, gate: Rows, up: Rows, *, name: str) -> Rows:
        """gelu_tanh(gate) * up."""
        return self._gate("gelu_gate", gate, up, name)

    def softcap(self, x: Rows, cap: float, *, name: str) -> Rows:
        """cap * tanh(x / cap)."""
        rows, width = x.values.shape
        out = new_rows(rows, width)
        code = self._functions["softcap"](x.address, rows, width, cap, out.address)
        return self._checked(code, out, name)

    def take_rows(self, x: Rows, rows: Ints) -> Rows:
        """x[rows], copied."""
        return Rows(np.take(x.values, rows, axis=0))

    # --- choosing tokens -----------------------------------------------------------------------

    def penalise(
        self,
        logits: Rows,
        row: int,
        token_ids: Ints,
        *,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
    ) -> None:
        """Change one row in place."""
        if not len(token_ids) == len(repetition) == len(subtract):
            raise ValueError(f"{len(token_ids)} ids, {len(repetition)} and {len(subtract)} penalties")
        width = logits.values.shape[1]
        ids = np.ascontiguousarray(token_ids, np.int32)
        factors = np.ascontiguousarray(repetition, np.float32)
        offsets = np.ascontiguousarray(subtract, np.float32)
        code = self._functions["penalise"](
            address_of(logits.values[row]),
            width,
            address_of(ids),
            len(ids),
            address_of(factors),
            address_of(offsets),
        )
        if code > 0:
            self._faults.append(Fault("penalise", (row,)))
        elif code < 0:
            raise_for(code, "penalise")

    def argmax(self, logits: Rows) -> Ints:
        """Highest logit of each row, the lowest id on ties."""
        rows, width = logits.values.shape
        out = np.empty(rows, np.int32)
        code = self._functions["argmax"](logits.address, rows, width, address_of(out))
        if code != 0:
            raise_for(code, "argmax")
        return out

    def token_weights(self, logits: Rows, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        """floor(exp((x - max) / T) * 2^32) of one row."""
        values = logits.values[row]
        out = np.empty(len(values), np.uint64)
        code = self._functions["token_weights"](address_of(values), len(values), temperature, address_of(out))
        if code != 0:
            raise_for(code, "token_weights")
        return out

    def log_normaliser(self, logits: Rows) -> npt.NDArray[np.float32]:
        """m + log(sum of exp(x - m)) of each row."""
        rows, width = logits.values.shape
        out = np.empty(rows, np.float32)
        code = self._functions["log_normaliser"](logits.address, rows, width, address_of(out))
        return self._checked(code, Rows(out), "log_normaliser").values

    # --- faults ------------------------------------------------------------------------------

    def _gate(self, operator: str, gate: Rows, up: Rows, name: str) -> Rows:
        rows, width = gate.values.shape
        if up.values.shape != (rows, width):
            raise ValueError(f"{name}: gate [{rows}, {width}] and up {up.values.shape} differ")
        out = new_rows(rows, width)
        code = self._functions[operator](gate.address, up.address, rows, width, out.address)
        return out if code == 0 else self._checked(code, out, name)

    def _checked(self, code: int, out: Rows, name: str) -> Rows:
        if code < 0:
            raise_for(code, name)
        if code > 0:
            finite = np.isfinite(out.values).reshape(len(out.values), -1).all(axis=1)
            self._faults.append(Fault(name, tuple(int(row) for row in np.flatnonzero(~finite))))
        return out


def _slices(array: npt.NDArray[np.float32], count: int) -> tuple[int, ...]:
    start, step = address_of(array), array.nbytes // count
    return tuple(start + i * step for i in range(count))
