"""Prompts that begin alike share KV blocks, and no byte of an answer shows it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lanes.chain_model import ChainModel, new_cache
from lanes.toy_model import VOCAB
from mens_core.engine import Engine
from mens_core.kv_blocks import BlockPool, Reservation
from mens_core.kv_memory import KvMemory
from mens_core.ops import BLOCK
from mens_core.prefix_index import PrefixIndex
from mens_core.scheduler import StepLimits
from mens_core.sequence import Sequence, SequenceRequest
from vox_plugin_api.messages import GenerateResult, SamplingParams

POISON = VOCAB - 1
GREEDY = SamplingParams(temperature=0)
BASES = [[base, *((i * i) % (VOCAB - 1) for i in range(511))] for base in range(2)]
"""Their first blocks differ, and what comes behind them doesn't."""


def a_memory(freely: int, free_bytes=lambda: None) -> KvMemory:
    return KvMemory(block_bytes=1000, free_bytes=free_bytes, taken_freely=freely)


def an_engine(*, blocks=16, adapter=0, cache=None, pool=None, memory=None, refuses=None, **limits) -> Engine:
    engine = Engine(
        ChainModel(adapter, poison=POISON, most_rows=refuses),
        new_cache(blocks) if cache is None else cache,
        vocab_size=VOCAB,
        context_length=1024,
        blocks=blocks,
        limits=StepLimits(**limits),
        origin=f"adapter {adapter}",
        memory=memory,
    )
    if pool is not None:
        engine.pool = pool
    return engine


def ask(token_ids, max_tokens=4, **wishes) -> SequenceRequest:
    return SequenceRequest(
        token_ids=tuple(token_ids), max_tokens=max_tokens, **{"sampling": GREEDY, **wishes}
    )


def collect(sequence: Sequence) -> list:
    taken = sequence.__dict__.setdefault("taken", [])
    while sequence.ready:
        taken.append(sequence.ready.popleft())
    return taken


def finish(engine: Engine, *sequences: Sequence) -> None:
    while not all(sequence.is_done for sequence in sequences):
        for sequence in sequences:
            collect(sequence)
        assert engine.step() > 0


def serve(engine: Engine, request: SequenceRequest) -> Sequence:
    sequence = engine.submit(request)
    finish(engine, sequence)
    return sequence


def outcome(sequence: Sequence) -> bytes:
    """All that a caller is given, bit by bit."""
    result = GenerateResult(
        tokens=collect(sequence),
        prompt=sequence.prompt_scores if sequence.prompt_is_scored else None,
        finish_reason=sequence.finish_reason,
        stop_token_id=sequence.stop_token_id,
        generated_tokens=sequence.generated,
    )
    if sequence.failure is not None:
        return result.model_dump_json().encode() + sequence.failure.error.model_dump_json().encode()
    return result.model_dump_json().encode() + sequence.digest.digest()


def alone(request: SequenceRequest, adapter: int = 0) -> bytes:
    return outcome(serve(an_engine(adapter=adapter, blocks=8), request))


# --- the promise: hundreds of mixes ----------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A request to come: some of a text that others begin with too, and an end of its own."""

    base: int
    shared: int
    end: tuple[int, ...]
    max_tokens: int
    wishes: dict
    adapter: int
    arrives: int
    leaves_after: int | None
    """Turns after its arrival when it is cancelled."""
    goes_on: bool
    """Whether its beginning is prompt and answer of whoever was done last, as in a chat."""


@dataclass(frozen=True)
class Mix:
    asked: list[Asked]
    rows: int
    blocks: int
    freely: int | None
    """Blocks that may be touched for kept ones' sake; None: all."""
    room: int | None
    """Blocks that there is memory for; None: it can't be told."""
    refused_steps: int
    """In every so many turns the lane refuses steps of more than 40 rows; 0: never."""


