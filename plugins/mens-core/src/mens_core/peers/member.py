"""The work of a rank other than 0: it holds the model and the adapter's values, and computes gradients."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mens_core.adapters.apply import from_lane, lane_shapes, make_loras
from mens_core.adapters.keys import adapter_digest
from mens_core.adapters.plan import AdapterPlan, plan_adapter
from mens_core.differentiate import Score
from mens_core.micro_batches import Example, read_examples
from mens_core.models.model import Model
from mens_core.models.passes import Dropout
from mens_core.non_finite import not_finite
from mens_core.ops import Tensor
from mens_core.peers.messages import (
    Alive,
    Broke,
    Connect,
    Connected,
    Done,
    End,
    Give,
    Holds,
    Load,
    Ready,
    Take,
    ToPeer,
    Work,
)
from mens_core.peers.ranks import facts_of_rank, in_parts
from mens_core.peers.wire import Place, Wire
from mens_core.scoring import score_examples
from mens_core.step_gradients import Gradients, sum_gradients
from mens_core.training_ops import TrainingOps
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import Message, SelfTestParams, SelfTestResult

if TYPE_CHECKING:
    from mens_core.backend import MensBackend

__all__ = ["Member"]

_ALIVE_S = 0.2

T = TypeVar("T")


class _DroppedError(Exception):
    """Rank 0 has asked for something else."""


class Member:
    """One rank, from the first question to the last."""

    def __init__(
        self,
        backend: MensBackend,
        place: Place,
        asked: queue.SimpleQueue[ToPeer],
        say: Callable[[Message], None],
    ) -> None:
        self._backend = backend
        self._place = place
        self._asked = asked
        self._say = say
        self._said_s = 0.0
        self._wire: Wire | None = None
        self._gradients: Gradients | None = None
        self._digest = ""

    def run(self) -> None:
        """Answer until rank 0 says that it is the end.

        What fails while tensors cross is raised: the other side can't be told where it stands.
        """
        while True:
            ask = self._asked.get()
            if isinstance(ask, End):
                break
            if isinstance(ask, Give):
                self._give()
                continue
            if isinstance(ask, Take):
                self._take(ask)
                continue
            try:
                if isinstance(ask, Load):
                    self._load(ask)
                elif isinstance(ask, Connect):
                    self._connect()
                else:
                    self._work(ask)
            except _DroppedError:
                continue
            except BackendError as error:
                self._say(Broke(number=getattr(ask, "number", None), error=error.error))
        if self._wire is not None:
            self._wire.close(is_whole=True)

    # --- the start -------------------------------------------------------------------------------

    def _load(self, ask: Load) -> None:
        backend = self._backend
        self._self_test()
        for _ in backend.load_model(ask.model):
            self._live()
        model, self._ops, loaded = backend.lend()
        self._base: Model = replace(model, ops=self._ops)
        self._model = self._base
        self._ask = ask
        self._plan: AdapterPlan = plan_adapter(ask.adapter, model.layer_shapes)
        self._shapes = lane_shapes(self._plan)
        facts = facts_of_rank(backend.info, self._base, self._ops, loaded.model_digest)
        self._say(Ready(facts=facts))

    def _self_test(self) -> None:
        """This rank's device is another than the one that the worker has tested."""
        result = self._backend.self_test(SelfTestParams()).result
        if not isinstance(result, SelfTestResult) or result.failed or not result.cases:
            failed = result.failed if isinstance(result, SelfTestResult) else []
            raise BackendError(
                "self-test-failed",
                f"the device of rank {self._place.rank} failed {len(failed)} cases of the lane's self-test",
                facts={"failed": failed},
                remedy="Leave that device out: CUDA_VISIBLE_DEVICES chooses among GPUs.",
            )

    def _connect(self) -> None:
        setup = self._backend.peers
        if setup is None:
            raise AssertionError("a rank's backend says how ranks meet")
        self._wire = setup.open_wire(self._place, self._ops, lambda: None)
        self._say(Connected())

    # --- work --------------------------------------------------------------------------------------

    def _work(self, ask: Work) -> None:
        self._gradients = None
        if ask.adapter_digest != self._digest:
            raise BackendError(
                "peer-differs",
                f"holds another adapter than rank 0: expected {ask.adapter_digest}, found {self._digest}",
                facts={"expected": ask.adapter_digest, "found": self._digest},
            )
        # The model's own, as rank 0 has it: what a rank's KV cache has room for is no matter of training.
        config = self._base.config
        examples = read_examples(
            ask.examples, vocab_size=config.vocab_size, context_length=config.context_length
        )
        self._ops.take_faults()
        if ask.kind == "evaluate":
            scores = self._run(self._score(ask, examples))
            self._say(
                Done(
                    number=ask.number,
                    losses=[float(score.loss) for score in scores],
                    logits_digests=[score.logits_digest for score in scores],
                )
            )
            return
        gradients = self._run(self._differentiate(ask, examples))
        faults = self._ops.take_faults()
        if faults:
            raise not_finite(faults[0].name, {})
        self._gradients = gradients
        tree = next(iter(gradients.trees.values()))
        self._say(
            Done(
                number=ask.number,
                losses=[float(loss) for loss in gradients.losses],
                levels=[level for level, _ in tree.nodes()],
            )
        )

    def _score(self, ask: Work, examples: list[Example]) -> Generator[None, None, list[Score]]:
        return score_examples(
            self._model,
            self._ops,
            examples,
            micro_batch_size=self._ask.micro_batch_size,
            digests=ask.logits_digest,
        )

    def _differentiate(self, ask: Work, examples: list[Example]) -> Generator[None, None, Gradients]:
        rate = self._plan.dropout
        return sum_gradients(
            self._model,
            self._ops,
            list(self._plan.shapes),
            examples,
            first=ask.first,
            micro_batch_size=self._ask.micro_batch_size,
            remember_bytes=self._ask.remember_bytes,
            dropout=Dropout(rate, self._ask.seed, ask.step) if rate else None,
        )

    def _run(self, work: Generator[None, None, T]) -> T:
        while True:
            try:
                next(work)
            except StopIteration as stop:
                made: T = stop.value
                return made
            self._live()
            if not self._asked.empty():
                work.close()
                raise _DroppedError

    def _live(self) -> None:
        now = time.monotonic()
        if now - self._said_s > _ALIVE_S:
            self._said_s = now
            self._say(Alive())

    # --- tensors -----------------------------------------------------------------------------------

    def _give(self) -> None:
        if self._gradients is None or self._wire is None:
            raise AssertionError("sums were asked for before they were made")
        trees = self._gradients.trees
        for keys in in_parts(self._shapes):
            self._wire.send([node for key in keys for _, node in trees[key].nodes()], 0)
        self._gradients = None

    def _take(self, ask: Take) -> None:
        if self._wire is None:
            raise AssertionError("values came before the way for them was open")
        ops: TrainingOps = self._ops
        self._gradients = None
        values: dict[str, Tensor] = {}
        for keys in in_parts(self._shapes):
            received = self._wire.receive([self._shapes[key] for key in keys], 0)
            values.update(zip(keys, received, strict=True))
        self._model = self._base.adapted(make_loras(ops, self._plan, values))
        self._digest = adapter_digest(from_lane(ops, values))
        self._say(Holds(number=ask.number, adapter_digest=self._digest))
