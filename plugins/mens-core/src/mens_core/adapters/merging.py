"""Fold an adapter into the weights of its base: another model (docs/numerics.md, section 13.4).

One matrix at a time, and of it some MiB of rows at a time, through the lane's own operators. What
the adapter doesn't touch is copied byte for byte, quantised blocks too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from mens_core.adapters.copies import BaseTable
from mens_core.adapters.merged_file import Buffer, Piece, write_weights
from mens_core.adapters.plan import AdapterPlan
from mens_core.bfloat16 import to_bfloat16
from mens_core.ops import Matrix, StoredTensor, is_quantised
from mens_core.training_ops import TrainingOps
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint
from vox_plugin_api.families.model_config import ModelConfig
from vox_plugin_api.families.tensors import EMBEDDING, HEAD, PlannedTensor, TensorPlan

__all__ = ["Dtype", "Form", "Merged", "Merging"]

Form = Literal["checkpoint", "hugging-face", "gguf"]
"""checkpoint: what isn't adapted is copied as it is. hugging-face: floats alone, norms as that library has
them. gguf: norms in float32 as GGUF has them, matrices as in checkpoint, nothing beside the text model."""
Dtype = Literal["f32", "bf16"]
Floats = npt.NDArray[np.float32]

_Rows = Callable[[Matrix, int, int], Floats]

_HEAD = HEAD.removesuffix(".weight")

_PART_BYTES = 16 << 20
"""Of float32 rows in memory at once, beside the matrix itself."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written."""

    files: Mapping[str, str]
    """SHA-256 by name."""
    matrices: tuple[str, ...]
    """Linear layers that became others, in the order of the adapter's keys."""
    unchanged: tuple[str, ...]
    """Adapted ones whose A or B is all zeros, or all if the scale is: copied like the rest."""
    is_untied: bool
    """The output matrix is no longer the embedding: config.json must say so."""
    left_out: tuple[str, ...]
    """Tensors of the base that are not in the result."""


