"""What is said while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vox_host.cli.train_report import LineReport, Speed, TerminalReport, duration
from vox_host.cli.train_texts import print_end
from vox_host.runs.layout import RunDirectory
from vox_host.training.drive import StepSeen
from vox_host.training.pace import Course, Pace
from vox_plugin_api.train_messages import TrainBeginResult, TrainStepResult


def seen(step: int, *, tokens: int = 100, seconds: float = 0.5) -> StepSeen:
    result = TrainStepResult(
        step=step, loss=1.5, gradient_norm=1.0, learning_rate=0.1, trained_tokens=10, adapter_digest="ab" * 32
    )
    return StepSeen(result, 0, tokens, seconds)


def a_pace(steps: int, often: int | None = None) -> Pace:
    often = often or steps
    return Pace(steps=steps, eval_every=often, save_every=often, keep_last=1, patience=None)


def test_what_evaluations_and_saves_take_is_part_of_what_is_left_and_of_the_whole():
    now = [100.0]
    speed = Speed(lambda: now[0])

    def after(seconds: float, event, *arguments) -> None:
        now[0] += seconds
        event(*arguments)

    speed.begin()
    after(20.0, speed.evaluated)
    after(3.0, speed.saw, seen(1, seconds=3.0))
    # Three steps, and an evaluation after each of four; no save was seen yet.
    assert speed.eta_s(1, a_pace(4, 1)) == 3 * 3.0 + 4 * 20.0
    after(20.0, speed.evaluated)
    after(1.0, speed.saved)
    after(3.0, speed.saw, seen(2, seconds=3.0))
    assert speed.eta_s(2, a_pace(4, 1)) == 2 * 3.0 + 3 * 20.0 + 3 * 1.0
    # Only at the end, due or not.
    assert speed.eta_s(2, a_pace(5, 4)) == 3 * 3.0 + 2 * (20.0 + 1.0)
    assert (speed.passed, speed.seconds) == (47.0, 6.0)


def test_speed_and_what_is_left_are_those_of_the_last_steps():
    speed = Speed()
    for step in range(30):
        speed.saw(seen(step, seconds=10.0 if step < 10 else 0.5))
    assert speed.tokens_per_s == pytest.approx(200.0)
    assert speed.eta_s(30, a_pace(36)) == pytest.approx(3.0)
    assert (speed.tokens, speed.seconds) == (3000, 110.0)


def test_lines_come_at_the_first_step_and_the_last_not_at_each(capsys):
    report = LineReport(a_pace(50))
    for step in range(1, 51):
        report.stepped(seen(step))
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "  step 1/50  loss 1.5000  200 tokens/s  24 s left"
    assert shown[-1] == "  step 50/50  loss 1.5000  200 tokens/s  0 s left"
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.6, "1 min 0 s"), (185, "3 min 5 s"), (7440, "2 h 4 min")]
)
def test_a_time_reads_as_people_say_it(seconds, text):
    assert duration(seconds) == text


def test_a_run_that_was_finished_says_so_and_not_that_it_trained(tmp_path, capsys):
    facts = {"ended": "steps", "step": 4, "steps": 4, "seconds": 0.0, "tokens_per_s": None}
    facts |= {"held_out_loss_before": None, "best_held_out_loss": None, "peak_memory_bytes": None}
    print_end(RunDirectory(tmp_path / "run"), facts)
    said = capsys.readouterr().out
    assert "was finished before: 4 steps trained; nothing is left to do" in said and " in 0 s" not in said
    print_end(RunDirectory(tmp_path / "run"), {**facts, "tokens_per_s": 9.5})
    assert "trained 4 steps in 0 s" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 50, 71, 72, 120])
def test_the_time_that_is_left_is_shown_however_narrow_the_terminal(width):
    said = io.StringIO()
    report = TerminalReport(a_pace(10_000), Console(file=said, width=width, force_terminal=True))
    begun = TrainBeginResult(
        step=0, matrices=["layers.0.mlp.up_proj"], parameters=8, adapter_digest="ab" * 32
    )
    report.begun(begun, Course())
    report.stepped(seen(1, tokens=100_000))
    report.close()
    shown = said.getvalue()
    assert "step 1/10000" in shown and "loss 1.5000" in shown and "1 h 23 min" in shown
    assert "…" not in shown
