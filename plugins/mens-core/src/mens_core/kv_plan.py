"""How large the KV cache is, and what a sequence may use of it. Pure, and with numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mens_core.kv_blocks import blocks_for
from mens_core.kv_memory import usable_bytes
from mens_core.ops import BLOCK
from vox_plugin_api.backend import BackendError
from vox_plugin_api.families.model_config import ModelConfig
from vox_plugin_api.messages import LoadModelParams

__all__ = ["DEFAULT_KV_BYTES", "KvPlan", "plan_kv_cache"]

DEFAULT_KV_BYTES = 2 << 30
"""Budget when the host names none. Blocks are touched only when positions reach them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """Blocks to reserve and the context they allow."""

    blocks: int
    block_bytes: int
    """One block, in every layer, keys and values."""
    budget_bytes: int
    context_length: int
    """Positions of one sequence."""
    free_bytes: int | None
    """What was free beside the weights when it was planned; None: not measured."""
    warnings: tuple[str, ...]

    def taken_freely(self, weight_bytes: int) -> int:
        """Return how many blocks may be touched before kept ones make place: an eighth of the weights.

        Beyond that memory grows with what is served at once, never with what was served before.
        """
        return weight_bytes // 8 // self.block_bytes

    def as_facts(self) -> dict[str, Any]:
        """Return the plan as an observation."""
        return {
            "blocks": self.blocks,
            "block_bytes": self.block_bytes,
            "positions": self.blocks * BLOCK,
            "reserved_bytes": self.blocks * self.block_bytes,
            "budget_bytes": self.budget_bytes,
            "free_bytes": self.free_bytes,
        }


def _mib(size_bytes: int) -> int:
    """Return the least that `--kv-cache-mib` takes and holds so much."""
    return (size_bytes + (1 << 20) - 1) >> 20


def plan_kv_cache(
    config: ModelConfig,
    params: LoadModelParams,
    *,
    default_bytes: int = DEFAULT_KV_BYTES,
    value_bytes: int = 4,
    free_bytes: int | None = None,
) -> KvPlan:
    """Fit context and cache into the budget, and into what is free.

    A context that was asked for is provided or refused; without one it is the model's own, or
    as much of it as the budget holds. The lane's own budget makes room for a context that was asked for;
    one that the host names doesn't.

    Args:
        value_bytes: of one number of a key or value.
        free_bytes: what could be taken now; None: not measured.

    Raises:
        BackendError: `context-too-long` or `insufficient-memory`; nothing was loaded.
    """
    block_bytes = 2 * config.layers * config.kv_heads * config.head_dim * BLOCK * value_bytes
    asked = blocks_for(params.context_length) if params.context_length else 1
    budget = params.memory_bytes
    if budget is None:
        budget = max(default_bytes, asked * block_bytes) if params.context_length else default_bytes
    limit = "may use"
    if free_bytes is not None and usable_bytes(free_bytes) < budget:
        budget = usable_bytes(free_bytes)
        limit = f"of {free_bytes} bytes that are free here may use"
    affordable = budget // block_bytes
    wanted = params.context_length or config.context_length
    if wanted > config.context_length:
        raise BackendError(
            "context-too-long",
            f"a context of {wanted} positions was asked for and the model was made for "
            f"{config.context_length}; nothing was loaded",
            facts={"requested": wanted, "model_context_length": config.context_length},
            remedy=f"Ask for at most {config.context_length}.",
        )
    if asked > affordable:
        more = f", or for --kv-cache-mib {_mib(asked * block_bytes)}" if limit == "may use" else ""
        raise BackendError(
            "insufficient-memory",
            f"the KV cache needs {asked * block_bytes} bytes for one sequence of "
            f"{min(wanted, asked * BLOCK)} positions and {limit} {budget}; nothing was loaded",
            facts={
                "needed_bytes": asked * block_bytes,
                "budget_bytes": budget,
                "free_bytes": free_bytes,
                "block_bytes": block_bytes,
                "positions_per_block": BLOCK,
                "context_length": wanted,
            },
            remedy=f"Ask for a context of at most {affordable * BLOCK} positions{more}."
            if affordable
            else f"Allow it: --kv-cache-mib {_mib(asked * block_bytes)} suffices."
            if limit == "may use"
            else "Close other programs, or take a smaller model.",
        )
    context = min(wanted, affordable * BLOCK)
    warnings = []
    if context < wanted:
        all_of_it = f"`vox-host serve --kv-cache-mib {_mib(blocks_for(wanted) * block_bytes)}` holds all"
        warnings.append(
            f"the context is {context} of the model's {wanted} positions: the KV cache {limit} {budget} bytes"
            + (f"; {all_of_it}" if limit == "may use" else "")
        )
    return KvPlan(
        blocks=min(affordable, params.max_sequences * blocks_for(context)),
        block_bytes=block_bytes,
        budget_bytes=budget,
        free_bytes=free_bytes,
        context_length=context,
        warnings=tuple(warnings),
    )
