"""One table of every lane's digests on a model's prompts, emulated aarch64 included, all of one kind.

    python tests/conformance/lanes_table.py CERTIFICATE

CERTIFICATE was made by `vox-host parity` with its own prompts, so it knows the lanes of this machine. Of
aarch64 the same requests are computed again: a capture of the model's native calls is repeated by the
cross-compiled library under an emulator. `logits` is SHA-256 over the logits of all positions of a prompt,
as `evaluate` makes it, and `tokens` the greedy answer: both mean the same in every line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conformance.capture_model import record_answer
from conformance.emulated import build_arm, missing_for_arm

ARM = ("neon", "neon_dot")
Row = tuple[str, int, str, tuple[int, ...]]
"""Lane, prompt, digest of the prompt's logits, tokens."""


def main(certificate: Path) -> int:
    """Print the table; 0 if all lines of a prompt are equal. A lane that can't be run here is named."""
    facts = json.loads(certificate.read_text())
    rows = rows_of(facts)
    missing = missing_for_arm()
    if not missing:
        rows += arm_rows(facts, rows)
    for lane, prompt, logits, tokens in sorted(rows, key=lambda row: row[1]):
        answer = " ".join(map(str, tokens))
        print(f"prompt {prompt}  {lane:<27}  logits sha256:{logits[:32]}  tokens {answer}")
    if missing:
        print(f"NOT RUN: aarch64: {' and '.join(missing)} not found")
    found = apart(rows)
    for line in found:
        print(f"DIFFERS: {line}")
    prompts = len({prompt for _, prompt, _, _ in rows})
    lanes = len({lane for lane, _, _, _ in rows})
    print(f"{prompts} prompts, {lanes} lanes: {'DIFFERENT' if found else 'identical logits and tokens'}")
    return 1 if found or lanes < 2 else 0


def rows_of(facts: dict[str, Any]) -> list[Row]:
    """Return the lines of a certificate."""
    return [
        (side["label"], answer["number"], answer["logits_digest"], tuple(answer["token_ids"]))
        for side in facts["sides"]
        for answer in side["answers"]
    ]


def apart(rows: list[Row]) -> list[str]:
    """Say of every line that it is not the first one of its prompt."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(row[1], row)
    return [
        f"{lane} on prompt {prompt}, from {first[prompt][0]}: {what}"
        for lane, prompt, logits, tokens in rows
        for what, is_same in (
            ("logits", logits == first[prompt][2]),
            ("tokens", tokens == first[prompt][3]),
        )
        if not is_same
    ]


def arm_rows(facts: dict[str, Any], rows: list[Row]) -> list[Row]:
    """Compute a certificate's requests again on emulated aarch64.

    Raises:
        AssertionError: an operator there makes other bytes; its name is in the message.
    """
    from vox_host.models.catalogue import Catalogue
    from vox_host.models.tokenizer import Tokenizer
    from vox_host.parity.requests import REFERENCE_PROMPTS
    from vox_host.settings import load_settings

    model = Catalogue(load_settings().models_dir).find(facts["model"])
    assert model.digest == facts["model_digest"], "the certificate is about another model"
    tokenizer, command = Tokenizer.load(model.path), build_arm()
    answers = {prompt: tokens for _, prompt, _, tokens in reversed(rows)}
    assert len(answers) == len(REFERENCE_PROMPTS), "the certificate is about other prompts"
    made: list[Row] = []
    for number, text in enumerate(REFERENCE_PROMPTS, start=1):
        with tempfile.TemporaryDirectory(prefix="vox-lanes-") as folder:
            capture = Path(folder)
            record_answer(capture, model.path, tokenizer.encode(text), len(answers[number]))
            for isa in ARM:
                print(f"  {isa} under qemu: prompt {number}", file=sys.stderr, flush=True)
                done = subprocess.run(command("vox_recompute", capture, isa), capture_output=True, text=True)
                assert done.returncode == 0, f"{isa}, prompt {number}:\n{done.stdout}{done.stderr}"
                made.append((f"aarch64 {isa} (emulated)", number, *shown(done.stdout)))
    return made


def shown(text: str) -> tuple[str, tuple[int, ...]]:
    """Return what a recompute printed: the digest of the prompt's logits, and the tokens."""
    (logits,) = re.findall(r"^prompt (\w{64})$", text, re.MULTILINE)
    tokens = re.findall(r"^token/\d+ \w+ (\d+)$", text, re.MULTILINE)
    return logits, tuple(map(int, tokens))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
