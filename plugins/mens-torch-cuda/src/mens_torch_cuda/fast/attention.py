"""Attention over KV blocks in bfloat16: torch's fused kernel for many rows, products for decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from mens_core.ops import BLOCK, AttentionSpec, Batch
from mens_torch_cuda.fast import fused

__all__ = ["Bounds", "FastKvCache", "Places", "decode_attention", "prefill_attention"]


@dataclass(frozen=True, slots=True, eq=False)
class FastKvCache:
    """Keys and values, each [layers, blocks + 1, kv_heads, 128, head_dim] in bfloat16.

    The last block belongs to nobody: rows that only fill up a recorded step write there.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def reserve(
        cls, device: torch.device, *, layers: int, kv_heads: int, head_dim: int, blocks: int
    ) -> FastKvCache:
        """Reserve `blocks` blocks and the spare one; no memory is read before it is written."""
        shape = (layers, blocks + 1, kv_heads, BLOCK, head_dim)
        # Zeros: what a masked position holds is multiplied by 0, and must be finite for that.
        return cls(
            torch.zeros(shape, dtype=torch.bfloat16, device=device),
            torch.zeros(shape, dtype=torch.bfloat16, device=device),
        )

    @property
    def spare(self) -> int:
        return int(self.keys.shape[1]) - 1


@dataclass(slots=True, eq=False)
class Bounds:
    """Where each of several sequences begins in rows that lie one behind the other."""

    starts: npt.NDArray[np.int64]
    """[S + 1] sequence s owns starts[s] to starts[s + 1]."""
    _there: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """The same as int32 on the device, copied once."""
        if self._there is None:
            self._there = torch.from_numpy(self.starts.astype(np.int32)).to(device)
        return self._there