def a_request(draw: Random) -> Asked:
    wishes = draw.choice([{}, {}, {"logprobs": 2}, {"stop_token_ids": frozenset(range(0, VOCAB, 6))}])
    if draw.random() < 0.3:
        wishes |= {"sampling": SamplingParams(temperature=1.2, seed=draw.getrandbits(64))}
    scored = draw.random()
    if scored < 0.12:
        wishes |= {"prompt_logprobs": 1} if scored < 0.06 else {"logits_digest": True}
    end = [draw.choice([*range(1, 10), POISON]) for _ in range(draw.randrange(4))]
    return Asked(
        base=draw.choice([0, 0, 0, 1]),
        shared=draw.choice([0, 5, 127, 128, 129, 200, 255, 256, 257, 300, 384, 390]),
        end=tuple(end if draw.random() < 0.2 else [min(one, 9) for one in end]),
        max_tokens=draw.choice([0, 1, 3, 9, 30]),
        wishes=wishes,
        adapter=draw.choice([0, 0, 0, 1]),
        arrives=draw.randrange(24),
        leaves_after=draw.choice([None, None, None, None, 0, 1, 3]),
        goes_on=draw.random() < 0.3,
    )


def a_mix(seed: int) -> Mix:
    draw = Random(seed)
    return Mix(
        asked=[a_request(draw) for _ in range(draw.randrange(4, 10))],
        rows=draw.choice([7, 64, 100, 256]),
        blocks=draw.choice([4, 5, 8, 24]),
        freely=draw.choice([None, 0, 3, 8]),
        room=draw.choice([None, 3, 4, 6]),
        refused_steps=draw.choice([0, 0, 3]),
    )


# Drawn from a seed: choices of hypothesis' own lean towards the first ones, and few prompts then agree.
mixes = st.integers(0, 2**64 - 1).map(a_mix)


