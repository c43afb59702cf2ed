"""Presets: read strictly, chosen by the device's vendor, never by default."""

from __future__ import annotations

import pytest

from vox_host.errors import PluginError, UsageError
from vox_host.training.dataset import _how_many
from vox_host.training.options import Asked, settle
from vox_host.training.presets import Preset, choose_preset, load_presets

GB = 10**9
SHIPPED = load_presets()


def test_auto_takes_a_preset_that_was_made_for_the_vendor():
    chosen = {
        vendor: choose_preset("auto", SHIPPED, vendor=vendor, budget_bytes=64 * GB)
        for vendor in ("cpu", "nvidia", "apple")
    }
    assert chosen == {"cpu": "cpu", "nvidia": "nvidia", "apple": "apple"}


def test_auto_takes_the_first_one_whose_floor_fits_and_fails_closed_below_the_lowest():
    assert choose_preset("auto", SHIPPED, vendor="nvidia", budget_bytes=10 * GB) == "nvidia-small"
    with pytest.raises(UsageError) as caught:
        choose_preset("auto", SHIPPED, vendor="nvidia", budget_bytes=1 * GB)
    assert caught.value.code == "preset-none-fits"
    assert dict(caught.value.facts) == {"nvidia": "needs 11000 MB", "nvidia-small": "needs 2000 MB"}
    assert "1000 MB that are free" in caught.value.message


def test_auto_never_takes_the_smoke_preset_and_any_machine_may_be_given_it():
    only_smoke = {"smoke": SHIPPED["smoke"]}
    for vendor in ("cpu", "nvidia", "apple"):
        assert choose_preset("smoke", SHIPPED, vendor=vendor, budget_bytes=0) == "smoke"
        with pytest.raises(UsageError):
            choose_preset("auto", only_smoke, vendor=vendor, budget_bytes=64 * GB)
    assert "no quality gate" in SHIPPED["smoke"].summary


def test_the_smoke_preset_evaluates_few_rows_once_and_what_is_asked_for_stays():
    smoke = SHIPPED["smoke"]
    options = settle(Asked(), "smoke", smoke, examples=400, max_length=64)
    assert (options.steps, options.eval_every, options.save_every) == (4, 4, 4)
    assert settle(Asked(eval_every=1), "smoke", smoke, examples=400, max_length=64).eval_every == 1
    assert _how_many(None, 400, smoke.most_held_out) == 2 < _how_many(None, 400, None)
    assert _how_many(7, 400, smoke.most_held_out) == 7


def test_an_explicit_choice_is_never_changed():
    assert choose_preset("nvidia", SHIPPED, vendor="apple", budget_bytes=1) == "nvidia"


def test_an_unknown_preset_is_an_error_with_the_near_one():
    with pytest.raises(UsageError) as caught:
        choose_preset("nvidia-smal", SHIPPED, vendor="nvidia", budget_bytes=None)
    assert caught.value.message == (
        "no preset is called 'nvidia-smal' (there is 'nvidia-small'); nothing was started"
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("schema = 2\n[presets.a]\n", "schema"),
        ('schema = 1\n[presets.a]\nsummary = "s"\nlearning_rat = 1.0\n', "presets.a.learning_rat"),
        ('schema = 1\n[presets.a]\nrank = "8"\n', "presets.a.rank"),
        ('schema = 1\n[presets.a]\nvendors = ["intel"]\n', "presets.a.vendors.0"),
    ],
)
def test_a_file_that_is_not_right_is_refused_with_the_place(tmp_path, text, place):
    (tmp_path / "presets.toml").write_text(text)
    with pytest.raises(PluginError) as caught:
        load_presets(tmp_path / "presets.toml")
    assert place in dict(caught.value.facts)
    assert "install it again" in (caught.value.remedy or "")


def test_steps_and_epochs_exclude_each_other():
    fields = SHIPPED["cpu"].model_dump()
    with pytest.raises(ValueError, match="steps or epochs"):
        Preset(**{**fields, "steps": 3})
    with pytest.raises(ValueError, match="steps or epochs"):
        Preset(**{**fields, "epochs": None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", "1e308"),
        ("learning_rate", "1e-300"),
        ("weight_decay", "3e38"),
        ("max_gradient_norm", "1e39"),
        ("dropout", "0.9999999999"),
    ],
)
def test_a_number_that_float32_does_not_hold_is_named(tmp_path, name, value):
    numbers = {"rank": "8", "alpha": "8.0", "learning_rate": "0.001", "batch_size": "1", "max_length": "9"}
    lines = "".join(f"{key} = {text}\n" for key, text in {**numbers, name: value}.items())
    file = tmp_path / "presets.toml"
    file.write_text(
        'schema = 1\n[presets.a]\nsummary = "s"\nvendors = ["cpu"]\nfloor_mb = 0\nsteps = 1\n'
        f'targets = ["q_proj"]\n{lines}'
    )
    with pytest.raises(PluginError) as caught:
        load_presets(file)
    ((place, text),) = caught.value.facts
    assert place == f"presets.a.{name}"
    assert name == "dropout" or ("float32 holds" in text and f"found {float(value):g}" in text)
