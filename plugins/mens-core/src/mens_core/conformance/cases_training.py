"""The cases of training: what a lane that trains is compared on, beside the quick cases.

Apart from them, so that a worker that only serves imports and runs none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mens_core.conformance.cases_backward import BACKWARD_CASES, TrainingCase
from mens_core.conformance.cases_updates import UPDATE_CASES
from mens_core.conformance.quick import compare, digests, read_vectors
from mens_core.training_ops import TrainingOps
from vox_plugin_api.messages import SelfTestResult

__all__ = ["TRAINING_CASES", "TRAINING_VECTORS", "training_test"]

TRAINING_VECTORS = "training.json"

TRAINING_CASES: Mapping[str, TrainingCase] = MappingProxyType({**BACKWARD_CASES, **UPDATE_CASES})


def training_test(make_ops: Callable[[], TrainingOps]) -> SelfTestResult:
    """Run the training cases on a lane and compare them with the shipped digests."""
    return compare(digests(make_ops(), TRAINING_CASES), read_vectors(TRAINING_VECTORS))