def run(mix: Mix) -> int:
    """Serve a mix and compare every answer with a solo run's; return how many positions were reused.

    Two engines stand for two adapters over the same memory.
    """
    pool, cache = BlockPool(mix.blocks, taken_freely=mix.freely), new_cache(mix.blocks)

    def free_bytes() -> int | None:
        # 1112 bytes for each block of 1000: a tenth is left for the steps.
        return None if mix.room is None else (mix.room - pool.touched) * 1112

    engines = [
        an_engine(
            blocks=mix.blocks,
            adapter=adapter,
            cache=cache,
            pool=pool,
            memory=None if mix.freely is None else a_memory(mix.freely, free_bytes),
            rows=mix.rows,
            least_prefill_rows=1,
        )
        for adapter in (0, 1)
    ]
    coming = sorted(mix.asked, key=lambda one: one.arrives)
    here: list[tuple[Asked, SequenceRequest, Sequence, int]] = []
    turn = 0
    while coming or not all(sequence.is_done for _, _, sequence, _ in here):
        while coming and coming[0].arrives <= turn:
            one = coming.pop(0)
            done = [s for _, _, s, _ in here if s.finish_reason is not None] if one.goes_on else []
            beginning = done[-1].tokens if done else BASES[one.base][: one.shared]
            ids = [*beginning, *one.end][: 4 * BLOCK - one.max_tokens] or [0]
            request = ask(ids, one.max_tokens, **one.wishes)
            here.append((one, request, engines[one.adapter].submit(request), turn))
        for one, _, sequence, arrived in here:
            if one.leaves_after is not None and turn >= arrived + one.leaves_after:
                engines[one.adapter].cancel(sequence)
        for engine in engines:
            refuses = mix.refused_steps and turn % mix.refused_steps == 0
            engine._model.most_rows = 40 if refuses else None
            engine.step()
        for _, _, sequence, _ in here:
            collect(sequence)
        assert pool.used + pool.promised <= pool.total
        turn += 1
        assert turn < 2000, "somebody waits for ever"
    for one, request, sequence, _ in here:
        if sequence.is_cancelled:
            continue
        if sequence.failure is not None and "memory" in sequence.failure.error.code:
            assert mix.refused_steps or -(-request.positions // BLOCK) > mix.room
            continue
        assert outcome(sequence) == alone(request, one.adapter)
    if mix.room is not None and mix.freely is not None:
        assert pool.touched <= mix.room
    assert (pool.used, pool.promised) == (0, 0)
    assert sorted([*pool._free, *pool._kept]) == list(range(mix.blocks))
    assert len(pool.index) == pool.kept <= mix.blocks
    return sum(engine.reused for engine in engines)


def test_hundreds_of_mixes_give_every_request_the_bytes_of_a_solo_run():
    reused: list[int] = []

    @settings(max_examples=200, deadline=None)
    @given(mixes)
    def check(mix):
        reused.append(run(mix))

    check()
    # Reuse is what is tested: it has to have happened, and often (in about half of what is drawn).
    assert sum(positions > 0 for positions in reused) > len(reused) // 4, reused


def _ignore_the_adapter(monkeypatch):
    find, add = PrefixIndex.find, PrefixIndex.add
    monkeypatch.setattr(PrefixIndex, "find", lambda self, origin, *rest: find(self, "", *rest))
    monkeypatch.setattr(PrefixIndex, "add", lambda self, number, origin, *rest: add(self, number, "", *rest))


def _ignore_what_came_before(monkeypatch):
    find, add = PrefixIndex.find, PrefixIndex.add
    monkeypatch.setattr(PrefixIndex, "find", lambda self, origin, before, ids: find(self, origin, None, ids))
    monkeypatch.setattr(
        PrefixIndex, "add", lambda self, number, origin, before, ids: add(self, number, origin, None, ids)
    )


def _find_blocks_that_were_given_up(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "remove", lambda self, whole: None)
    monkeypatch.setattr(PrefixIndex, "__len__", lambda self: 0)


def _share_a_block_in_the_making(monkeypatch):
    share = Reservation.share_whole

    def too_early(self, origin, token_ids, positions):
        share(self, origin, token_ids, min(positions + BLOCK // 2, len(token_ids)))

    monkeypatch.setattr(Reservation, "share_whole", too_early)


def _share_what_a_failed_step_wrote(monkeypatch):
    step = Engine._run

    def shares_first(self, slices):
        for piece in slices:
            blocks, end = piece.sequence.blocks, piece.start + piece.count
            blocks.grow_to(end)
            blocks.share_whole(self._origin, piece.sequence.tokens, end)
        step(self, slices)

    monkeypatch.setattr(Engine, "_run", shares_first)


def _give_back_what_others_hold(monkeypatch):
    monkeypatch.setattr(BlockPool, "_hold", _hold_alone)


def _hold_alone(self, block):
    self._kept.pop(block, None)
    self.used += self._holders[block] == 0
    self._holders[block] = 1


def _skip_the_last_token(monkeypatch):
    monkeypatch.setattr(SequenceRequest, "reusable", property(lambda self: len(self.token_ids)))


def _skip_positions_whose_logits_are_wanted(monkeypatch):
    monkeypatch.setattr(SequenceRequest, "reusable", property(lambda self: len(self.token_ids) - 1))


def _forget_what_was_promised(monkeypatch):
    refusal = KvMemory.refusal

    def of_the_written_alone(self, pool, blocks, prefix):
        promised, pool.promised = pool.promised, 0
        said = refusal(self, pool, blocks, prefix)
        pool.promised = promised
        return said

    monkeypatch.setattr(KvMemory, "refusal", of_the_written_alone)


def _touch_for_what_is_kept(monkeypatch):
    refusal = KvMemory.refusal

    def keeps(self, pool, blocks, prefix):
        said = refusal(self, pool, blocks, prefix)
        pool.taken_freely = self.taken_freely
        return said

    monkeypatch.setattr(KvMemory, "refusal", keeps)


@pytest.mark.parametrize(
    "plant",
    [
        _forget_what_was_promised,
        _touch_for_what_is_kept,
        _ignore_the_adapter,
        _ignore_what_came_before,
        _find_blocks_that_were_given_up,
        _share_a_block_in_the_making,
        _share_what_a_failed_step_wrote,
        _give_back_what_others_hold,
        _skip_the_last_token,
        _skip_positions_whose_logits_are_wanted,
    ],
)
def test_the_mixes_find_a_planted_mistake(plant, monkeypatch):
    plant(monkeypatch)

    @settings(max_examples=400, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(mixes)
    def check(mix):
        run(mix)

    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        check()


# --- what is reused, counted -----------------------------------------------------------------------


def counts(engine: Engine) -> tuple[int, int]:
    return engine.reused, engine.computed


def test_a_chat_computes_what_is_new_and_the_block_it_stands_in():
    engine = an_engine(blocks=8)
    said = BASES[0][:300]
    first = serve(engine, ask(said, 5))
    assert (first.reused, engine.computed) == (0, 304)
    second = serve(engine, ask([*first.tokens, 7, 8], 5))
    assert (second.reused, engine.computed - 304) == (256, 307 + 4 - 256)
    assert outcome(second) == alone(second.request)


def test_answers_are_reused_like_prompts():
    engine = an_engine()
    first = serve(engine, ask(BASES[0][:100], 30))
    assert serve(engine, ask([*first.tokens, 9], 1)).reused == BLOCK


@pytest.mark.parametrize(("prompt", "reused"), [(127, 0), (128, 0), (129, 128), (256, 128), (257, 256)])
def test_whole_blocks_are_reused_and_the_last_token_is_always_computed(prompt, reused):
    engine = an_engine()
    serve(engine, ask(BASES[0][:400], 1))
    before = engine.computed
    sequence = serve(engine, ask(BASES[0][:prompt], 1))
    assert (sequence.reused, engine.computed - before) == (reused, prompt - reused)
    assert outcome(sequence) == alone(sequence.request)


@pytest.mark.parametrize("wish", [{"prompt_logprobs": 0}, {"logits_digest": True}])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_positions_whose_logits_are_wanted_are_computed_and_others_may_use_them(wish, max_tokens):
    engine = an_engine(blocks=8)
    serve(engine, ask(BASES[0][:300], 1))
    scored = serve(engine, ask(BASES[0][:300], max_tokens, **wish))
    assert (scored.reused, outcome(scored)) == (0, alone(scored.request))
    other = an_engine(blocks=8)
    serve(other, ask(BASES[0][:300], 0, **wish))
    assert serve(other, ask(BASES[0][:300], 1)).reused == 256


def test_what_one_writes_the_others_use_while_it_runs():
    engine = an_engine(blocks=16, rows=256)
    requests = [ask(BASES[0][:390], 3, sampling=SamplingParams(seed=i)) for i in range(4)]
    together = [engine.submit(request) for request in requests]
    finish(engine, *together)
    assert together[0].reused == 0
    assert all(sequence.reused >= 256 for sequence in together[1:])
    assert [outcome(sequence) for sequence in together] == [alone(request) for request in requests]


def test_two_that_write_the_same_block_at_once_hold_one_of_them_afterwards():
    engine = an_engine(blocks=8, rows=256)
    two = [engine.submit(ask(BASES[0][:120], 30)) for _ in range(2)]
    engine.step()
    assert engine.pool.used == 2
    for _ in range(12):
        engine.step()
        for sequence in two:
            collect(sequence)
    # 129 positions each: a block together, and one of its own for each.
    assert [sequence.cached for sequence in two] == [132, 132]
    assert two[0].blocks.table[0] == two[1].blocks.table[0]
    assert (engine.pool.used, engine.pool.reserved) == (3, 3)
    finish(engine, *two)
    assert outcome(two[0]) == outcome(two[1]) == alone(two[0].request)


def test_blocks_that_are_shared_count_once_at_admission():
    engine = an_engine(blocks=4)
    two = [engine.submit(ask([*BASES[0][:260], end], 20)) for end in (1, 2)]
    engine.step()
    engine.step()
    assert (engine.running, engine.waiting) == (2, 0), "3 + 3 blocks of 4, of which 2 are the same"
    finish(engine, *two)
    assert [outcome(sequence) for sequence in two] == [alone(sequence.request) for sequence in two]


def test_who_waits_is_looked_up_again_only_when_something_changed(monkeypatch):
    engine = an_engine(blocks=4)
    running = engine.submit(ask(BASES[0][:300], 60))
    waiting = engine.submit(ask(BASES[1][:300], 9))
    engine.step()
    looked_up = []
    find = BlockPool.find_prefix
    monkeypatch.setattr(BlockPool, "find_prefix", lambda self, *a: looked_up.append(a[1]) or find(self, *a))
    for _ in range(20):
        engine.step()
        collect(running)
    looked_up = [ids for ids in looked_up if ids == waiting.request.token_ids]
    assert (engine.waiting, len(looked_up)) == (1, 1), "once, after the first prompt's blocks were written"
    finish(engine, running, waiting)
    assert outcome(waiting) == alone(waiting.request)


def test_a_cancelled_request_leaves_its_whole_blocks_to_others():
    engine = an_engine(rows=200)
    leaver = engine.submit(ask(BASES[0][:500], 4))
    engine.step()
    engine.cancel(leaver)
    assert (engine.pool.used, engine.pool.kept) == (0, 1)
    sequence = serve(engine, ask(BASES[0][:500], 4))
    assert (sequence.reused, outcome(sequence)) == (128, alone(sequence.request))


def test_a_failed_request_leaves_what_was_finite_and_its_fault_is_found_again():
    engine = an_engine(rows=100)
    bad = ask([*BASES[0][:290], POISON, 1], 4)
    for _ in range(2):
        failed = serve(engine, bad)
        assert failed.failure.error.facts["position"] == 290
        assert outcome(failed) == alone(bad)
    # The rows of a step that failed are shared by nobody: position 290 was computed together with 200.
    assert (failed.reused, engine.pool.kept) == (128, 1)


def test_a_step_that_was_refused_shares_nothing():
    engine = an_engine()
    engine._model.most_rows = 100
    failed = serve_refused(engine, ask(BASES[0][:300], 4))
    assert failed.failure.error.code == "out-of-device-memory"
    engine._model.most_rows = None
    sequence = serve(engine, ask(BASES[0][:300], 4))
    assert (sequence.reused, outcome(sequence)) == (0, alone(sequence.request))


def serve_refused(engine, request):
    sequence = engine.submit(request)
    while not sequence.is_done:
        engine.step()
    return sequence


# --- what is kept, and for how long ----------------------------------------------------------------


def test_kept_blocks_are_in_nobodys_way():
    engine = an_engine(blocks=4)
    for base in range(8):
        # As many blocks as there are: whatever was kept has to go, and nobody waits or is refused.
        sequence = serve(engine, ask([base, *BASES[0][:490]], 10))
        assert outcome(sequence) == alone(sequence.request)
    assert (engine.pool.used, engine.pool.kept, engine.pool.touched) == (0, 3, 4)


def test_the_oldest_goes_first_and_of_one_prompt_its_end():
    engine = an_engine(blocks=6)
    for first in (1, 2):
        serve(engine, ask([first, *BASES[0][:300]], 1))  # two whole blocks each
    serve(engine, ask([1, *BASES[0][:300]], 1))  # the first prompt is now the younger one
    serve(engine, ask([3, *BASES[0][:300]], 1))  # three blocks, of which two are free
    assert (engine.reused, engine.pool.kept) == (256, 5)
    assert serve(engine, ask([2, *BASES[0][:300]], 0)).reused == 128
    assert serve(engine, ask([1, *BASES[0][:300]], 0)).reused == 128


@pytest.mark.parametrize(("freely", "touched"), [(None, 12), (0, 3), (2, 3), (5, 5)])
def test_what_is_kept_takes_no_new_memory_beyond_what_may_be_taken_freely(freely, touched):
    engine = an_engine(blocks=12, memory=None if freely is None else a_memory(freely))
    for first in range(10):
        sequence = serve(engine, ask([first, *BASES[0][:300]], 1))
        assert outcome(sequence) == alone(sequence.request)
    assert engine.pool.touched == touched


def test_one_short_user_takes_one_block_however_often_it_asks():
    engine = an_engine(blocks=64)
    for first in range(20):
        serve(engine, ask([first, 1, 2, 3], 40))
    assert (engine.pool.touched, engine.pool.kept) == (1, 0)


def test_what_is_served_at_once_may_touch_new_memory_whatever_is_kept():
    engine = an_engine(blocks=12, memory=a_memory(0))
    serve(engine, ask(BASES[0][:300], 1))
    three = [engine.submit(ask([7, first, *BASES[0][:300]], 4)) for first in range(3)]
    finish(engine, *three)
    assert [outcome(sequence) for sequence in three] == [alone(sequence.request) for sequence in three]
    assert engine.pool.touched == 9
