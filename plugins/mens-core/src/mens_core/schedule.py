"""The numbers that a step is taken with, as float32 values made by exact rules (docs/numerics.md)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from mens_core.float32 import exact, nearest
from mens_core.rotary import cos_sin
from mens_core.training_ops import AdamW
from vox_plugin_api.train_messages import OptimizerConfig, Schedule

__all__ = ["BetaPowers", "adamw_constants", "learning_rate"]


def learning_rate(peak: float, schedule: Schedule, step: int) -> float:
    """Return the float32 learning rate of step `step`, counted from 0."""
    return nearest(exact(peak) * _share(schedule, step))


def _share(schedule: Schedule, step: int) -> Fraction:
    if step < schedule.warmup_steps:
        return Fraction(step + 1, schedule.warmup_steps)
    if schedule.kind == "constant" or schedule.total_steps is None:
        return Fraction(1)
    left = schedule.total_steps - schedule.warmup_steps
    passed = min(step - schedule.warmup_steps, left)
    if schedule.kind == "linear":
        return Fraction(left - passed, left)
    # cos(pi passed / left), from the integers that make rotary angles: half a turn is 2^127.
    bits, _ = cos_sin((passed << 127) // left, 1)
    cosine = Fraction(float(np.uint32(bits).view(np.float32)))
    return (1 + cosine) / 2


class BetaPowers:
    """beta1^t and beta2^t, by repeated multiplication in float64."""

    def __init__(self, optimizer: OptimizerConfig, steps: int) -> None:
        """Start after `steps` steps."""
        self._betas = float(exact(optimizer.beta1)), float(exact(optimizer.beta2))
        self._powers = 1.0, 1.0
        for _ in range(steps):
            self._powers = self.next()

    def next(self) -> tuple[float, float]:
        """Return the powers of the next step."""
        (beta1, beta2), (power1, power2) = self._betas, self._powers
        return power1 * beta1, power2 * beta2

    def advance(self) -> None:
        """Count the step as taken."""
        self._powers = self.next()


def adamw_constants(optimizer: OptimizerConfig, rate: float, powers: tuple[float, float]) -> AdamW:
    """Return the constants of the step with this learning rate and these powers of beta."""
    beta1, beta2 = exact(optimizer.beta1), exact(optimizer.beta2)
    return AdamW(
        learning_rate=rate,
        beta1=nearest(beta1),
        one_minus_beta1=nearest(1 - beta1),
        beta2=nearest(beta2),
        one_minus_beta2=nearest(1 - beta2),
        eps=nearest(exact(optimizer.eps)),
        decay=nearest(1 - Fraction(rate) * exact(optimizer.weight_decay)),
        correction1=nearest(Fraction(1.0 - powers[0])),
        correction2=nearest(Fraction(1.0 - powers[1])),
    )
