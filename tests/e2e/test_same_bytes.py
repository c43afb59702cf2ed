"""The determinism cases of tests/cases (D1, D4, D5) over HTTP, on the real model in a real worker."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from e2e.serving import Server, serving

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(240)]
MODEL = "gemma-3-270m"
CASES = Path(__file__).parents[1] / "cases"
INDEX = json.loads((CASES / "INDEX.json").read_text())


def plan(case_id: str) -> dict[str, Any]:
    [case] = [case for case in INDEX if case["id"] == case_id]
    return json.loads((CASES / case["file"]).read_text())


def whole(server: Server, prompt: Any, tokens: int, **options: Any) -> str:
    """Ask in one piece; return the text and everything that is reported about it."""
    return _facts(server.complete(prompt, tokens, logprobs=3, **options)["choices"])


def streamed(server: Server, prompt: Any, tokens: int, fifth: threading.Event | None = None) -> str:
    """Ask in a stream; return the same facts, put together from its events."""
    choice: dict[str, Any] = {"text": "", "logprobs": {}, "finish_reason": None}
    for number, event in enumerate(server.stream(prompt, tokens, logprobs=3)):
        assert "error" not in event, event
        [part] = event["choices"]
        choice["text"] += part["text"]
        choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
        for name, values in (part["logprobs"] or {}).items():
            choice["logprobs"].setdefault(name, []).extend(values or [])
        if number == 4 and fifth is not None:
            fifth.set()
    if fifth is not None:
        fifth.set()  # an answer of fewer events must not leave others waiting
    return _facts([choice])


def _facts(choices: list[dict[str, Any]]) -> str:
    names = ("text", "finish_reason", "logprobs")
    return json.dumps([{name: choice[name] for name in names} for choice in choices], sort_keys=True)


def test_d1_companions_arrivals_warm_ups_and_streaming_change_no_byte(cli):
    case = plan("D1")
    prompt, tokens = case["prompt"], case["max_tokens"]
    outcomes: dict[str, list[Any]] = {}

    def note(outcome: str, *arm: Any) -> None:
        outcomes.setdefault(outcome, []).append(arm)

    with serving(cli, MODEL) as server, concurrent.futures.ThreadPoolExecutor(10) as pool:

        def companion(number: int, begun: threading.Event) -> None:
            body = case["companion_prompts"][number % len(case["companion_prompts"])]
            events = server.stream(body, 20 + 5 * number)
            assert "error" not in next(events)
            begun.set()
            for event in events:
                assert "error" not in event, event

        def arm(companions: int, arrival: str, warmups: int) -> None:
            begun = [threading.Event() for _ in range(companions)]

            def start() -> list[concurrent.futures.Future[None]]:
                return [pool.submit(companion, i, event) for i, event in enumerate(begun)]

            fifth = threading.Event()
            others = start() if arrival == "before" else []
            if arrival == "before":
                assert all(event.wait(30) for event in begun)
            asked = pool.submit(streamed, server, prompt, tokens, fifth)
            if arrival == "mid":
                assert fifth.wait(30)
            others += start() if arrival != "before" else []
            beside = pool.submit(whole, server, prompt, tokens)
            note(asked.result(60), companions, arrival, warmups, "streamed")
            note(beside.result(60), companions, arrival, warmups, "whole")
            for other in others:
                other.result(60)

        note(whole(server, prompt, tokens), "the first request of this server")
        arms = list(product(case["companions"], case["arrival"]))
        for warmups in case["warmups"]:
            for number in range(warmups):
                server.complete(f"Unrelated request number {number}: " + "more " * number, 4)
            for companions, arrival in arms:
                arm(companions, arrival, warmups)
    assert len(outcomes) == 1, outcomes
    [outcome] = outcomes
    assert len(json.loads(outcome)[0]["logprobs"]["tokens"]) == tokens


@pytest.mark.parametrize("scale", [1, 8], ids=["block-16-as-given", "our-blocks-of-128"])
def test_d4_the_same_prompt_asked_again_gives_the_same_bytes_around_block_edges(cli, scale):
    """Lengths share their first blocks, so a reused block would show here, too."""
    case = plan("D4")
    block = case["block"]
    with serving(cli, MODEL) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        for length in case["lengths"]:
            blocks = round(length / block)
            count = blocks * block * scale + (length - blocks * block)
            ids = [2, *((7919 * i) % 20000 + 100 for i in range(count - 1))]
            ask = (ids, case["max_tokens"])
            outcomes = {whole(server, *ask, ignore_eos=True) for _ in range(case["repeats"])}
            # Beside others, its prefill is cut into other pieces.
            others = [pool.submit(server.complete, "word " * 40 * i, 4) for i in (1, 2)]
            outcomes.add(whole(server, *ask, ignore_eos=True))
            for other in others:
                other.result(60)
            assert len(outcomes) == 1, length


def test_d5_a_seed_repeats_no_seed_varies_and_the_seed_used_is_told(cli):
    case = plan("D5")
    with serving(cli, MODEL) as server:

        def ask(seed: int | None) -> tuple[str, int]:
            options = {"temperature": case["temperature"], "seed": seed}
            answer = server.complete(case["prompt"], case["max_tokens"], **options)
            return answer["choices"][0]["text"], answer["seed"]

        first_of_this_server = ask(42)
        for arm in case["arms"]:
            seeds = arm["seeds"] if "seeds" in arm else [arm["seed"]] * arm["times"]
            answers = [ask(seed) for seed in seeds]
            distinct = len({text for text, _ in answers})
            assert arm.get("distinct_min", 1) <= distinct <= arm.get("distinct", len(seeds)), (arm, answers)
            for seed, (text, used) in zip(seeds, answers, strict=True):
                assert isinstance(used, int) if seed is None else used == seed
                assert ask(used)[0] == text
        assert ask(42) == first_of_this_server