@dataclass(slots=True, eq=False)
class Places:
    """A batch's index arrays on the device, as int64."""

    batch: Batch
    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    """[N] KV block of each row."""
    offsets: torch.Tensor
    """[N] place of each row in its block."""
    tables: torch.Tensor
    """[S, W] -1 is 0 here: what lies there is masked."""
    logit_rows: torch.Tensor
    rows: Bounds
    begins: bool
    """Whether every sequence begins in this batch."""
    _gathered: tuple[Bounds, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Places:
        """Copy a batch's arrays to the device in one go."""
        flat = cls.flat(batch)
        return cls.over(batch, torch.from_numpy(flat).to(device))

    @staticmethod
    def flat(batch: Batch) -> np.ndarray:
        """All arrays one behind the other."""
        sequences = np.repeat(np.arange(len(batch.block_tables)), np.diff(batch.starts))
        blocks = batch.block_tables[sequences, batch.positions // BLOCK]
        return np.concatenate(
            [
                batch.token_ids,
                batch.positions,
                blocks,
                batch.positions % BLOCK,
                np.maximum(batch.block_tables, 0).reshape(-1),
                batch.logit_rows,
            ]
        ).astype(np.int64)

    @classmethod
    def over(cls, batch: Batch, flat: torch.Tensor) -> Places:
        """The arrays as views of `flat`, which holds what the function of that name returns."""
        rows, tables = len(batch.positions), batch.block_tables
        sizes = [rows, rows, rows, rows, tables.size, len(batch.logit_rows)]
        tokens, positions, blocks, offsets, table, logit_rows = torch.split(flat, sizes)
        begins = not batch.positions[batch.starts[:-1]].any()
        bounds = Bounds(batch.starts.astype(np.int64))
        return cls(
            batch, tokens, positions, blocks, offsets, table.view(tables.shape), logit_rows, bounds, begins
        )

    def gathered(self) -> tuple[Bounds, torch.Tensor, torch.Tensor]:
        """Where each sequence's keys begin, block and offset of each: the same in every layer."""
        if self._gathered is None:
            batch = self.batch
            lengths = batch.positions[batch.starts[1:] - 1].astype(np.int64) + 1
            at = np.concatenate([np.arange(length) for length in lengths])
            sequences = np.repeat(np.arange(len(lengths)), lengths)
            flat = np.concatenate([batch.block_tables[sequences, at // BLOCK], at % BLOCK]).astype(np.int64)
            blocks, offsets = torch.from_numpy(flat).to(self.tables.device).chunk(2)
            self._gathered = (Bounds(np.concatenate([[0], np.cumsum(lengths)])), blocks, offsets)
        return self._gathered

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one row."""
        return len(self.batch.block_tables) == len(self.batch.positions)


def decode_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places, spec: AttentionSpec
) -> torch.Tensor:
    """One row per sequence over its blocks; no value decides what is launched.

    Args:
        q: [S, H * C].
        keys: [blocks, G, 128, C], of one layer; values likewise.

    Returns:
        [S, H * C].
    """
    if fused.has_decode(q, spec.heads // spec.kv_heads, spec.head_dim):
        return fused.decode(
            q,
            keys,
            values,
            places.tables,
            places.positions,
            groups=spec.kv_heads,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
    sequences, width = places.tables.shape
    groups, each = spec.kv_heads, spec.heads // spec.kv_heads
    k, v = keys[places.tables], values[places.tables]  # [S, W, G, 128, C]
    q = q.view(sequences, 1, groups, each, spec.head_dim)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * spec.scale  # [S, W, G, R, 128]
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    at = torch.arange(width * BLOCK, device=q.device).view(1, width, 1, 1, BLOCK)
    last = places.positions.view(sequences, 1, 1, 1, 1)
    seen = at <= last
    if spec.window is not None:
        seen = seen & (at > last - spec.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax((1, 4), keepdim=True)
    # A block may hold what another sequence left behind its end.
    v = v.masked_fill(~seen.view(sequences, width, 1, BLOCK, 1), 0)
    weights = torch.exp(scores - top)
    total = weights.sum((1, 4), keepdim=True)
    mixed = torch.matmul((weights / total).to(v.dtype), v)  # [S, W, G, R, C]
    return mixed.float().sum(1).to(v.dtype).reshape(sequences, spec.heads * spec.head_dim)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Bounds,
    keys: Bounds,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Causal attention of the last rows of each sequence over all its keys.

    Args:
        q: [N, H, C], whose `rows` are.
        k: [K, G, C], whose `keys` are; v likewise.

    Returns:
        [N, H, C]; differentiable where its inputs are.
    """
    if q.is_cuda and spec.softcap is None and spec.head_dim % 8 == 0:
        return _fused(q, k, v, rows, keys, spec)
    of_rows, of_keys = pairwise(rows.starts.tolist()), pairwise(keys.starts.tolist())
    parts = [_plain(q[a:b], k[c:d], v[c:d], spec) for (a, b), (c, d) in zip(of_rows, of_keys, strict=True)]
    return torch.cat(parts)


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Bounds,
    keys: Bounds,
    spec: AttentionSpec,
) -> torch.Tensor:
    lengths = np.diff(rows.starts)
    longest = int(np.diff(keys.starts).max())
    has_window = spec.window is not None and spec.window < longest
    if len(set(lengths.tolist())) == 1 and np.array_equal(rows.starts, keys.starts) and not has_window:
        count = len(lengths)
        of_q, of_k, of_v = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            of_q, of_k, of_v, is_causal=True, scale=spec.scale, enable_gqa=spec.heads != spec.kv_heads
        )
        return mixed.transpose(1, 2).reshape(q.shape)
    made: tuple[torch.Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        rows.on(q.device),
        keys.on(q.device),
        int(lengths.max()),
        longest,
        0.0,
        True,
        False,
        scale=spec.scale,
        window_size_left=spec.window - 1 if has_window and spec.window is not None else -1,
        window_size_right=0,
    )
    return made[0]


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The same by its definition, in float32 between the products."""
    rows, length = len(q), len(k)
    groups, each = spec.kv_heads, spec.heads // spec.kv_heads
    q = q.view(rows, groups, each, spec.head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(q, k.permute(1, 2, 0)[:, None]).float() * spec.scale  # [G, R, N, K]
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    last = torch.arange(length - rows, length, device=q.device)[:, None]
    at = torch.arange(length, device=q.device)
    seen = at <= last
    if spec.window is not None:
        seen = seen & (at > last - spec.window)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).to(v.dtype)
    mixed = torch.matmul(weights, v.transpose(0, 1)[:, None])  # [G, R, N, C]
    return mixed.permute(2, 0, 1, 3).reshape(rows, spec.heads, spec.head_dim)
