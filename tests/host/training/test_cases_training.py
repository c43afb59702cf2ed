"""Cases that broke other trainers: R1_rows, R4, R5 and R8 of tests/cases/hand/training."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest

from fixtures.training_runs import a_job, a_model, results, run_to_end, some_options
from vox_host.training.metrics import read_lines
from vox_plugin_api.train_messages import TrainExample

CASES = Path(__file__).parents[2] / "cases" / "hand"
VOCAB = 97


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return a_model(tmp_path_factory.mktemp("model"))


def examples(name: str) -> list[TrainExample]:
    """The rows with a token per character: these cases are about sums, not about tokens."""
    read = []
    for line in (CASES / "training" / name).read_text().splitlines():
        row = json.loads(line)
        prompt, answer = ([ord(c) % VOCAB for c in row[key]] for key in ("prompt", "completion"))
        read.append(
            TrainExample(token_ids=prompt + answer, loss_mask=[False] * len(prompt) + [True] * len(answer))
        )
    return read


def lines_of_run(folder: Path, model: Path, rows: list[TrainExample], held_out=(), **options) -> list[dict]:
    settled = some_options(warmup_steps=0, schedule="constant", eval_every=1, **options)
    run_to_end(a_job(folder, model, settled, train=rows, held_out=held_out), model)
    return read_lines(folder / "metrics.jsonl")


@pytest.mark.parametrize("dropout", json.loads((CASES / "training" / "R4_plan.json").read_text())["dropout"])
def test_how_a_step_is_cut_shows_in_no_loss_and_no_byte_of_the_adapter(fast_path, model, dropout):
    plan = json.loads((CASES / "training" / "R4_plan.json").read_text())
    rows = examples(Path(plan["rows"]).name)
    # Ours are cut evenly, so that [2, 4] is [4, 2] here.
    sizes = {max(split) for split in plan["splits"]}
    runs = [
        lines_of_run(
            fast_path / str(size), model, rows, steps=3, batch_size=6, seed=plan["seed"], dropout=dropout,
            micro_batch_size=size,
        )
        for size in sorted(sizes)
    ]  # fmt: skip
    assert len(runs) == 4
    assert len(runs[0]) == 3
    assert all(run == runs[0] for run in runs)


def test_one_step_of_four_is_not_four_steps_of_one(fast_path, model):
    # R1_rows: accumulation that divides by rows weighs a long answer like a short one.
    rows = examples("R1_rows.jsonl")[:4]
    whole, single = (
        lines_of_run(fast_path / str(size), model, rows, steps=1, batch_size=4, micro_batch_size=size)
        for size in (4, 1)
    )
    assert whole[0]["adapter_digest"] == single[0]["adapter_digest"]
    assert whole[0]["trained_tokens"] == 1 + 13 + 5 + 9


def test_a_held_out_set_smaller_than_a_batch_has_a_finite_loss(fast_path, model):
    # R8_val2: two rows, a batch of four.
    lines = lines_of_run(
        fast_path / "run", model, examples("R1_rows.jsonl"), examples("R8_val2.jsonl"), steps=1, batch_size=4
    )
    losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def test_training_leaves_the_base_as_it_was_and_moves_the_adapter(fast_path):
    # R5_plan: every layer is run twice here, so there is one way only.
    plan = json.loads((CASES / "training" / "R5_plan.json").read_text())
    base = CASES / Path(plan["model"]).relative_to("hand")
    rows = [TrainExample(token_ids=[1, 2, 3, 4], loss_mask=[False, True, True, True])]

    def digests() -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in base.iterdir()}

    before = digests()
    options = some_options(targets=plan["targets"], steps=plan["steps"], batch_size=1, warmup_steps=0)
    for name in ("one", "other"):
        run_to_end(a_job(fast_path / name, base, options, train=rows, held_out=()), base)
    assert digests() == before
    (line,) = read_lines(fast_path / "one" / "metrics.jsonl")
    assert line["gradient_norm"] > 0
    assert results(fast_path / "one") == results(fast_path / "other")
