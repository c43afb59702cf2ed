"""One optimizer step of fast mode: the canonical trainer's order of things, on torch's kernels.

All-or-nothing like that one; what it does not promise is bits: neither over micro-batches nor over machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from mens_core.adapters.initial import initial_tensors
from mens_core.adapters.keys import adapter_digest
from mens_core.adapters.plan import AdapterPlan
from mens_core.differentiate import Score
from mens_core.float32 import exact, nearest
from mens_core.micro_batches import Example, cut
from mens_core.models.model import Model
from mens_core.non_finite import not_finite, of_step
from mens_core.schedule import BetaPowers, adamw_constants, learning_rate
from mens_core.trainer import StepOutcome, Trainer, TrainerConfig, TrainerState
from mens_torch_cuda.fast.decoder import Decoder, Layer, Rows, Saved
from mens_torch_cuda.fast.dropout import dropped
from mens_torch_cuda.fast.flat_adapter import FlatAdapter
from mens_torch_cuda.fast.laid_out import LaidOut
from mens_torch_cuda.fast.loss import logits_of, losses_and_gradient
from mens_torch_cuda.fast.memory import kept_layers
from mens_torch_cuda.fast.recorded_training import StepRecorder
from vox_plugin_api.backend import BackendError

__all__ = ["ROWS_AT_ONCE", "FastTrainer"]

ROWS_AT_ONCE = 8192
"""Rows of a micro-batch whose size nobody chose."""


class FastTrainer:
    """An adapter in training on one frozen model, in bfloat16."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        config: TrainerConfig,
        *,
        state: TrainerState | None = None,
        micro_batch_size: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """Begin with the canonical trainer's first values, or go on from a state.

        Args:
            memory_bytes: of the device, weights included: as many layers keep what their backward needs as
                fit; the others run a second time. None: what is free now.
        """
        self.config = config
        self.plan: AdapterPlan = Trainer.plan_for(model, config)
        self.micro_batch_size = micro_batch_size
        self._device, self._model_config, self._memory_bytes = device, model.config, memory_bytes
        if state is None:
            values = initial_tensors(self.plan, config.seed)
            zeros = {key: np.zeros_like(value) for key, value in values.items()}
            state = TrainerState(step=0, parameters=values, first_moments=zeros, second_moments=zeros)
        self.step = state.step
        self._powers = BetaPowers(config.optimizer, state.step)
        with torch.no_grad():
            self._decoder = Decoder.of(model)
            self._adapter = FlatAdapter(self.plan, self._decoder, device, state)
        self.adapter_digest = adapter_digest(self._adapter.on_host(self._adapter.values))
        self._recorder = StepRecorder(device) if device.type == "cuda" else None

    def state(self) -> TrainerState:
        """Return a copy of everything that a later run needs."""
        adapter = self._adapter

        def copies(flat: torch.Tensor) -> dict[str, np.ndarray]:
            found = adapter.on_host(flat)
            return {key: np.array(found[key], "<f4") for key in self.plan.shapes}

        return TrainerState(
            step=self.step,
            parameters=copies(adapter.values),
            first_moments=copies(adapter.first),
            second_moments=copies(adapter.second),
        )

    # --- one step ------------------------------------------------------------------------------

    def train_step(self, examples: Sequence[Example]) -> Generator[None, None, StepOutcome]:
        """Take one optimizer step, yielding on the way; until it returns, nothing has changed.

        Raises:
            BackendError: `non-finite`, `out-of-device-memory`; the step was not taken.
        """
        with of_step(self.step + 1):
            try:
                return (yield from self._train_step(examples))
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                raise BackendError(
                    "out-of-device-memory",
                    "there is no room for it",
                    facts={"said": str(error).splitlines()[0]},
                    remedy="Give the steps a smaller micro-batch, or shorter examples.",
                ) from None

    def _train_step(self, examples: Sequence[Example]) -> Generator[None, None, StepOutcome]:
        optimizer, adapter = self.config.optimizer, self._adapter
        adapter.gradient.zero_()
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for together in cut(examples, self.micro_batch_size, ROWS_AT_ONCE):
            loss += yield from self._differentiate(self._laid_out(examples, together))
        trained = sum(len(example.trained) for example in examples)
        rate = learning_rate(optimizer.learning_rate, self.config.schedule, self.step)
        with torch.no_grad():
            gradient = adapter.gradient / trained
            norm = gradient.norm()
            if optimizer.max_gradient_norm is not None:
                gradient *= (float(exact(optimizer.max_gradient_norm)) / norm).clamp(max=1.0)
            stepped = adapter.stepped(gradient, adamw_constants(optimizer, rate, self._powers.next()))
            is_finite = torch.stack([torch.isfinite(part).all() for part in stepped]).all()
            yield None
            told = torch.stack([loss, norm.double(), is_finite.double()]).tolist()
        if not (np.isfinite(told[0]) and np.isfinite(told[1]) and told[2]):
            yield from self._name_non_finite(examples)
        digest = adapter_digest(adapter.on_host(stepped[0]))
        adapter.install(*stepped)
        self.adapter_digest = digest
        self._powers.advance()
        self.step += 1
        return StepOutcome(
            step=self.step,
            loss=nearest(Fraction(told[0]) / trained),
            gradient_norm=told[1],
            learning_rate=rate,
            trained_tokens=trained,
            adapter_digest=self.adapter_digest,
        )

    def _laid_out(self, examples: Sequence[Example], together: range) -> LaidOut:
        return LaidOut.of(examples[together.start : together.stop], together.start, self._device)

    def _differentiate(self, laid: LaidOut) -> Generator[None, None, torch.Tensor]:
        """Add the gradients of a micro-batch to the adapter's; return its summed loss."""
        self._set_dropout(laid)
        recorder, key = self._recorder, (self._decoder.reach(laid.rows), *laid.shape)
        recorded = 0 if recorder is None else recorder.held_bytes
        rows = len(laid.rows.positions)
        kept = kept_layers(self._model_config, rows, self._device, self._memory_bytes, recorded=recorded)
        if recorder is not None and not self.plan.dropout and recorder.is_due(key):
            return recorder.run(key, laid, lambda there: self._backward_at_once(there, kept))
        return (yield from self._backward(laid, kept))

    def _backward_at_once(self, laid: LaidOut, kept: int) -> torch.Tensor:
        steps = self._backward(laid, kept)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                loss: torch.Tensor = stop.value
                return loss

    def _backward(self, laid: LaidOut, kept: int) -> Generator[None, None, torch.Tensor]:
        layers = self._decoder.layers
        with torch.no_grad():
            hidden = self._decoder.embed(laid.rows)
            held: list[torch.Tensor | Saved] = []
            for i, layer in enumerate(layers):
                hidden = _forward(layer, hidden, laid.rows, held, keeps=i >= len(layers) - kept)
                yield None
            losses, dy = self._head(hidden, laid)
            del hidden
            table = self._decoder.embedding
            for layer in reversed(layers):
                is_wanted = layer.number > 0 or table.update is not None
                dy = _backward(layer, dy, laid.rows, held, wants_input=is_wanted)
                yield None
            table.backward(dy, laid.rows.token_ids)
        return losses.double().sum()

    def _head(self, hidden: torch.Tensor, laid: LaidOut) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [L] and the gradient of hidden [N, D]."""
        wanted = hidden[laid.wanted]
        losses, taken = losses_and_gradient(self._decoder, wanted, laid.targets, backward=True)
        if taken is None:
            raise AssertionError("a backward has a gradient")
        return losses, torch.zeros_like(hidden).index_copy_(0, laid.wanted, taken)

    def _set_dropout(self, laid: LaidOut | None) -> None:
        rate, seed, step = self.plan.dropout, self.config.seed, self.step
        for group in self._decoder.groups:
            if laid is None or not rate or group.update is None:
                group.drop = None
            else:
                group.drop = lambda x, n, first=laid.first: dropped(x, rate, (seed, step, n, first))

    # --- losses --------------------------------------------------------------------------------

    def evaluate(self, examples: Sequence[Example], *, digests: bool) -> Generator[None, None, list[Score]]:
        """Return the loss of each example with the adapter as it is.

        Raises:
            BackendError: `non-finite`.
        """
        scores: list[Score] = []
        self._set_dropout(None)
        for together in cut(examples, self.micro_batch_size, ROWS_AT_ONCE):
            laid = self._laid_out(examples, together)
            hidden = yield from self._forward(laid)
            with torch.no_grad():
                losses, _ = losses_and_gradient(
                    self._decoder, hidden[laid.wanted], laid.targets, backward=False
                )
                by_example = torch.split(losses, laid.trained)
                sums = torch.stack([part.double().sum() for part in by_example]).tolist()
                if not all(map(np.isfinite, sums)):
                    yield from self._name_non_finite(examples)
                made = self._digests(hidden, laid) if digests else [None] * len(sums)
            scores += [Score(np.float32(loss), digest) for loss, digest in zip(sums, made, strict=True)]
        return scores

    def _forward(self, laid: LaidOut) -> Generator[None, None, torch.Tensor]:
        with torch.no_grad():
            hidden = self._decoder.embed(laid.rows)
            for layer in self._decoder.layers:
                hidden, _ = layer.forward(hidden, laid.rows, keeps=False)
                yield None
        return hidden

    def _digests(self, hidden: torch.Tensor, laid: LaidOut) -> list[str | None]:
        """Of the logits of every position that was run, example by example."""
        found: list[str | None] = []
        for part in torch.split(hidden, np.diff(laid.rows.bounds.starts).tolist()):
            digest = hashlib.sha256()
            for x in torch.split(part, 128):
                logits, _, _ = logits_of(self._decoder, x)
                if self._decoder.softcap is not None:
                    logits = self._decoder.softcap * torch.tanh(logits / self._decoder.softcap)
                digest.update(logits.cpu().numpy().astype("<f4").tobytes())
            found.append(digest.hexdigest())
        return found

    def _name_non_finite(self, examples: Sequence[Example]) -> Generator[None, None, None]:
        """Look for the first value that is not finite, forward from the embedding.

        Raises:
            BackendError: `non-finite`, always.
        """
        self._set_dropout(None)
        for together in cut(examples, self.micro_batch_size, ROWS_AT_ONCE):
            laid = self._laid_out(examples, together)
            with torch.no_grad():
                hidden = self._decoder.embed(laid.rows)
                for layer in self._decoder.layers:
                    hidden, _ = layer.forward(hidden, laid.rows, keeps=False)
                    bad = torch.nonzero(~torch.isfinite(hidden).all(1))
                    if len(bad):
                        raise not_finite(f"layers.{layer.number}.mlp_residual", *laid.place_of(int(bad[0])))
                    yield None
                losses, _ = losses_and_gradient(
                    self._decoder, hidden[laid.wanted], laid.targets, backward=False
                )
                bad = torch.nonzero(~torch.isfinite(losses))
                if len(bad):
                    raise not_finite("loss", *laid.place_of(int(laid.wanted[bad[0]])))
        raise not_finite("gradient norm", {})


def _forward(
    layer: Layer, x: torch.Tensor, rows: Rows, held: list[torch.Tensor | Saved], *, keeps: bool
) -> torch.Tensor:
    """One layer's output; what its backward needs, or its input alone, goes to `held`."""
    out, saved = layer.forward(x, rows, keeps=keeps)
    held.append(x if saved is None else saved)
    return out


def _backward(
    layer: Layer, dy: torch.Tensor, rows: Rows, held: list[torch.Tensor | Saved], *, wants_input: bool
) -> torch.Tensor:
    """The gradient of one layer's input; what was held for it is let go of."""
    saved: Any = held.pop()
    if not isinstance(saved, Saved):
        _, saved = layer.forward(saved, rows, keeps=True)
    return layer.backward(dy, saved, rows, wants_input=wants_input)
