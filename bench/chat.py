"""What a chat's later turns cost: seconds to the first token, with and without what earlier turns computed.

Two chats of the same turns, each in a `vox-host serve` of its own, one after the other (A B A B ...). In the
second, each turn's first word is another one, so that nothing of its prompt was there before.

    python bench/chat.py --model gemma-3-270m [--turns 8] [--rounds 3] [--out bench/results]
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving import cpu_name, serving

SYSTEM = (
    "You help in the archive of a small harbour town. Answer in two or three sentences, name the year "
    "where you know it, and say so where you do not. The archive holds letters, ledgers and maps."
)
ASKED = (
    "What does the oldest letter say of the harbour?",
    "Who wrote it, and to whom was it sent?",
    "Was the dredger paid for by the town or by the county?",
    "What did the engineer say of the storm, in his own words?",
    "How long did the works take in the end?",
    "Which ships are named in the ledger of that winter?",
    "What became of the old light after the new one was built?",
    "Please sum up what we have found so far.",
)
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
"""First words, one token each; those of both chats are as long."""


def answer(port: int, model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Stream one turn; return its text, seconds to the first token, and the usage."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began, first_s, text, usage = time.perf_counter(), 0.0, "", {}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            raise_if_refused(line)
            continue
        event = json.loads(line[6:])
        for choice in event["choices"]:
            first_s = first_s or time.perf_counter() - began
            text += choice["text"]
        usage = event.get("usage") or usage
    connection.close()
    return {"text": text, "first_token_s": first_s, "usage": usage}


def raise_if_refused(line: bytes) -> None:
    if line.startswith(b"{"):
        raise SystemExit(f"the server refused: {line.decode()}")


def chat(port: int, model: str, turns: int, tokens: int, *, is_kept: bool) -> list[dict[str, Any]]:
    """Go through a chat; one row a turn."""
    rows = []
    said = ""
    for turn in range(turns):
        said += f"\nUser: {ASKED[turn % len(ASKED)]}\nArchivist:"
        word = NUMBERS[0 if is_kept else (turn + 1) % len(NUMBERS)]
        found = answer(port, model, f"{word} {SYSTEM}{said}", tokens)
        said += found["text"]
        usage = found["usage"]
        rows.append(
            {
                "turn": turn + 1,
                "first_token_s": round(found["first_token_s"], 4),
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens"),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides: dict[str, list[list[dict[str, Any]]]] = {"with": [], "without": []}
    peaks: dict[str, list[int]] = {"with": [], "without": []}
    for _ in range(options.rounds):
        for side, rounds in sides.items():
            with serving(options.model, options.threads) as (port, _, memory):
                answer(port, options.model, "hello", 2)
                is_kept = side == "with"
                rounds.append(chat(port, options.model, options.turns, options.tokens, is_kept=is_kept))
                peaks[side].append(round(memory.peak_bytes / 2**20))
    print(f"{'turn':>4} {'prompt':>7} {'reused':>7} {'with, ms':>9} {'without, ms':>12} {'ratio':>6}")
    for turn in range(options.turns):
        with_s, without_s = (
            statistics.median(rows[turn]["first_token_s"] for rows in sides[side]) for side in sides
        )
        row = sides["with"][0][turn]
        print(
            f"{turn + 1:>4} {row['prompt_tokens']:>7} {row['cached_tokens'] or 0:>7} "
            f"{1000 * with_s:>9.0f} {1000 * without_s:>12.0f} {without_s / with_s:>6.2f}"
        )
    print(f"peak memory of host and worker, MiB: {peaks}")
    if options.out is not None:
        now = datetime.now(UTC)
        path = options.out / f"chat-{now:%Y-%m-%d}.json"
        about = {
            "time": now.isoformat(timespec="seconds"),
            "cpu": cpu_name(),
            "platform": platform.platform(),
            "model": options.model,
            "threads": options.threads,
            "tokens_of_an_answer": options.tokens,
            "peak_pss_mib": peaks,
            "sides": sides,
        }
        path.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
