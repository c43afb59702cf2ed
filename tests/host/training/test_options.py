"""Options: what the command line left open is filled in from the preset, once."""

from __future__ import annotations

import pytest

from vox_host.errors import UsageError
from vox_host.training.options import Asked, parse_targets, settle
from vox_host.training.presets import load_presets

CPU = load_presets()["cpu"]


def settled(examples: int = 100, **asked):
    return settle(Asked(**asked), "cpu", CPU, examples=examples, max_length=64)


def test_what_is_left_open_comes_from_the_preset_and_what_is_given_stays():
    options = settled(rank=4, learning_rate=0.25, batch_size=3, seed=9)
    assert (options.rank, options.learning_rate, options.batch_size, options.seed) == (4, 0.25, 3, 9)
    assert options.targets == CPU.targets
    # 34 steps an epoch: the last one of each has one example.
    assert (options.steps, options.epochs) == (68, 2.0)
    assert options.alpha / options.rank == CPU.alpha / CPU.rank
    assert (options.eval_every, options.save_every) == (7, 7)
    assert options.warmup_steps == int(68 * CPU.warmup_share)


def test_steps_and_epochs_of_the_command_line_take_the_place_of_the_presets():
    assert settled(steps=5).steps == 5
    assert settled(epochs=1).steps == 25
    with pytest.raises(UsageError, match="not both"):
        settled(steps=5, epochs=1)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_shortest_run_has_a_schedule_that_the_wire_admits(steps):
    begin = settled(steps=steps).begin()
    assert begin.schedule is not None and begin.schedule.total_steps == steps


def test_a_resumed_run_gives_the_folder_and_nothing_that_it_holds():
    begin = settled(micro_batch_size=2).begin(resume_dir="/a/folder", remember_bytes=77)
    assert begin.model_dump(exclude_none=True) == {
        "resume_dir": "/a/folder",
        "micro_batch_size": 2,
        "devices": 1,
        "remember_bytes": 77,
    }
    assert settled().begin(remember_bytes=5).remember_bytes == 5


def test_targets_are_names_or_the_word_for_all():
    assert parse_targets("q_proj, lm_head") == ("q_proj", "lm_head")
    assert len(parse_targets("all-linear")) == 7
    for text in ("", "q_proj,", "q_proj,q_proj"):
        with pytest.raises(UsageError, match="--targets"):
            parse_targets(text)


@pytest.mark.parametrize(
    "text", ["all-linear,lm_head", "lm_head, all-linear", "all-linear,", "all-linear,all-linear"]
)
def test_the_word_for_all_stands_alone_and_the_error_spells_it(text):
    with pytest.raises(UsageError, match="all-linear stands alone") as caught:
        parse_targets(text)
    spelled = parse_targets(caught.value.remedy.split("--targets ")[1])
    assert set(spelled) == set(parse_targets("all-linear")) | ({"lm_head"} if "lm_head" in text else set())