class Merging:
    """An adapter and the checkpoint it goes into."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        plan: TensorPlan,
        adapter: AdapterPlan,
        tensors: Mapping[str, Floats],
        ops: TrainingOps,
        *,
        form: Form,
        dtype: Dtype | None,
    ) -> None:
        """Nothing is read yet.

        Args:
            tensors: the adapter's, of the shapes that its plan names.
            dtype: of the matrices that are made; None: f32 where the base's are f32 or f16, else bf16.
        """
        self._config = config
        self._checkpoint = checkpoint
        self._plan = plan
        self._matrices = {matrix.name: matrix for matrix in adapter.matrices}
        self._tensors = tensors
        self._ops = ops
        self._form = form
        self._dtype = dtype
        self._changed = tuple(
            name
            for name, matrix in self._matrices.items()
            if matrix.scale and all(part.any() for part in self._parts_of(name))
        )
        self._unchanged = tuple(name for name in self._matrices if name not in self._changed)

    def base_table(self, layer: str) -> BaseTable:
        """Load the base's own matrix of a layer."""
        planned = self._plan.tensors.get(f"{layer}.weight", self._plan.tensors[EMBEDDING])
        return BaseTable(self._ops.load_matrix(self._stored(planned)), planned.format)

    def write(self, folder: Path) -> Generator[None, None, Merged]:
        """Write model.safetensors, and quant-metadata.json where there is something to say in it.

        Raises:
            BackendError: `merge-not-finite`, naming matrix and row, or why the folder can't be written.
            CheckpointError: the base changed meanwhile. Nothing is at `folder`.
        """
        pieces = [*self._planned_pieces(), *self._other_pieces()]
        # Floats first: blocks have odd sizes, and what follows them would lie unaligned.
        pieces.sort(key=lambda piece: (piece.dtype == "U8", piece.name.encode()))
        files = yield from write_weights(folder, pieces, self._quant_metadata(pieces))
        written = {piece.name for piece in pieces}
        return Merged(
            files=files,
            matrices=self._changed,
            unchanged=self._unchanged,
            is_untied=self._is_untied,
            left_out=tuple(sorted(set(self._checkpoint) - written)),
        )

    # --- which tensors -----------------------------------------------------------------------

    @property
    def _is_untied(self) -> bool:
        # An update lies on one of the two ends: the other one stays the base's.
        return self._config.tie_word_embeddings and not {_HEAD, EMBEDDING_LAYER}.isdisjoint(self._changed)

    @property
    def _head_name(self) -> str:
        # The one layout of text towers that has the head below a prefix of its own.
        return f"language_model.{HEAD}" if self._plan.prefix == "language_model.model." else HEAD

    def _planned_pieces(self) -> Iterator[Piece]:
        for name, planned in self._plan.tensors.items():
            target = self._head_name if name == HEAD else self._plan.prefix + name
            yield self._planned_piece(name.removesuffix(".weight"), target, planned)
        if self._is_untied:
            yield self._planned_piece(_HEAD, self._head_name, self._plan.tensors[EMBEDDING])

    def _planned_piece(self, layer: str, target: str, planned: PlannedTensor) -> Piece:
        if layer in self._changed:
            return self._merged_piece(layer, target, planned)
        if len(planned.shape) == 1:
            return self._norm_piece(target, planned)
        if self._form == "hugging-face" and is_quantised(planned.format):
            return self._matrix_piece(layer, target, planned, self._rows)
        return self._copied_piece(target, planned.name)

    def _other_pieces(self) -> Iterator[Piece]:
        if self._form == "gguf":
            return
        # A stale head beside a tied embedding would be read now that they are not tied.
        for name in self._plan.unused:
            if not (self._is_untied and name == self._head_name):
                yield self._copied_piece(name, name)

    def _quant_metadata(self, pieces: list[Piece]) -> dict[str, object] | None:
        before = self._checkpoint.quant_metadata.tensors
        kept = {
            piece.name: before[piece.source]
            for piece in pieces
            if piece.source is not None and piece.source in before
        }
        if not kept and not self._includes_one_after:
            return None
        return {
            "version": 1,
            "norms_include_one": self._includes_one_after,
            "tensors": {
                name: {"format": tensor.format, "shape": list(tensor.shape)} for name, tensor in kept.items()
            },
        }

    # --- how each is made ----------------------------------------------------------------------

    @property
    def _includes_one_before(self) -> bool:
        return self._config.norm_plus_one and self._checkpoint.quant_metadata.norms_include_one

    @property
    def _includes_one_after(self) -> bool:
        """Whether norms are written as the multiplier itself, where the family adds 1."""
        if self._form == "checkpoint":
            return self._includes_one_before
        return self._config.norm_plus_one and self._form == "gguf"

    def _copied_piece(self, target: str, name: str) -> Piece:
        entry = self._checkpoint[name]

        def parts() -> Iterator[Buffer]:
            data = self._checkpoint.data(name)
            for first in range(0, entry.nbytes, _PART_BYTES):
                yield data[first : first + _PART_BYTES]
            self._checkpoint.release(name)

        return Piece(target, entry.dtype, entry.shape, entry.nbytes, parts, source=name)

    def _norm_piece(self, target: str, planned: PlannedTensor) -> Piece:
        before, after = self._includes_one_before, self._includes_one_after
        if before == after and (self._form != "gguf" or planned.format == "f32"):
            return self._copied_piece(target, planned.name)

        def parts() -> Iterator[Buffer]:
            ops = self._ops
            values = ops.to_host(ops.load_vector(self._stored(planned), plus_one=after and not before))
            if before and not after:
                values = values - np.float32(1)
            yield np.ascontiguousarray(values, "<f4").tobytes()

        return Piece(target, "F32", planned.shape, 4 * prod(planned.shape), parts)

    def _merged_piece(self, linear: str, target: str, planned: PlannedTensor) -> Piece:
        a, b = self._parts_of(linear)
        matrix = self._matrices[linear]
        # d = C128 over the rank of B[n][j] A[j][k]: rows of B through a matrix that is A's transpose, or,
        # of the table of an embedding, which has a row for each of A's columns, those through B.
        along, through = (a.T, b) if matrix.is_embedding else (b, a.T)
        across: list[Matrix] = []

        def rows(weight: Matrix, first: int, last: int) -> Floats:
            ops = self._ops
            if not across:
                across.append(ops.matrix(ops.from_host(np.ascontiguousarray(through)), name=linear))
            w = ops.embed(weight, np.arange(first, last, dtype=np.int32), None, name=linear)
            d = ops.linear(ops.from_host(np.ascontiguousarray(along[first:last])), across[0], name=linear)
            return ops.to_host(ops.add_scaled(w, d, matrix.scale, name=linear))

        return self._matrix_piece(linear, target, planned, rows)

    def _rows(self, weight: Matrix, first: int, last: int) -> Floats:
        ids = np.arange(first, last, dtype=np.int32)
        return self._ops.to_host(self._ops.embed(weight, ids, None, name="rows"))

    def _matrix_piece(self, linear: str, target: str, planned: PlannedTensor, make: _Rows) -> Piece:
        """A matrix that is written as floats: `make(weight, first, last)` returns its rows in float32."""
        rows, columns = planned.shape
        dtype = self._dtype or ("f32" if planned.format in ("f32", "f16") else "bf16")
        step = max(1, _PART_BYTES // (4 * columns))

        def parts() -> Iterator[Buffer]:
            weight = self._ops.load_matrix(self._stored(planned))
            self._checkpoint.release(planned.name)
            for first in range(0, rows, step):
                values = make(weight, first, min(first + step, rows))
                yield self._encoded(values, dtype, linear, first)

        size = 4 if dtype == "f32" else 2
        return Piece(target, dtype.upper(), (rows, columns), size * rows * columns, parts)

    def _encoded(self, values: Floats, dtype: Dtype, linear: str, first: int) -> bytes:
        faults = self._ops.take_faults()
        if faults:
            raise _not_finite(linear, first + faults[0].rows[0], "float32")
        if dtype == "f32":
            return np.ascontiguousarray(values, "<f4").tobytes()
        try:
            return to_bfloat16(values).tobytes()
        except ValueError:
            row = int(np.flatnonzero((np.abs(values) >= _BF16_LIMIT).any(axis=1))[0])
            raise _not_finite(linear, first + row, "bfloat16") from None

    def _parts_of(self, linear: str) -> tuple[Floats, Floats]:
        key_a, key_b = self._matrices[linear].keys
        return self._tensors[key_a], self._tensors[key_b]

    def _stored(self, planned: PlannedTensor) -> StoredTensor:
        return StoredTensor(
            planned.name,
            planned.format,
            planned.shape,
            self._checkpoint.data(planned.name),
            functools.partial(self._checkpoint.release, planned.name),
        )


_BF16_LIMIT = np.uint32(0x7F7F8000).view(np.float32)
"""The least float32 that rounds beyond bfloat16."""


def _not_finite(linear: str, row: int, dtype: str) -> BackendError:
    return BackendError(
        "merge-not-finite",
        f"row {row} of {linear} would hold a number that {dtype} doesn't; no merged model was written",
        facts={"matrix": linear, "row": row, "dtype": dtype},
        remedy="Serve the adapter beside its base, as it was trained."
        if dtype == "float32"
        else "Merge with --dtype f32.",
    )
