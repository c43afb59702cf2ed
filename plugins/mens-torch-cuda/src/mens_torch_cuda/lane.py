"""The lane: its operators, and steps that are recorded once and replayed (replay.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device, constants
from mens_core.grid_flags import RowFlags
from mens_core.grid_ops import GridKvCache, GridRotaryTable, GridTensor
from mens_core.kernel_source import GROUP
from mens_core.ops import AttentionSpec, Batch, Fault, Ints, ServedStep
from mens_torch_cuda.foresight import Foresight, has_one_row_each
from mens_torch_cuda.launches import Launcher
from mens_torch_cuda.nodes import Codes, Nodes, Pending, UnrecordableError
from mens_torch_cuda.operators import CudaOperators
from mens_torch_cuda.replay import MOST_ROWS, Capturing, Places, Recording, Recordings, padded_batch
from mens_torch_cuda.rotary import RoomyRotaryTable
from vox_plugin_api.backend import BackendError

__all__ = ["CudaOps"]

_NARROW_BLOCK = 32
_FLAGS_PER_ROW = 1024
"""Operators of a step that flag rows: more than any model has."""
_PIECE = 16
"""Launches of a piece of a step of several rows: one or two thirds of a millisecond of an 8B model."""
_TIMES_AHEAD = 16
"""How often a step of several rows could have been begun ahead, until its second recording is made: one takes
longer than many steps save, and who serves many comes through many numbers of rows."""
_PART = 2048
"""Logits that one group of vox_step_argmax looks at."""


@dataclass(slots=True)
class _Recorded:
    """What is being recorded: the batch whose rows stand for others, and what the operators asked for."""

    batch: Batch
    places: Places
    next_places: Places
    tables: dict[int, tuple[GridRotaryTable, tuple[Buffer, Buffer]]] = field(default_factory=dict)
    vocabulary: int = 0


@dataclass(slots=True)
class _Shared:
    """Memory that kernels of one step use one after the other, by size."""

    parts: dict[int, Buffer] = field(default_factory=dict)
    counters: dict[int, Buffer] = field(default_factory=dict)
    tiles: dict[int, tuple[Buffer, int]] = field(default_factory=dict)


class CudaOps(CudaOperators):
    """Grid kernels on a GPU; a shape of step that comes again is one CUDA graph."""

    def __init__(self, device: Device, *, facts: Mapping[str, Any]) -> None:
        super().__init__(device, facts=facts)
        self._recordings = Recordings()
        self._recorded: _Recorded | None = None
        self._nodes: Nodes | None = None
        """Where operators are noted, in a step."""
        self._shared = _Shared()
        self._tables: list[GridRotaryTable] = []
        self._chosen: tuple[Any, Ints] | None = None
        """Logits of the last replay and the highest token of each row."""
        self._foresight = Foresight()

    @property
    def recordings(self) -> int:
        """How many shapes of step are kept as CUDA graphs."""
        return len(self._recordings)

    # --- steps ---------------------------------------------------------------------------------

    def run_step(
        self, step: ServedStep, batch: Batch, cache: GridKvCache
    ) -> tuple[GridTensor | None, list[Fault]]:
        """A whole step; one of a shape that came before is replayed."""
        self._chosen = None
        if not hasattr(self._device, "capture") or not 0 < len(batch.positions) <= MOST_ROWS:
            return self._run_once(step, batch, cache)
        device = cast(Capturing, self._device)
        batch = padded_batch(batch)
        recording, begun = self._foresight.meet(step, batch, cache)
        if recording is None:
            recording = self._found(device, step, batch, batch.positions, cache, side=0)
            if recording is None:
                return self._run_once(step, batch, cache)
            self._check_ids(recording.vocabulary, batch.token_ids, "embed_tokens")
            self._foresight.launch()
            recording.begin(device, batch)
        else:
            self._foresight.launch()
            recording.go_on(device, begun)
        self._uploaded.clear()
        self._watched.take()  # of a step that was given up half-way
        if self._foresight.wants(batch):
            # Launched before this step is waited for: the GPU goes on while the host reads and thinks.
            following, side = batch.positions + 1, 1 - recording.side
            other = self._found(device, step, batch, following, cache, side=side, ahead=True)
            if other is not None:
                if self._foresight.has_other_tables:
                    other.places.write_tables(device, batch)
                begun = self._foresight.pieces(other)
                other.go_on(device, end=begun)
                self._foresight.expect(other, begun)
        faults = recording.end(device, batch)
        self._foresight.end(recording, batch)
        if recording.logits is not None and recording.highest is not None:
            self._chosen = (recording.logits, recording.highest.copy())
        return recording.logits, faults

    def _found(
        self,
        device: Capturing,
        step: ServedStep,
        batch: Batch,
        positions: Ints,
        cache: GridKvCache,
        *,
        side: int,
        ahead: bool = False,
    ) -> Recording | None:
        """The recording of this shape, for these positions; made now, where it is worth it and can be."""
        shape = (id(step), len(batch.positions), batch.block_tables.shape, len(batch.logit_rows))
        key, other = (*shape, side), self._recordings.find((*shape, 1 - side))
        times = 2 if other is None else _TIMES_AHEAD if ahead and len(batch.positions) > 1 else 1
        if not self._recordings.is_worth_it(key, times=times):
            return None
        recording = self._recordings.find(key)
        if recording is None or not recording.is_current(device, positions, cache):
            try:
                recording = self._record(device, step, batch, positions, cache, side, other)
            except (UnrecordableError, BackendError):
                # What can't be recorded is run; what has no room then says so itself.
                self._recordings.refuse(key)
                return None
            self._recordings.keep(key, recording)
        return recording

    def _run_once(
        self, step: ServedStep, batch: Batch, cache: GridKvCache
    ) -> tuple[GridTensor | None, list[Fault]]:
        """A step whose kernels are launched as they are found."""
        self._foresight.interrupt()
        self._nodes, self._shared = Nodes(Launcher(self._device, self)), _Shared()
        try:
            made, faults = super().run_step(step, batch, cache)
            logits = None if made is None else GridTensor(made.buffer, made.shape)
        finally:
            self._nodes = None
        return logits, faults

    def take_faults(self) -> list[Fault]:
        """Return what was not finite since the last call, first operator first."""
        if self._nodes is not None:
            self._nodes.flush()
        return super().take_faults()

    def _record(
        self,
        device: Capturing,
        step: ServedStep,
        batch: Batch,
        positions: Ints,
        cache: GridKvCache,
        side: int,
        other: Recording | None,
    ) -> Recording:
        for table in self._tables:
            table.reach(device, positions)
        for either in (0, 1):
            device.wait(either)  # nothing runs that the one in whose place this comes would take with it
        if other is None:
            places, next_places = Places.reserve(device, batch), Places.reserve(device, batch)
        else:
            places, next_places = other.next_places, other.places
        recorded = _Recorded(batch, places, next_places)
        watched = self._watched
        rows = len(batch.positions)
        self._watched = RowFlags(device, room=_FLAGS_PER_ROW * -(-rows // 4) * 4)
        self._recorded = recorded
        self._nodes, self._shared = Nodes(Launcher(device, self)), _Shared()
        made: list[Any] = []
        try:
            # Kernels of one row start early, which a graph's end would hinder.
            piece = 0 if rows == 1 else _PIECE
            pieces = device.capture(lambda: made.append(self._whole(device, step, batch, cache)), side, piece)
            spans = self._watched
        finally:
            self._watched, self._recorded, self._nodes = watched, None, None
        logits, highest, flags, of_hidden = made[0]
        return Recording(
            step=step,
            cache=cache,
            side=side,
            places=places,
            next_places=next_places,
            vocabulary=recorded.vocabulary,
            logits=logits,
            highest=highest,
            flags=flags,
            spans=spans,
            of_hidden=of_hidden,
            tables=tuple(recorded.tables.values()),
            pieces=pieces,
            kept=self._shared,
        )

    def _whole(self, device: Capturing, step: ServedStep, batch: Batch, cache: GridKvCache) -> Any:
        if self._nodes is None:
            raise AssertionError("nothing is being recorded")
        hidden = step.hidden(self, batch, cache)
        self._nodes.flush()
        of_hidden = self._watched.calls
        logits = highest = None
        if len(batch.logit_rows):
            # As many rows as there are: all of them, in their order.
            are_all = len(batch.logit_rows) == len(batch.positions)
            taken = hidden if are_all else self.take_rows(hidden, batch.logit_rows)
            made = step.logits(self, taken, batch, cache)
            logits = GridTensor(made.buffer, made.shape)
            tokens = self._highest(logits)
            if has_one_row_each(batch):
                self._leave_next(tokens, len(batch.positions))
            highest = device.fetch(tokens, 4 * logits.shape[0])
        self._nodes.flush()
        flags = tuple(device.fetch(buffer, 4 * end) for buffer, end in self._watched.parts())
        return logits, highest, flags, of_hidden

    def _leave_next(self, tokens: Buffer, rows: int) -> None:
        """Leave at the other side what the next step reads, if this one's highest tokens are chosen."""
        if self._recorded is None:
            raise AssertionError("nothing is being recorded")
        places, following = self._recorded.places, self._recorded.next_places
        self._run(
            "vox_step_next",
            (places.whole, tokens, following.whole),
            constants(places.count, rows, 0, places.token_at),
            (places.count, 1),
        )

    def _highest(self, logits: GridTensor) -> Buffer:
        """The highest token of each row, by many groups a row."""
        rows, width = logits.shape
        groups = -(-width // _PART)
        out, parts = self._device.empty(4 * rows), self._device.empty(8 * rows * groups)
        self._run(
            "vox_step_argmax",
            (logits.buffer, parts, self.counters(rows), out),
            constants(width),
            (groups * GROUP, rows),
        )
        return out

    # --- what the launches of a recording need (launches.StepMemory) -----------------------------

    def flags(self, name: str, rows: int) -> Buffer:
        """Flags [rows] of one operator's call."""
        return self._flags(name, rows)

    def codes(self, x: Any) -> Codes:
        """The rows as int8 codes in blocks of 32."""
        if isinstance(x, Pending) and x.codes is not None:
            return x.codes
        return Codes(*self._quantised(x, _NARROW_BLOCK))

    def places(self, batch: Batch) -> tuple[Buffer, Buffer, Buffer]:
        """Positions, sequence of each row, block tables."""
        return self._places(batch)

    def row_tiles(self, batch: Batch, rows: int) -> tuple[Buffer, int]:
        """First row and rows [tiles, 2] of tiles of at most so many rows of one sequence; and how many."""
        if rows not in self._shared.tiles:
            ends = zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True)
            tiles = [(at, min(rows, end - at)) for start, end in ends for at in range(start, end, rows)]
            self._shared.tiles[rows] = (self._device.put(np.array(tiles, np.int32)), len(tiles))
        return self._shared.tiles[rows]

    def attention_parts(self, count: int) -> Buffer:
        """Room for so many floats, the same in every layer."""
        return self._kept(self._shared.parts, count, self._device.empty)

    def counters(self, count: int) -> Buffer:
        """So many int32, zero between kernels."""
        return self._kept(self._shared.counters, count, self._device.zeros)

    @staticmethod
    def _kept(known: dict[int, Buffer], count: int, make: Callable[[int], Buffer]) -> Buffer:
        if count not in known:
            known[count] = make(4 * count)
        return known[count]

    # --- choosing --------------------------------------------------------------------------------

    def argmax(self, logits: GridTensor) -> Ints:
        """Highest logit of each row, the lowest id on ties."""
        if self._chosen is not None and self._chosen[0] is logits:
            self._foresight.note_greed()
            return self._chosen[1]
        return super().argmax(logits)

    def penalise(
        self,
        logits: GridTensor,
        row: int,
        token_ids: Ints,
        *,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
    ) -> None:
        """Change one row in place."""
        self._chosen = None
        super().penalise(logits, row, token_ids, repetition=repetition, subtract=subtract)

    # --- operators while a step is noted --------------------------------------------------------

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> GridRotaryTable:
        """Return a table that grows by blocks of 128 positions as they are reached."""
        if not hasattr(self._device, "capture"):
            return super().rotary_table(frequencies, attention_factor)
        device = cast(Capturing, self._device)
        table = RoomyRotaryTable(device, self._make_angles, frequencies, attention_factor)
        self._tables.append(table)
        return table

    def _ints(self, array: npt.NDArray[Any]) -> Buffer:
        if self._recorded is None:
            return super()._ints(array)
        batch, places = self._recorded.batch, self._recorded.places
        for known, place in (
            (batch.positions, places.positions),
            (batch.token_ids, places.token_ids),
            (batch.logit_rows, places.logit_rows),
        ):
            if array is known:
                return place
        raise UnrecordableError("indices that are not the batch's")

    def _places(self, batch: Batch) -> tuple[Buffer, Buffer, Buffer]:
        if self._recorded is None:
            return super()._places(batch)
        places = self._recorded.places
        if batch is not self._recorded.batch:
            raise UnrecordableError("another batch")
        return places.positions, places.sequences, places.block_tables

    def embed(self, table: Any, token_ids: Ints, scale: float | None, *, name: str) -> GridTensor:
        """Rows of `table`, dequantised, times `scale`."""
        if self._recorded is not None:
            self._recorded.vocabulary = table.rows
        return super().embed(table, token_ids, scale, name=name)

    def linear_many(self, x: Any, weights: Sequence[Any], *, names: Sequence[str]) -> list[Any]:
        """`linear` with several weights."""
        if self._nodes is None:
            return super().linear_many(x, weights, names=names)
        plain = super().linear_many
        shapes = [(x.shape[0], weight.rows) for weight in weights]
        noted = self._nodes.note(
            "linear",
            (x,),
            shapes,
            lambda: plain(x, weights, names=names),
            weights=tuple(weights),
            names=tuple(names),
        )
        return list(noted)

    def head_norm(self, x: Any, weight: GridTensor, heads: int, eps: float, *, name: str) -> Any:
        """`rms_norm` of each head."""
        plain = super().head_norm
        return self._noted(
            "norm",
            (x,),
            lambda: plain(x, weight, heads, eps, name=name),
            weight=weight,
            heads=heads,
            width=weight.shape[0],
            eps=eps,
            name=name,
        )

    def rope(self, x: Any, heads: int, table: GridRotaryTable, positions: Ints, *, name: str) -> Any:
        """Rotate each head's halves."""
        plain = super().rope
        angles = table.reach(self._device, positions) if self._nodes is not None else None
        if self._recorded is not None and angles is not None:
            self._recorded.tables[id(table)] = (table, angles)
        return self._noted(
            "rope",
            (x,),
            lambda: plain(x, heads, table, positions, name=name),
            table=table,
            angles=angles,
            name=name,
        )

    def kv_append(self, cache: GridKvCache, layer: int, k: Any, v: Any, batch: Batch) -> None:
        """Store k and v at their rows' positions."""
        plain = super().kv_append
        if self._nodes is None:
            plain(cache, layer, k, v, batch)
            return

        def run() -> Sequence[GridTensor]:
            plain(cache, layer, k, v, batch)
            return ()

        said = {"cache": cache, "layer": layer, "batch": batch}
        self._nodes.note("kv_append", (k, v), (), run, **said)

    def attention(
        self, q: Any, cache: GridKvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Any:
        """Causal attention over the KV blocks of each row's sequence."""
        plain = super().attention
        return self._noted(
            "attention",
            (q,),
            lambda: plain(q, cache, layer, batch, spec, name=name),
            cache=cache,
            layer=layer,
            batch=batch,
            spec=spec,
            name=name,
        )

    def _elementwise(self, kernel: str, inputs: tuple[Any, ...], value: float, name: str) -> Any:
        plain = super()._elementwise
        kind = kernel.removeprefix("vox_")
        return self._noted(kind, inputs, lambda: plain(kernel, inputs, value, name), name=name)

    def _noted(self, kind: str, inputs: tuple[Any, ...], run: Callable[[], GridTensor], **said: Any) -> Any:
        """Note a call whose output is like its first input; run it where nothing is recorded."""
        if self._nodes is None:
            return run()
        (out,) = self._nodes.note(kind, inputs, (inputs[0].shape,), lambda: (run(),), **said)
        return out
